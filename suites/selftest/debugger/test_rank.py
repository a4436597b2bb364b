"""The debugger in a rank: when it opens, what the controller hears of it, and ranks without one."""

from __future__ import annotations

import bdb
import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.features.debugger import FEATURE, plugin, pytest_internals, rank
from lockstep.features.debugger.rank import IdeDebugger, NoDebugger, RankDebugger, plug_in
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.protocol import Part


class Process:
    """Rank 1 of 2, and what it has sent."""

    def __init__(self, chosen: tuple[int, int] | None = None, number: int = 1) -> None:
        self.sent: list[object] = []
        self.wire = SimpleNamespace(send=self._send)
        self.world = SimpleNamespace(rank=number, size=2)
        session = SimpleNamespace(parts={} if chosen is None else {FEATURE: chosen})
        self.spec = SimpleNamespace(rank=number, session=session, key=SimpleNamespace(size=2))

    def _send(self, part: Part) -> None:
        assert part.feature == FEATURE
        self.sent.append(part.data)


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def plugged(process: Process) -> tuple[Any, Any]:
    config: Any = SimpleNamespace(option=SimpleNamespace(usepdb=None, trace=True), pluginmanager=Mock())
    plug_in(config, process)  # type: ignore[arg-type]
    config.pluginmanager.register.assert_called_once()
    return config, config.pluginmanager.register.call_args.args[0]


def test_the_chosen_rank_gets_the_debugger_of_pytest() -> None:
    config, plugin = plugged(Process((1, 0)))
    assert isinstance(plugin, RankDebugger)
    assert (config.option.usepdb, config.option.trace) == (True, True)
    config.pluginmanager.set_blocked.assert_called_once_with("pdbinvoke")


@pytest.mark.parametrize(("chosen", "debugged"), [((0, 0), 0), ((0, 99), 0), ((2, 0), None), (None, None)])
def test_other_ranks_get_none(chosen: tuple[int, int] | None, debugged: int | None) -> None:
    config, plugin = plugged(Process(chosen))
    assert isinstance(plugin, NoDebugger)
    assert plugin._debugged == debugged
    assert (config.option.usepdb, config.option.trace) == (False, False)
    config.pluginmanager.set_blocked.assert_not_called()


@pytest.fixture
def debugpy(monkeypatch: pytest.MonkeyPatch) -> Mock:
    module = Mock()
    monkeypatch.setattr("importlib.import_module", {"debugpy": module}.__getitem__)
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "")
    monkeypatch.delenv("PYDEVD_DISABLE_FILE_VALIDATION")
    return module


def test_a_rank_waits_for_an_ide_at_its_first_test(monkeypatch: pytest.MonkeyPatch, debugpy: Mock) -> None:
    process = Process((1, 5678))
    config, plugin = plugged(process)
    assert isinstance(plugin, IdeDebugger)
    assert (config.option.usepdb, config.option.trace) == (False, False)
    assert os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] == "1"
    debugpy.listen.assert_called_once_with(("127.0.0.1", 5678))
    debugpy.configure.assert_called_once_with(subProcess=False)
    monkeypatch.setattr(sys, "breakpointhook", None)
    for waits in (1, 1):
        hook = plugin.pytest_runtest_protocol()
        next(hook)
        assert debugpy.wait_for_client.call_count == waits
        assert sys.breakpointhook is debugpy.breakpoint
        with pytest.raises(StopIteration) as stopped:
            hook.send("ran")
        assert stopped.value.value == "ran"
    assert process.sent == ["waits", "runs"]


def prompt(debugger: RankDebugger, interaction: Any, **pdb: Any) -> None:
    """Let a prompt of pdb open and close."""
    opened: Any = SimpleNamespace(interaction=interaction, **pdb)
    debugger.pytest_enter_pdb(opened)
    opened.interaction("frame", "traceback")


def test_the_controller_hears_of_prompts_and_of_what_runs_on() -> None:
    process = Process()
    debugger = RankDebugger(process)  # type: ignore[arg-type]
    asked: list[tuple[object, ...]] = []
    prompt(debugger, lambda *args: asked.append(args))
    assert (asked, process.sent) == ([("frame", "traceback")], ["prompts", "runs"])
    process.sent.clear()
    prompt(debugger, lambda *_: debugger.pytest_leave_pdb(), quitting=False)
    assert process.sent == ["prompts", "left"]


def quits(*_: object) -> None:
    pytest.exit("Quitting debugger")


@pytest.mark.parametrize(("interaction", "quitting"), [(quits, False), (lambda *_: None, True)])
def test_quitting_at_a_prompt_fails_the_test(interaction: Any, quitting: bool) -> None:
    process = Process()
    debugger = RankDebugger(process)  # type: ignore[arg-type]
    with pytest.raises(
        pytest.fail.Exception, match=r"^the user quit the debugger, which ends the run$"
    ) as failed:
        prompt(debugger, interaction, quitting=quitting)
    assert not failed.value.pytrace
    assert process.sent == ["prompts", "quits"]


class Failure:
    """A failed call of a test, reported by a rank with a debugger."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens: Any = None) -> None:
        self.process = Process()
        self.debugger = RankDebugger(self.process)  # type: ignore[arg-type]
        self.opened: list[object] = []
        self.item = SimpleNamespace(session=SimpleNamespace(shouldfail=False))
        self.report = SimpleNamespace(sections=[])
        self.opens = opens or (lambda: None)
        monkeypatch.setattr(rank, "open_debugger", self._open)
        monkeypatch.setattr(rank, "is_interactive", lambda call, report: call.excinfo is not None)

    def _open(self, item: object, call: object, report: object) -> None:
        self.opened.append((item is self.item, call, report is self.report))
        self.opens()

    def happen(self, error: BaseException | None) -> None:
        call: Any = SimpleNamespace(excinfo=None if error is None else SimpleNamespace(value=error))
        hook = self.debugger.pytest_runtest_makereport(self.item, call)  # type: ignore[arg-type]
        next(hook)
        with pytest.raises(StopIteration) as stopped:
            hook.send(self.report)  # type: ignore[arg-type]
        assert stopped.value.value is self.report


def test_only_a_failure_of_its_own_opens_the_debugger(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(monkeypatch)
    failure.happen(None)
    failure.happen(PeerFailed("rank 0 failed"))
    assert (failure.opened, failure.process.sent) == ([], [])
    failure.happen(ValueError())
    assert [(is_item, is_report) for is_item, _, is_report in failure.opened] == [(True, True)]  # type: ignore[misc]
    assert failure.process.sent == ["left"]
    assert failure.item.session.shouldfail is False
    failure.debugger._enter("quits")
    failure.happen(ValueError())
    assert len(failure.opened) == 1


def test_a_debugger_that_fails_itself_is_a_part_of_the_report(
    monkeypatch: pytest.MonkeyPatch, interrupts: None
) -> None:
    def opens() -> None:
        signal.signal(signal.SIGINT, bdb.Bdb().trace_dispatch)  # type: ignore[arg-type]
        raise OSError("no terminal")

    failure = Failure(monkeypatch, opens)
    failure.happen(ValueError())
    assert failure.process.sent == ["left"]
    ((title, text),) = failure.report.sections
    assert title == "The debugger failed itself"
    assert text.endswith("OSError: no terminal\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_user_who_quits_runs_no_further_case(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure(monkeypatch, lambda: pytest.fail("quit"))
    failure.happen(ValueError())
    assert failure.item.session.shouldfail == "Quitting debugger"
    assert (failure.report.sections, failure.process.sent) == ([], [])


def test_a_handler_of_pdb_is_removed_behind_a_tear_down(interrupts: None) -> None:
    debugger = RankDebugger(Process())  # type: ignore[arg-type]
    own = Mock()
    for handler, left in ((bdb.Bdb().trace_dispatch, signal.default_int_handler), (own, own)):
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
        hook = debugger.pytest_runtest_teardown()
        next(hook)
        with pytest.raises(StopIteration) as stopped:
            hook.send("over")
        assert stopped.value.value == "over"
        assert signal.getsignal(signal.SIGINT) is left


def meet_breakpoint(debugged: int | None, capture: Any = None) -> None:
    """Meet a breakpoint in rank 1 of a fake world, which its process 0 stands for."""
    process = Process(number=0)
    process.world.rank = 1
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(getplugin={"capturemanager": capture}.get))
    pdb: Any = SimpleNamespace()
    NoDebugger(process, debugged).pytest_enter_pdb(config, pdb)  # type: ignore[arg-type]
    pdb.set_trace(sys._getframe())


def test_a_breakpoint_in_another_rank_is_passed_by(capsys: pytest.CaptureFixture[str]) -> None:
    capture = Mock()
    meet_breakpoint(0, capture)
    capture.resume.assert_called_once_with()
    line = meet_breakpoint.__code__.co_firstlineno + 7
    place = f"{os.path.relpath(__file__)}:{line}"
    words = "breakpoint in rank 1 of 2: skipped, because the debugger is in rank 0"
    assert capsys.readouterr().err == f"{place}: {words}\n"


def test_a_breakpoint_without_a_debugger_fails_with_the_option() -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        meet_breakpoint(None)
    assert str(failed.value).endswith(
        ": breakpoint in rank 1 of 2: ranks have no terminal of their own; run the test with --rank-pdb 0"
    )


def test_the_debugger_writes_to_the_terminal_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    manager = SimpleNamespace(
        unblock=lambda name: done.append(("unblock", name)),
        register=lambda reporter, name: done.append(("register", reporter._tw, name)),
        unregister=lambda reporter: done.append(("unregister", reporter._tw)),
        set_blocked=lambda name: done.append(("block", name)),
    )
    config = SimpleNamespace(pluginmanager=manager)
    monkeypatch.setattr(pytest_internals, "create_terminal_writer", lambda *given: given)
    fails: list[BaseException] = []

    def interact(_: object, *given: object) -> None:
        done.append(given)
        for error in fails:
            raise error

    monkeypatch.setattr(pytest_internals.PdbInvoke, "pytest_exception_interact", interact)
    item: Any = SimpleNamespace(config=config)
    call: Any = "call"
    writer = (config, sys.__stdout__)
    for error in (None, pytest.exit.Exception("quit")):
        done.clear()
        report: Any = SimpleNamespace(_pdbshown=True)
        if error is None:
            pytest_internals.open_debugger(item, call, report)
        else:
            fails.append(error)
            with pytest.raises(pytest.exit.Exception):
                pytest_internals.open_debugger(item, call, report)
        assert done == [
            ("unblock", "terminalreporter"),
            ("register", writer, "terminalreporter"),
            (item, call, report),
            ("unregister", writer),
            ("block", "terminalreporter"),
        ]
        assert not hasattr(report, "_pdbshown")


def test_a_rank_has_its_debugger_before_its_session_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged: list[object] = []
    monkeypatch.setattr(rank, "plug_in", lambda *given: plugged.append(given))
    session = SimpleNamespace(rank="rank")
    for plugins, expected in (({}, []), ({RANK_PLUGIN: session}, ["rank"])):
        config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=plugins.get))
        hook = plugin.pytest_cmdline_main(config)
        next(hook)
        assert plugged == [(config, each) for each in expected]
        with pytest.raises(StopIteration) as stopped:
            hook.send(3)
        assert stopped.value.value == 3
