"""Examples that cost a world: not run again, but failed at once where they would have cost another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from _pytest.outcomes import Failed
from hypothesis import stateful
from hypothesis.strategies._internal.core import DataObject

from harness.properties.messages import VICTIM_OF_AN_EXAMPLE, RunningExampleFile
from harness.protocol import CrashedExample

__hypothesistracebackhide__ = True  # our frames are no news in a failure's traceback
_WRAPPED = "_lockstep_wrapped"


class RankCrashed(Failed):
    """A rank has died or hung in this example, in a world before this one.

    A failure that no `except Exception` of a test's body catches.

    Attributes:
        number: which of the lost examples it is.
    """

    def __init__(self, number: int, crashed: CrashedExample) -> None:
        super().__init__(f"{VICTIM_OF_AN_EXAMPLE}{crashed.how}", pytrace=False)
        self.number = number


class CrashGuard:
    """Looks out for them, at the moments at which a body goes on: as it begins, after a draw, in a rule.

    Attributes:
        has_met_last: whether the one that was lost last has come up.
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
        """Whether any may come up."""
        return bool(self._crashed)

    def check(self) -> None:
        """Raise if the example has come to where it cost a world.

        Raises:
            RankCrashed: it has.
        """
        __tracebackhide__ = True
        if not self._crashed:
            return
        now = self._running.now()
        for number, crashed in enumerate(self._crashed):
            if crashed.example.is_same(now):
                self.has_met_last = self.has_met_last or number == len(self._crashed) - 1
                raise RankCrashed(number, crashed)

    def watch(self) -> None:
        """Check after each draw of a body, and as each rule of a state machine begins."""
        draw = DataObject.draw

        @functools.wraps(draw)
        def draw_and_check(data: DataObject, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            drawn = draw(data, *args, **kwargs)
            self.check()
            return drawn

        DataObject.draw = draw_and_check  # type: ignore[method-assign, assignment]
        set_up = stateful.RuleBasedStateMachine.setup_state.__func__  # type: ignore[attr-defined]

        def setup_state(cls: Any) -> Any:
            state = set_up(cls)
            for rule in (*state.rules, *state.initializers):
                if not hasattr(rule.function, _WRAPPED):
                    object.__setattr__(rule, "function", self._checked(rule.function))
            return state

        stateful.RuleBasedStateMachine.setup_state = classmethod(setup_state)  # type: ignore[assignment]

    def _checked(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> object:
            __tracebackhide__ = True
            self.check()
            return function(*args, **kwargs)

        setattr(checked, _WRAPPED, True)
        return checked

    def body(self, test: Callable[..., object]) -> Callable[..., object]:
        """Return the body of a property, made to check as it begins."""

        @functools.wraps(test)
        def body(*args: Any, **kwargs: Any) -> object:
            __tracebackhide__ = True
            self._running.enter_body()
            self.check()
            return test(*args, **kwargs)

        return body
