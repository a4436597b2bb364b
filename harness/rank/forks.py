"""Forked children of a rank, which end where their test would. Runs inside a rank."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Generator

import pytest

from lockstep.rank.world_fixture import RankWorld


class Forks:
    """Ends forked children of this process, copies of the rank that must not go on as the rank.

    A child ends where its test would: where it comes back to the rank's own code. The children of
    multiprocessing never come back here; they only leave the rank's connections to the rank.

    Args:
        world: has its number, for the text.
        detach: called in each child as it is made, before anything of the test; gives up what belongs to the
            rank alone.
    """

    def __init__(self, world: RankWorld, detach: Callable[[], None]) -> None:
        self._world = world
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=detach)

    def end_child(self, error: BaseException | None = None) -> None:
        """Return in the rank; in a forked child, write to standard error how it ended, and end it.

        Its exit code is 0 if it came to the end of what it ran, 1 if that raised, or what it gave `sys.exit`.
        """
        if os.getpid() == self._pid:
            return
        match error:
            case None:
                how, status = "reached the end of its code there and was ended", 0
            case SystemExit(code=code):
                how = f"exited with {code!r}"
                status = code if isinstance(code, int) else int(code is not None)
            case _:
                what = "".join(traceback.format_exception_only(error)).strip()
                innermost = traceback.extract_tb(error.__traceback__)[-1]
                how = f"raised {what} at {innermost.filename}:{innermost.lineno} and was ended"
                status = 1
        with contextlib.suppress(OSError):
            os.write(
                2, f"rank {self._world.rank}: process {os.getpid()}, forked by the test, {how}\n".encode()
            )
        os._exit(status)

    @pytest.hookimpl(wrapper=True, trylast=True)  # innermost: no other plugin's code runs in a child
    def pytest_fixture_setup(self) -> Generator[None, object, object]:
        __tracebackhide__ = True
        return (yield from self.guard())

    def guard(self) -> Generator[None, object, object]:
        """Run what a hook wraps; end a child that comes out of it."""
        __tracebackhide__ = True
        try:
            result = yield
        except BaseException as error:
            self.end_child(error)
            raise
        self.end_child()
        return result
