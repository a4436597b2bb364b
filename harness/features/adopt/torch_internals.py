"""Private names of torch's test classes, each with what to look for when it moves. Seen in torch 2.13.

Used on both sides. A class derives from one of torch's only where its module is loaded, so modules are looked
up, never imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

COMMON = "torch.testing._internal.common_distributed"


def base(name: str) -> type | None:
    """Return a base class of torch's by name, None if nothing in this process has imported it."""
    found: type | None = getattr(sys.modules.get(COMMON), name, None)
    return found


def is_a(cls: type, name: str) -> bool:
    """Return whether a class derives from a base class of torch's."""
    found = base(name)
    return found is not None and issubclass(cls, found)


@contextlib.contextmanager
def variables_restored(names: Iterable[str]) -> Iterator[None]:
    """Restore variables of the environment at the end: what torch sets is not reported as left behind."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def skip_message(code: object) -> str | None:
    """Return the message of an exit code of TEST_SKIPS, None if it is no such code."""
    skips: dict[str, Any] = sys.modules[COMMON].TEST_SKIPS
    return next((str(skip.message) for skip in skips.values() if skip.exit_code == code), None)


def timeout_of(method: str) -> float:
    """Return the seconds that torch allows a method beyond those of all, 0 for most."""
    # `TIMEOUT_OVERRIDE`, which `get_timeout` reads.
    overrides: dict[str, float] = getattr(sys.modules[COMMON], "TIMEOUT_OVERRIDE", {})
    return float(overrides.get(method, 0.0))


def seed() -> None:
    """Seed as torch seeds a child before its test."""
    sys.modules["torch.testing._internal.common_utils"].set_rng_seed()


def parse_to() -> Any:
    """Return the function that reads the arguments of `Module.to`. If it moves: what that calls first."""
    return sys.modules["torch"]._C._nn._parse_to


def is_initialized() -> bool:
    """Return whether there is a default process group. Called in ranks, where torch is loaded."""
    return bool(sys.modules["torch.distributed"].is_initialized())


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Keep torch's launchers from logging what they are about to do: here they are only asked."""
    with mock.patch.object(sys.modules[COMMON], "logger", mock.Mock()):
        yield
