"""The half of a rank: its caches, what a compilation leaves in the process, and the fixture's record."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import pytest
import torch

from lockstep.backends import meets
from lockstep.features.compiles import FEATURE, FINDINGS
from lockstep.features.compiles.caches import RankCaches
from lockstep.features.compiles.compilation import Frame
from lockstep.features.compiles.compiles import Compiles, compiler_needed
from lockstep.features.compiles.torch_internals import (
    TRACE,
    hide_trace_from_root,
    is_without_compiler,
    name_compile_threads,
    on_compile,
    tensor_data_variable,
)
from lockstep.features.compiles.trace import TraceReader
from lockstep.hookspecs import Ending
from lockstep.protocol import Part
from lockstep.subtests import only_cases
from lockstep.tracebacks import is_installed

if TYPE_CHECKING:
    from lockstep.features.compiles.finding import Finding
    from lockstep.protocol import RunItem
    from lockstep.rank.session import RankSession
    from lockstep.rank.wire import Wire

__tracebackhide__ = True


class Compiler:
    """The compiler of this process, between tests: a plugin from the first compilation on.

    Args:
        manager: registers it then; a rank that compiles nothing calls none of its hooks.
    """

    def __init__(self, session: RankSession, directory: str, manager: pytest.PytestPluginManager) -> None:
        self._session = session
        self._manager = manager
        self._caches = RankCaches(directory, session.rank.spec, self._compiles_first)
        self._has_compiled = False
        self._lacks_compiler = False
        self._recursion_limit = 0
        self._watched: Compiles | None = None

    def install(self) -> None:
        """Prepare the process, which most often compiles nothing."""
        hide_trace_from_root()
        # Inductor sets it as it loads code, and leaves it: so it is no change that a test makes.
        os.environ.update(tensor_data_variable())
        self._caches.install()
        if not meets(self._session.world.backend):
            # One process stands for any rank of a fake world: what it keeps would be of all of them.
            os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

    @contextmanager
    def watched(self) -> Iterator[Compiles]:
        """Read torch's trace inside; a failure's report has what was read."""
        rank = self._session.rank
        self._register()  # to compare, also where one rank compiles nothing
        reader = TraceReader(rank.spec.session.cwd, self._send)
        self._watched = Compiles(rank, self._session.world.rank, reader)
        TRACE.addHandler(reader)
        try:
            yield self._watched
        finally:
            TRACE.removeHandler(reader)
            self._watched = None

    def _send(self, place: int, frame: Frame) -> None:
        """Send it now: the test may hang, or die, before it ends."""
        self._session.rank.wire.post(Part(FEATURE, (place, frame)))

    def _register(self) -> None:
        if not self._manager.is_registered(self):
            self._manager.register(self)

    def _compiles_first(self) -> None:
        self._register()
        on_compile(self._begin, self._end)
        self._begin()

    def _begin(self, _: object = None) -> None:
        self._has_compiled = True
        self._recursion_limit = sys.getrecursionlimit()

    def _end(self, _: object = None) -> None:
        if sys.getrecursionlimit() > self._recursion_limit > 0:
            sys.setrecursionlimit(self._recursion_limit)  # inductor raises it
        name_compile_threads("InductorPool")  # which the guard of leaks knows

    def pytest_ranks_called(self) -> None:
        """Compare what ranks have compiled, where the test watches it."""
        __tracebackhide__ = True
        if self._watched is not None:
            self._watched.compare_ranks()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
        """Skip a test, or a case of one, that ends with the error of inductor without a C++ compiler.

        Where other ranks do not skip it, that is reported as a failure.
        """
        error = call.excinfo.value if call.excinfo else None
        if call.when != "teardown" and is_without_compiler(error):
            self._lacks_compiler = True
            skip = pytest.skip.Exception(compiler_needed())
            call.excinfo = pytest.ExceptionInfo.from_exception(skip.with_traceback(_line_of_user(error)))
        return (yield)

    def pytest_ranks_finished(self, ending: Ending) -> None:
        """Forget compiled code: the next test finds none, whatever ran before it in this rank."""
        # An engine was stopped in the middle of a forward, say: another world is for the next test.
        ending.usable = ending.usable and not self._lacks_compiler
        if self._has_compiled:
            ending.parts[FEATURE] = True
            torch.compiler.reset()
            self._has_compiled = False
            on_compile(self._begin, self._end)


def _line_of_user(error: BaseException | None) -> TracebackType | None:
    """Return a traceback of the innermost frame of the user's code, which the skip is reported at."""
    entry, found = error.__traceback__ if error else None, None
    while entry is not None:
        if not is_installed(entry.tb_frame.f_code.co_filename):
            found = TracebackType(None, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
        entry = entry.tb_next
    return found


class CheckedItem:
    """Compares the compiled graphs of one item with what they were compiled from.

    Args:
        manager: of the rank's session.
    """

    def __init__(self, wire: Wire, manager: pytest.PytestPluginManager) -> None:
        self._wire, self._manager = wire, manager

    @pytest.hookimpl(wrapper=True)
    def pytest_ranks_run_item(self, item: pytest.Item, order: RunItem) -> Generator[None, object, object]:
        from lockstep.features.compiles.checked_graphs import GraphChecks

        with only_cases(item.config, order.parts[FEATURE]), GraphChecks(self._send).on():
            return (yield)

    def _send(self, finding: Finding) -> None:
        self._wire.send(Part(FINDINGS, finding))  # now: what follows compiles more, and may not end

    def pytest_ranks_finished(self, ending: Ending) -> None:
        self._manager.unregister(self)
