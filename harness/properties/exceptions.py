"""What ends a property test on ranks, other than an example that fails."""

from __future__ import annotations


class OutOfStep(BaseException):
    """Ranks have drawn or decided differently. No example: search and shrinking make no sense any more.

    Not an `Exception`, which Hypothesis would take for a failing example and try to shrink.
    """


class LeftAlone(OutOfStep):
    """Another rank has ended the test: what goes on here means nothing."""
