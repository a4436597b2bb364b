"""The warnings and errors that users may want to name, in a filter or an `except`. Must not import torch."""

from __future__ import annotations

# The exceptions of pytest.fail and pytest.skip, by names under which they can be subclassed with types.
from _pytest.outcomes import Failed, Skipped


class RankStateWarning(UserWarning):
    """A test left something behind in its rank that would have changed later tests; it was put back."""


class RankLeakWarning(UserWarning):
    """A test left something in its rank: a process (it was ended), a thread, an open file, shared memory."""


class PeerFailed(AssertionError):
    """Another rank failed a case of a test that this rank shares with it; this rank itself did not fail."""


class Diverged(AssertionError):
    """Two runs, or the ranks of one, differ: the test runs again to find where they parted."""


class CollectiveRace(AssertionError):
    """A tensor of an asynchronous collective was used too early: found under `--skew`."""


class InjectedFault(RuntimeError):
    """The exception of `faults.fail`, in the place of a collective."""


class FakeValueError(Failed):
    """A test on a rank of a fake world read a value that would come from another rank; there is none.

    A failure of pytest, so that no `except Exception` of what compares values turns it into something else.
    """


class WorldError(RuntimeError):
    """A world could not be started or kept; the message says which rank, and why."""


class LaunchError(WorldError):
    """Ranks cannot be started on this machine; the message says why and what to do."""


class MessageRefused(ConnectionError):
    """A message from another host is not what that host has sent, or not in its place."""


class NotOffered(Skipped):
    """A plan does not offer this layout: its test is skipped. Every rank must raise it.

    Args:
        msg: the reason, such as "ep needs fsdp".
    """
