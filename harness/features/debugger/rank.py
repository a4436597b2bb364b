"""pytest's own debugger in the rank of `--rank-pdb`, and what `breakpoint()` does in every other rank."""

from __future__ import annotations

import bdb
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Generator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.features.debugger import FEATURE, Chosen, State
from lockstep.features.debugger.pytest_internals import is_interactive, open_debugger
from lockstep.protocol import Part

if TYPE_CHECKING:
    from lockstep.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback


def plug_in(config: pytest.Config, rank: Rank) -> None:
    """Register the debugger of this rank, or what explains why its breakpoints do not stop."""
    given: Chosen | None = rank.spec.session.parts.get(FEATURE)
    chosen, port = given or (None, 0)
    if chosen == rank.spec.rank and port:
        config.option.usepdb = config.option.trace = False
        config.pluginmanager.register(IdeDebugger(rank, port))
        return
    if chosen != rank.spec.rank:
        config.option.usepdb = config.option.trace = False
        exists = chosen is not None and chosen < rank.spec.key.size
        config.pluginmanager.register(NoDebugger(rank, chosen if exists else None))
        return
    # With this option pytest leaves tear-downs of unittest, and Ctrl-C, to the debugger.
    config.option.usepdb = True
    config.pluginmanager.set_blocked("pdbinvoke")  # it opens after the report; see RankDebugger
    config.pluginmanager.register(RankDebugger(rank))


class RankDebugger:
    """Opens pytest's debugger on a failure before the failure is reported.

    So the other ranks wait where they are, and this rank's connections stay open, until the user leaves it.
    The controller knows when the debugger waits at its prompt, and when the test runs on under it.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._state: State = "left"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        is_of_peer = call.excinfo is not None and isinstance(call.excinfo.value, PeerFailed)
        if self._state != "quits" and not is_of_peer and is_interactive(call, report):
            self._open(item, call, report)
        return report

    def _open(self, item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
        try:
            open_debugger(item, call, report)
            self._enter("left")
        except Exception:  # of another debugger than pdb; the test's own report must not be lost
            self._enter("left")
            report.sections.append(("The debugger failed itself", traceback.format_exc()))
        except pytest.fail.Exception:
            item.session.shouldfail = "Quitting debugger"  # run no further subtest of the test
        finally:
            _restore_ctrl_c()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            _restore_ctrl_c()

    def pytest_enter_pdb(self, pdb: Any) -> None:
        interaction = pdb.interaction

        def interact(*args: Any) -> None:
            self._enter("prompts")
            try:
                interaction(*args)
                quits = getattr(pdb, "quitting", False)  # by the end of its input
            except pytest.exit.Exception:
                quits = True
            if quits:
                self._enter("quits")
                pytest.fail("the user quit the debugger, which ends the run", pytrace=False)
            elif self._state == "prompts":
                self._enter("runs")

        pdb.interaction = interact

    def pytest_leave_pdb(self) -> None:
        self._enter("left")

    def _enter(self, state: State) -> None:
        self._state = state
        self._rank.wire.send(Part(FEATURE, state))


class IdeDebugger:
    """Waits at the first test until an IDE has attached to debugpy, which stops at its breakpoints.

    For the controller the test runs under a debugger from then on: an IDE stops all threads of the rank, so
    that it could not say more.
    """

    def __init__(self, rank: Rank, port: int) -> None:
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # of modules frozen into Python
        self._rank = rank
        self._debugpy: Any = importlib.import_module("debugpy")
        self._debugpy.configure(subProcess=False)
        self._debugpy.listen(("127.0.0.1", port))
        self._has_attached = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._rank.wire.send(Part(FEATURE, "runs" if self._has_attached else "waits"))
        if not self._has_attached:
            self._debugpy.wait_for_client()
            self._has_attached = True
        sys.breakpointhook = self._debugpy.breakpoint  # pytest has set its own
        return (yield)


class NoDebugger:
    """Passes by breakpoints where another rank is debugged, and fails at them where none is."""

    def __init__(self, rank: Rank, debugged: int | None) -> None:
        self._world = rank.world
        self._number = rank.spec.rank  # in a fake world not the one that it stands for
        self._debugged = debugged

    def pytest_enter_pdb(self, config: pytest.Config, pdb: Any) -> None:
        if capture := config.pluginmanager.getplugin("capturemanager"):
            capture.resume()  # pytest has suspended it for the debugger
        pdb.set_trace = self._pass_by

    def _pass_by(self, frame: FrameType) -> None:
        place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        here = f"{place}: breakpoint in rank {self._world.rank} of {self._world.size}"
        if self._debugged is None:
            run = f"run the test with --rank-pdb {self._number}"
            pytest.fail(f"{here}: ranks have no terminal of their own; {run}", pytrace=False)
        sys.stderr.write(f"{here}: skipped, because the debugger is in rank {self._debugged}\n")


def _restore_ctrl_c() -> None:
    """Remove the handler by which Ctrl-C enters pdb again after its command `c`."""
    if isinstance(getattr(signal.getsignal(signal.SIGINT), "__self__", None), bdb.Bdb):
        signal.signal(signal.SIGINT, signal.default_int_handler)
