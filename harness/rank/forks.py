"""What a test forks is a copy of its rank, and must not go on as the rank: it ends where its test would.

A plugin of the rank's pytest session, and a hook of `os.fork`. What multiprocessing forks never comes back
here, and needs the hook only.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress

import pytest

__tracebackhide__ = True  # the frames of hooks are no news in a test's traceback


class Copies:
    """Ends copies of this process wherever one comes back to the rank's own code.

    Args:
        rank: its number, for the text.
        let_go: called in each copy as it is made, before anything of the test; lets go of what belongs to
            the rank alone.
    """

    def __init__(self, rank: int, let_go: Callable[[], None]) -> None:
        self._rank = rank
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=let_go)

    def end_copy(self, error: BaseException | None = None) -> None:
        """Return in the rank; in a copy of it, say on standard error what became of it, and end it.

        Its exit code is 0 if it came to the end of what it ran, 1 if that raised, or what it gave `sys.exit`.
        """
        if os.getpid() == self._pid:
            return
        with suppress(OSError):
            how = _how(error)
            os.write(2, f"rank {self._rank}: process {os.getpid()}, forked by the test, {how}\n".encode())
        os._exit(_exit_code(error))

    def _guard(self) -> Generator[None, object, object]:
        try:
            result = yield
        except BaseException as error:
            self.end_copy(error)
            raise
        self.end_copy()
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        return (yield from self._guard())

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_fixture_setup(self) -> Generator[None, object, object]:
        return (yield from self._guard())

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        return (yield from self._guard())  # of unittest, whose methods are no functions of pytest's

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        self.end_copy(call.excinfo and call.excinfo.value)  # of a subtest, above all

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_post_finalizer(self) -> None:
        self.end_copy()


def _how(error: BaseException | None) -> str:
    match error:
        case None:
            return "came to the end of what it ran there and was ended"
        case SystemExit():
            return f"exited with {error.code!r}"
        case _:
            what = "".join(traceback.format_exception_only(error)).strip()
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            return f"raised {what} at {innermost.filename}:{innermost.lineno} and was ended"


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return int(error is not None)
