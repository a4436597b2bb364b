"""Hypothesis in a rank's pytest session: found once a test uses it, and kept in step from then on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.properties.examples import Examples
    from harness.protocol import RunItem
    from harness.rank.process import Rank


class Properties:
    """The property tests of one rank; imports nothing of Hypothesis before a test file does."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._examples: Examples | None = None

    @contextlib.contextmanager
    def of_item(self, order: RunItem) -> Iterator[None]:
        """Keep the properties of one item in step."""
        if "hypothesis" not in sys.modules:
            yield
            return
        examples = self._examples = self._examples or self._start()
        examples.begin_item(order)
        try:
            yield
        finally:
            examples.end_item()

    def _start(self) -> Examples:
        from harness.properties.examples import Examples
        from harness.properties.state import keep_in_step

        examples = Examples(self._rank, self._rank.spec)
        keep_in_step(examples)
        return examples
