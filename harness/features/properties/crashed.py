"""Examples in which a rank died or hung: failed at once when they come up again. Runs inside a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.features.properties.hypothesis_internals import call_after_draws, call_before_rules
from lockstep.features.properties.messages import CrashedExample, RunningExampleFile
from lockstep.protocol import VICTIM_OF_A_TRIAL

__hypothesistracebackhide__ = True  # frames of ours do not belong into a failure's traceback


class RankCrashed(pytest.fail.Exception):  # type: ignore[misc, name-defined]
    """A rank died or hung in this example in an earlier world.

    A failure that an `except Exception` in a test's body does not catch.

    Attributes:
        index: place among the examples that ended a world.
    """

    def __init__(self, index: int, crashed: CrashedExample) -> None:
        super().__init__(f"{VICTIM_OF_A_TRIAL}{crashed.how}", pytrace=False)
        self.index = index


class CrashGuard:
    """Fails an example that ended an earlier world, before it can end this one.

    It checks where a body continues: as it begins, after each draw, as each rule of a state machine begins.

    Attributes:
        has_met_last: whether the latest of these examples has come up.
    """

    def __init__(self, running: RunningExampleFile) -> None:
        self._running = running
        self._crashed: tuple[CrashedExample, ...] = ()
        self.has_met_last = False

    def begin_item(self, crashed: tuple[CrashedExample, ...]) -> None:
        self._crashed = crashed
        self.has_met_last = False

    @property
    def is_expected(self) -> bool:
        """True if any of these examples may come up."""
        return bool(self._crashed)

    def check(self) -> None:
        """Raise if the example has reached the point where it ended a world.

        Raises:
            RankCrashed: it has.
        """
        __tracebackhide__ = True
        if not self._crashed:
            return
        now = self._running.now()
        for index, crashed in enumerate(self._crashed):
            if crashed.example.is_same(now):
                self.has_met_last = self.has_met_last or index == len(self._crashed) - 1
                raise RankCrashed(index, crashed)

    def install(self) -> None:
        """Check after each draw of a body, and as each rule of a state machine begins."""
        call_after_draws(self.check)
        call_before_rules(self.check)

    def wrap_body(self, test: Callable[..., object]) -> Callable[..., object]:
        """Return the body of a property with a check at its beginning."""

        @functools.wraps(test)
        def body(*args: Any, **kwargs: Any) -> object:
            __tracebackhide__ = True
            self._running.enter_body()
            self.check()
            return test(*args, **kwargs)

        return body
