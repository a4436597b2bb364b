"""What tells one bug from another: agreed on by the ranks, so that their engines sort failures alike."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis.errors import DeadlineExceeded
from hypothesis.internal.escalation import InterestingOrigin

from harness.properties.messages import Origin

_ATTRIBUTE = "_lockstep_origin"


def origin_of(error: BaseException) -> Origin:
    """Return the origin of a failure in a form that can be sent."""
    found = InterestingOrigin.from_exception(error)
    return Origin(str(found), type(error).__name__, found.filename, found.lineno)


def set_origin(error: BaseException, origin: Origin) -> None:
    """Let Hypothesis take an exception for the one that all ranks agree on."""
    kind = DeadlineExceeded if origin.exception == DeadlineExceeded.__name__ else _kind(origin)
    setattr(error, _ATTRIBUTE, InterestingOrigin(kind, origin.filename, origin.lineno, (), ()))


@functools.cache
def _kind(origin: Origin) -> type[BaseException]:
    return type(origin.exception, (Exception,), {"__module__": __name__})


def respect_agreed_origins() -> None:
    """Let `InterestingOrigin.from_exception` return what was set."""
    original = InterestingOrigin.from_exception.__func__  # type: ignore[attr-defined]

    def from_exception(
        cls: type[InterestingOrigin], exception: BaseException, /, *args: Any, **kwargs: Any
    ) -> Any:
        agreed = getattr(exception, _ATTRIBUTE, None)
        return original(cls, exception, *args, **kwargs) if agreed is None else agreed

    InterestingOrigin.from_exception = classmethod(from_exception)  # type: ignore[method-assign, assignment]
