"""The controller's side of the debugger: which options it refuses, and what messages of a rank change."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import termios
import threading
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.controller.requests import REQUEST, Refusal, Request
from lockstep.features.debugger import FEATURE
from lockstep.features.debugger.controller import Debugging, NoDebugging, how_to_attach
from lockstep.features.debugger.plugin import pytest_configure
from lockstep.features.debugger.terminal import SentTerminal, Terminal
from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN
from lockstep.protocol import Part
from lockstep.specification import WorldKey


class Config:
    """The configuration of a run, with what the debugger uses of it."""

    def __init__(self, pdb: int | None = None, debugpy: str | None = None, **options: Any) -> None:
        given = {"usepdb": False, "trace": False, "usepdb_cls": None, "dist": "no", **options}
        self.option = SimpleNamespace(rank_pdb=pdb, rank_debugpy=debugpy, **given)
        self.plugins: dict[str, Any] = {}
        self.registered: list[object] = []
        self.pluginmanager = SimpleNamespace(
            getplugin=self.plugins.get,
            get_plugin=self.plugins.get,
            hasplugin=self.plugins.__contains__,
            register=self.registered.append,
        )

    def getoption(self, name: str) -> Any:
        return getattr(self.option, name)


@pytest.fixture
def debug() -> Iterator[Callable[..., Any]]:
    """Make a debugger, whose copies of the streams are closed behind the test."""
    made: list[Debugging] = []

    def make(config: Any = None, **given: Any) -> Debugging:
        made.append(Debugging(config or Config(**given)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each._leave_prompt()
        each.pytest_unconfigure()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pdb": -1}, "--rank-pdb -1: ranks count from 0"),
    (
        {"pdb": 0, "dist": "load"},
        "--rank-pdb needs the terminal, which the processes of pytest -n do not have; leave out -n",
    ),
    (
        {"pdb": 0, "usepdb_cls": ("os", "Nothing")},
        "--pdbcls os:Nothing: module 'os' has no attribute 'Nothing'",
    ),
    ({"pdb": 0, "usepdb_cls": ("no such", "X")}, "--pdbcls no such:X: invalid format: 'no such:X'"),
    ({"pdb": 0, "usepdb_cls": ("nowhere", "X")}, "--pdbcls nowhere:X: No module named 'nowhere'"),
    *(
        ({"debugpy": given}, f"--rank-debugpy {given[:40]}: write RANK or RANK:PORT, such as 1:5678")
        for given in ("x", "", "-1", "1:", "1:x", "1:0", "1:65536", "1" * 20, "1" * 50)
    ),
    ({"debugpy": "1", "pdb": 0}, "--rank-debugpy 1: one debugger at a time; leave out --rank-pdb"),
    (
        {"debugpy": "1", "dist": "load"},
        "--rank-debugpy 1: each process of pytest -n would listen there; leave out -n",
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_options_that_no_run_can_satisfy_are_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(pytest.UsageError) as refused:
        Debugging(Config(**given))  # type: ignore[arg-type]
    assert str(refused.value) == message


def test_a_debugger_that_is_not_installed_or_a_port_in_use_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[object] = [None]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found[0])
    with pytest.raises(pytest.UsageError, match=r"^--rank-debugpy 1: needs debugpy: pip install debugpy$"):
        Debugging(Config(debugpy="1"))  # type: ignore[arg-type]
    found[0] = object()
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        given = f"1:{used.getsockname()[1]}"
        with pytest.raises(pytest.UsageError, match=f"^--rank-debugpy {given}: Address already in use: "):
            Debugging(Config(debugpy=given))  # type: ignore[arg-type]
    assert Debugging(Config(debugpy=given))._rank == 1  # type: ignore[arg-type]


def test_a_rank_gets_the_port_that_was_given_or_a_free_one(
    monkeypatch: pytest.MonkeyPatch, debug: Callable[..., Debugging]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    parts: dict[str, Any] = {}
    debug(debugpy="12:65535").pytest_ranks_session(parts)
    assert parts == {FEATURE: (12, 65535)}
    debug(debugpy="3").pytest_ranks_session(parts)
    rank, port = parts[FEATURE]
    assert (rank, port > 1023) == (3, True)
    debug(pdb=2).pytest_ranks_session(parts)
    assert parts == {FEATURE: (2, 0)}


def test_only_worlds_with_the_rank_have_no_deadline(debug: Callable[..., Debugging]) -> None:
    debugging = debug(pdb=2)
    keys = [WorldKey(size, "gloo", "cpu") for size in (2, 3)]
    assert [debugging.pytest_ranks_timeout(key) for key in keys] == [None, float("inf")]


def test_a_rank_on_another_host_is_not_debugged(debug: Callable[..., Debugging]) -> None:
    def refusal(rank: int, spread: Any) -> Refusal | None:
        request: Any = SimpleNamespace(key=SimpleNamespace(spread=spread, size=5))
        return debug(pdb=rank).pytest_ranks_request(request)

    there = Refusal("failed", "rank 2 runs on another host, where no debugger can be attached")
    spread = ((0, 2), (1, 3))
    assert [refusal(rank, spread) for rank in (1, 2, 5)] == [None, there, None]
    assert refusal(2, ()) is None
    assert refusal(2, ((1, 5),)) == there


def collected(plugin: Any, *keys: WorldKey | None, **given: Any) -> object:
    """Let a plugin see the items of a run, each of a world or without one; return the hook's result."""
    items: list[Any] = []
    for key in keys:
        item = SimpleNamespace(stash=pytest.Stash(), nodeid="test_x.py::test_y")
        if key is not None:
            request = Mock(spec=Request)
            request.key = key
            item.stash[REQUEST] = request
        items.append(item)
    hook: Generator[None, object, object] = plugin.pytest_collection_modifyitems(items=items, **given)
    next(hook)
    with pytest.raises(StopIteration) as stopped:
        hook.send("others")
    return stopped.value.value


TWO, FAKE = WorldKey(2, "gloo", "cpu"), WorldKey(1, "fake", "cpu")


def test_a_rank_that_no_test_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, debug: Callable[..., Debugging]
) -> None:
    debugging = debug(pdb=2)
    assert collected(debugging) == "others"
    assert collected(debugging, TWO, WorldKey(3, "gloo", "cpu")) == "others"
    for keys, why in (
        ((None,), "no test runs on ranks"),
        ((TWO, None, WorldKey(1, "gloo", "cpu")), "the largest world has the ranks 0 to 1"),
        (
            (TWO, FAKE),
            "the largest world has the ranks 0 to 1. A fake world is one process: --rank-pdb 0 debugs it, "
            "whichever rank it stands for",
        ),
    ):
        with pytest.raises(pytest.UsageError) as refused:
            collected(debugging, *keys)
        assert str(refused.value) == f"--rank-pdb 2: there is no such rank: {why}"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(pytest.UsageError, match=r"^--rank-debugpy 2: there is no such rank"):
        collected(debug(debugpy="2"), TWO)


@pytest.mark.parametrize(("pdb", "option"), [(True, "--pdb"), (False, "--trace")])
def test_a_debugger_of_pytest_alone_is_refused_with_tests_on_ranks(pdb: bool, option: str) -> None:
    config = Config(usepdb=pdb, trace=not pdb)
    assert collected(NoDebugging(), None, config=config) == "others"
    with pytest.raises(pytest.UsageError) as refused:
        collected(NoDebugging(), None, TWO, config=config)
    assert str(refused.value).startswith(
        f"{option} alone does not work in ranks, and test_x.py::test_y runs on ranks. Add --rank-pdb 0 for "
    )


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, []),
        ({"usepdb": True}, [NoDebugging]),
        ({"trace": True}, [NoDebugging]),
        ({"pdb": 0, "usepdb": True}, [Debugging]),
    ],
)
def test_a_run_has_a_debugger_or_refuses_one(given: dict[str, Any], kind: list[type]) -> None:
    config = Config(**given)
    pytest_configure(config)  # type: ignore[arg-type]
    assert [type(each) for each in config.registered] == kind
    for each in config.registered:
        getattr(each, "pytest_unconfigure", lambda: None)()
    config.registered.clear()
    config.plugins[RANK_PLUGIN] = object()
    pytest_configure(config)  # type: ignore[arg-type]
    assert config.registered == []


class Running:
    """A run of an item, of which one rank is debugged."""

    def __init__(self, is_there: bool = True) -> None:
        self.may_pause: set[int] = set()
        self.paused: set[int] = set()
        self.signals: list[tuple[int, int]] = []
        self.is_there = is_there

    def signal(self, rank: int, number: int) -> bool:
        self.signals.append((rank, number))
        return self.is_there


def test_a_rank_at_a_debugger_is_paused_until_it_leaves(debug: Callable[..., Debugging]) -> None:
    debugging, run = debug(pdb=1), Running()
    debugging.pytest_ranks_run_begins(run)  # type: ignore[arg-type]
    assert run.may_pause == {1}
    for state, is_paused in (
        *(("prompts", True), ("left", False), ("runs", True), ("quits", False), ("waits", True)),
        ("left", False),
    ):
        debugging.pytest_ranks_message(run, 1, Part("other", state))  # type: ignore[arg-type]
        assert (run.paused == {1}) is not is_paused
        debugging.pytest_ranks_message(run, 1, Part(FEATURE, state))  # type: ignore[arg-type]
        assert (run.paused == {1}) is is_paused
        assert debugging._has_quit is (state == "quits")


def test_a_rank_that_waits_for_an_ide_says_how_to_attach(debug: Callable[..., Debugging]) -> None:
    config = Config(pdb=1)
    terminal = config.plugins["terminalreporter"] = Mock()
    debugging = debug(config)
    run: Any = Running()
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "runs"))
    assert terminal.mock_calls == []
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "waits"))
    assert [call[0] for call in terminal.mock_calls] == ["ensure_newline", "write_line", "flush"]
    terminal.write_line.assert_called_once_with(how_to_attach(1, 0))


def test_what_an_ide_needs_is_a_launch_configuration() -> None:
    head, configuration = how_to_attach(3, 5678).split("\n")
    assert head == "rank 3 waits for a debugger on 127.0.0.1:5678. In launch.json of VS Code:"
    assert json.loads(configuration) == {
        "name": "rank 3",
        "type": "debugpy",
        "request": "attach",
        "justMyCode": False,
        "connect": {"host": "127.0.0.1", "port": 5678},
    }


@pytest.fixture
def interrupts() -> Iterator[list[int]]:
    """Interrupts that reach the handler of the process."""
    reached: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: reached.append(number))
    yield reached
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_at_a_prompt_goes_to_its_rank(debug: Callable[..., Debugging], interrupts: list[int]) -> None:
    debugging, run = debug(pdb=1), Running()
    own = signal.getsignal(signal.SIGINT)
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "prompts"))  # type: ignore[arg-type]
    signal.raise_signal(signal.SIGINT)
    assert (run.signals, interrupts) == ([(1, signal.SIGINT)], [])
    run.is_there = False
    signal.raise_signal(signal.SIGINT)
    assert interrupts == [signal.SIGINT]
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "runs"))  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is own
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "prompts"))  # type: ignore[arg-type]
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "prompts"))  # type: ignore[arg-type]
    debugging.pytest_ranks_run_ended()
    assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    debugging.pytest_ranks_run_ended()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_without_a_handler_interrupts(debug: Callable[..., Debugging], interrupts: list[int]) -> None:
    debugging, run = debug(pdb=1), Running(is_there=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "prompts"))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    debugging.pytest_ranks_run_ended()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_ctrl_c_that_is_ignored_stays_so(debug: Callable[..., Debugging], interrupts: list[int]) -> None:
    debugging, run = debug(pdb=1), Running()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    debugging.pytest_ranks_message(run, 1, Part(FEATURE, "prompts"))  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_prompt_of_another_thread_changes_no_handler(
    debug: Callable[..., Debugging], interrupts: list[int]
) -> None:
    debugging, run = debug(pdb=1), Running()
    part, own = Part(FEATURE, "prompts"), signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=debugging.pytest_ranks_message, args=(run, 1, part), daemon=True)
    thread.start()
    thread.join(60)
    assert run.paused == {1}
    assert signal.getsignal(signal.SIGINT) is own
    assert debugging._before_prompt is None


def test_quitting_closes_the_worlds_and_ends_the_run(debug: Callable[..., Debugging]) -> None:
    config = Config(pdb=1)
    config.plugins[CONTROLLER_PLUGIN] = controller = Mock()
    debugging = debug(config)
    hook = debugging.pytest_runtest_protocol()
    next(hook)
    with pytest.raises(StopIteration) as stopped:
        hook.send(True)
    assert stopped.value.value is True
    controller.close_worlds.assert_not_called()
    debugging.pytest_ranks_message(Running(), 1, Part(FEATURE, "quits"))  # type: ignore[arg-type]
    hook = debugging.pytest_runtest_protocol()
    next(hook)
    with pytest.raises(pytest.exit.Exception, match=r"^Quitting debugger$"):
        hook.send(True)
    controller.close_worlds.assert_called_once_with()


def test_the_terminal_is_lent_to_the_rank_and_closed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, debug: Callable[..., Debugging]
) -> None:
    launcher = Mock()
    config = Config(pdb=3)
    debugging = debug(config)
    debugging.pytest_ranks_launcher(launcher)
    assert isinstance(launcher.loan, Terminal)
    assert launcher.loan.rank == 3
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    debug(debugpy="1").pytest_ranks_launcher(launcher)
    assert launcher.loan is None


def test_the_streams_of_a_capture_are_put_aside_to_be_lent(debug: Callable[..., Debugging]) -> None:
    config = Config(pdb=1)
    capture = config.plugins["capturemanager"] = Mock()
    debug(config)
    assert [(call[0], call[2]) for call in capture.mock_calls] == [
        ("suspend_global_capture", {"in_": True}),
        ("resume_global_capture", {}),
        ("suspend_global_capture", {}),
    ]


def test_a_terminal_gets_its_settings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    main, user = pty.openpty()
    monkeypatch.setattr("lockstep.features.debugger.terminal.STREAMS", (user, main))
    terminal = Terminal(0)
    settings = termios.tcgetattr(user)
    changed = [*settings]
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(user, termios.TCSANOW, changed)
    terminal.close()
    assert termios.tcgetattr(user)[3] & termios.ECHO
    for stream in terminal._streams:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(stream)
    os.close(main)
    os.close(user)


def test_a_terminal_that_arrives_becomes_the_streams_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = os.pipe()
    copies: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "dup2", lambda sent, stream: copies.append((sent, stream)))
    monkeypatch.setattr("lockstep.features.debugger.terminal.STREAMS", (8, 9))
    monkeypatch.setattr("sys.stdin", None)
    sent = SentTerminal(*(SimpleNamespace(detach=lambda end=end: end) for end in ends))
    sent.take()
    assert copies == [(ends[0], 8), (ends[1], 9)]
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
