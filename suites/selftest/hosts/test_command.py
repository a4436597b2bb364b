"""Unit tests of `python -m lockstep hosts`: what node 0 does, what the others do, and in which order."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import command
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo
from lockstep.features.hosts.join_info import JoinInfo, Known, SharedFile, Store, WithoutSecret
from lockstep.features.hosts.launchers import NodePlace
from lockstep.features.hosts.wire import Credentials

FIRST, OTHER = NodePlace(0, 2), NodePlace(1, 2)
BY_HAND = ("--meet", "127.0.0.1:9")
INFO = JoinInfo("127.0.0.1", 9, b"s")


def parse(*words: str) -> argparse.Namespace:
    commands = argparse.ArgumentParser().add_subparsers()
    command.add_to(commands)
    (parser,) = commands.choices.values()
    return parser.parse_args([*words])


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The steps of hosts, one after another, without a connection between them."""
    found: list[Any] = []

    class Meeting:
        def __init__(self, place: object, this: HostInfo, info: JoinInfo, path: Path, environ: Any) -> None:
            self.join_info = JoinInfo(info.address, 77, info.secret)
            self.hosts = this, HostInfo("b", "10.0.0.2")
            found.append(("open", place, this.address, info.port, len(info.secret), path.name, environ))
            assert this.port == 0
            self.directory = path.parent

        def await_all(self, seconds: float, say: Callable[[str], None]) -> tuple[HostInfo, ...]:
            found.append(("await", seconds, signal.getsignal(signal.SIGTERM)))
            return self.hosts

        def end(self, status: int) -> None:
            found.append(("end", status, self.directory.exists()))
            found.append(self.directory)

    class Way:
        def publish(self, info: JoinInfo, until: float) -> None:
            found.append(("publish", info.port, round(until - time.monotonic())))

        def close(self) -> None:
            found.append("close")

    monkeypatch.setattr(command, "Rendezvous", Meeting)
    monkeypatch.setattr(command, "_way", lambda *given: found.append(("way", given)) or Way())
    monkeypatch.setattr(
        command, "_this_host", lambda name, address, port: HostInfo(name or "a", address, port)
    )
    monkeypatch.setattr(command, "_forget_launcher", lambda: {"A": "1"})
    monkeypatch.setattr(command, "_own_address", lambda place, given: given or "10.0.0.1")
    monkeypatch.setattr(command, "_run_pytest", lambda arguments: found.append(("pytest", arguments)) or 3)
    monkeypatch.setattr(command.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(HOSTS, "before")
    return found


def test_node_0_meets_the_others_and_then_runs_pytest(
    done: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = command._lead(FIRST, parse(*BY_HAND, "--wait", "7", "--", "-x"), b"s")
    directory = done.pop(-2)
    assert status == 3
    assert done == [
        ("way", (FIRST, INFO, b"s")),
        ("open", FIRST, "127.0.0.1", 9, 1, "hosts.json", {"A": "1"}),
        ("publish", 77, 7),
        ("await", 7.0, signal.default_int_handler),
        ("pytest", ["-x"]),
        ("end", 3, True),
        "close",
    ]
    assert os.environ[HOSTS] == f"{directory}/hosts.json"
    assert directory.name.startswith("lockstep-hosts-")
    assert not directory.exists()
    assert capsys.readouterr().err == "hosts: 2 hosts: a (127.0.0.1), b (10.0.0.2)\n"


@pytest.mark.parametrize(("secret", "length"), [(b"given", 5), (None, 64)])
def test_node_0_makes_a_secret_where_the_user_gives_none(
    done: list[Any], secret: bytes | None, length: int
) -> None:
    command._lead(FIRST, parse(), secret)
    assert done[:2] == [
        ("way", (FIRST, None, secret)),
        ("open", FIRST, "10.0.0.1", 0, length, "hosts.json", {"A": "1"}),
    ]


def test_an_interrupted_wait_ends_the_meeting(done: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Rendezvous, "await_all", interrupt)
    assert command._lead(FIRST, parse(*BY_HAND), b"s") == command.INTERRUPTED == 130
    assert done[-3:-2] == [("end", 130, True)]
    assert done[-1] == "close"
    assert not done[-2].exists()


def test_a_meeting_that_cannot_open_leaves_nothing(
    done: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise LaunchError("taken")

    monkeypatch.setattr(command, "Rendezvous", refuse)
    with pytest.raises(LaunchError, match="taken"):
        command._lead(FIRST, parse(*BY_HAND), b"s")
    assert done[1:] == ["close"]
    assert list(tmp_path.iterdir()) == []


# The others


@pytest.fixture
def served(done: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a host that serves ranks: node 0 is started a second time before it is met."""

    class Agent:
        def __init__(self, address: str, node: int, credentials: Credentials) -> None:
            self.port = 4 + len(credentials.run)
            self.run = credentials.run
            done.append(("agent", address, node, credentials.secret))

        def serve(self, end: int) -> None:
            done.append(("serve", end))

        def close(self) -> None:
            done.append(("closed", self.run))

    class Comer:
        def __init__(self, place: NodePlace, way: object, describe: Any, say: object, by_hand: bool) -> None:
            done.append(("comes", place, by_hand))
            self.describe = describe

        def come(self, seconds: float) -> Any:
            hosts = [self.describe("127.0.0.1", Credentials(b"s", run)) for run in (b"1", b"22")]
            done.append((seconds, [(host.name, host.address, host.port) for host in hosts]))
            connection = SimpleNamespace(fileno=lambda: 5)
            return SimpleNamespace(name="b", first="a", connection=connection, read_end=lambda: STATUS[0])

    monkeypatch.setattr("lockstep.features.hosts.agent.Agent", Agent)
    monkeypatch.setattr(command, "Comer", Comer)
    monkeypatch.setattr(command, "address_towards", lambda address: f"towards {address}")
    return done


STATUS: list[int | None] = [3]


@pytest.mark.parametrize(
    ("words", "address", "by_hand"),
    [
        (("--address", "127.0.0.1", *BY_HAND), "127.0.0.1", True),
        ((), "towards 127.0.0.1", False),
    ],
)
def test_another_host_serves_ranks_until_pytest_has_ended(
    served: list[Any], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], address: str, by_hand: bool
) -> None:
    STATUS[0] = 3
    assert command._serve(OTHER, parse(*words, "--name", "c", "--wait", "7"), b"s") == 3
    assert served == [
        ("way", (OTHER, INFO if by_hand else None, b"s")),
        ("comes", OTHER, by_hand),
        ("agent", address, 1, b"s"),
        ("closed", b"1"),
        ("agent", address, 1, b"s"),
        (7.0, [("c", address, 5), ("c", address, 6)]),
        "close",
        ("serve", 5),
        ("closed", b"22"),
    ]
    assert capsys.readouterr().err == (
        "hosts: b, node 1 of 2, serves ranks to a\nhosts: b: pytest has ended on a with status 3\n"
    )


def test_another_host_ends_with_one_where_node_0_is_gone(
    served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    STATUS[0] = None
    assert command._serve(OTHER, parse(*BY_HAND), b"s") == command.LOST == 1
    said = "hosts: b: node 0, a, is gone; its pytest has not said how it ended\n"
    assert capsys.readouterr().err.endswith(said)


# All of them


def test_sigterm_is_taken_as_ctrl_c_while_hosts_wait() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with contextlib.suppress(KeyboardInterrupt), command._interrupted_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
            raise KeyboardInterrupt
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("words", "node", "ran"),
    [
        (("--node", "0/1", *BY_HAND, "--", "-x"), None, "pytest -x"),
        (("--node", "0/2", *BY_HAND), None, "lead 0"),
        (("--node", "1/2", *BY_HAND), None, "serve 1"),
        ((), 1, "serve 1"),
    ],
)
def test_a_host_does_what_its_place_says(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], node: int | None, ran: str
) -> None:
    place = None if node is None else NodePlace(node, 2, "srun")
    handlers: list[object] = []
    monkeypatch.setattr(command, "place_of", lambda environ: place)
    monkeypatch.setattr(command, "take_secret", lambda path, environ: b"s")
    monkeypatch.setattr(command, "_forget_launcher", lambda: handlers.append("forgotten"))
    monkeypatch.setattr(command, "_run_pytest", lambda arguments: f"pytest {' '.join(arguments)}")
    monkeypatch.setattr(command, "_lead", lambda place, options, secret: f"lead {place.node}")

    def serve(place: NodePlace, options: object, secret: bytes) -> str:
        handlers.append(signal.getsignal(signal.SIGTERM))
        return f"serve {place.node}"

    monkeypatch.setattr(command, "_serve", serve)
    options = parse(*words)
    assert options.run(options, []) == ran
    if ran.startswith("pytest"):
        assert handlers == ["forgotten"]
    else:
        assert handlers == ([signal.default_int_handler] if ran.startswith("serve") else [])


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(LaunchError("no place"), 4, "hosts: no place\n"), (KeyboardInterrupt(), 130, "")],
)
def test_what_keeps_a_host_from_running_is_its_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    said: str,
) -> None:
    def lead(*_: object) -> int:
        raise error

    monkeypatch.setattr(command, "_lead", lead)
    monkeypatch.setattr(command, "take_secret", lambda path, environ: b"s")
    assert command._run(parse("--node", "0/2", *BY_HAND), []) == status
    assert capsys.readouterr().err == said
    assert command._run(parse("--node", "0/2", *BY_HAND), ["--x", "y"]) == 4
    unknown = "hosts: unknown arguments: --x y; those of pytest come behind --\n"
    assert capsys.readouterr().err == unknown


def test_pytest_runs_in_this_process_as_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(command.pytest, "console_main", lambda: given.append([*sys.argv]) or 5)
    monkeypatch.setattr(sys, "argv", ["before", "hosts"])
    assert command._run_pytest(["-x", "a.py"]) == 5
    ((program, *arguments),) = given
    assert program == f"{Path(pytest.__file__).parent}/__main__.py"
    assert arguments == ["-x", "a.py"]


def test_the_variables_of_the_launcher_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "without_launcher", lambda environ: {"A": environ["A"]})
    monkeypatch.setattr(command.os, "environ", {"A": "1", "RANK": "2", "LOCAL_RANK": "0"})
    assert command._forget_launcher() == command.os.environ == {"A": "1"}


def test_the_way_is_that_of_the_user_or_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Store, "__init__", lambda self, place: None)
    monkeypatch.setattr(Store, "close", lambda self: None)
    assert isinstance(command._way(FIRST, INFO, b"s"), Known)
    for place, kind in (
        (NodePlace(0, 2, "srun", job="7"), SharedFile),
        (NodePlace(0, 2, "torchrun", store=("h", 1)), Store),
    ):
        way: Any = command._way(place, None, b"s")
        assert isinstance(way, WithoutSecret)
        assert isinstance(way._way, kind)
        assert way._secret == b"s"
