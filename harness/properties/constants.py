"""The constants that Hypothesis reads in imported modules and likes to draw: the same on every rank."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis.internal.conjecture import providers

from harness.properties.examples import Examples

_KINDS = ("integers", "floats", "bytes", "strings")


class SharedConstants:
    """Holds the constants still while a property runs, and equal where ranks have imported other modules."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self._read = providers._get_local_constants
        self._differed = False

    def settle(self) -> None:
        """Agree on the constants of the property that begins."""
        constants: Any = self._read()
        found = {kind: list(getattr(constants, kind)) for kind in _KINDS}
        digest = hashlib.blake2b(repr(found).encode(errors="surrogatepass"), digest_size=16).digest()
        differ = len(set(self._examples.ask_all("the constants of modules", digest))) > 1
        if differ:
            constants = type(constants)(**self._examples.ask_all("the constants in full", found)[0])
        if differ or self._differed:
            providers.CONSTANTS_CACHE.cache.clear()
        self._differed = differ
        providers._get_local_constants = lambda: constants

    def release(self) -> None:
        """Let Hypothesis read them itself again."""
        providers._get_local_constants = self._read
