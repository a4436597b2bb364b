"""A rank that runs a spawned function as a process would, in a process that is no rank."""

from __future__ import annotations

import logging
import os
import pickle
import random
import socket
import sys
import unittest
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from lockstep.features.spawn import rank as ranks
from lockstep.features.spawn.child import Server
from lockstep.features.spawn.messages import EXIT_CODE, FEATURE, TRACEBACK, Call
from lockstep.features.spawn.rank import Exited, SpawnedCall, SpawnOnRank
from lockstep.protocol import Part

SEEN: list[Any] = []


def look(*args: Any) -> None:
    """Note what a spawned function finds."""
    drawn = random.random(), float(numpy.random.rand()), torch.initial_seed()
    SEEN.append((args, dict(os.environ), os.getcwd(), [*sys.argv], [*sys.path], drawn))
    os.environ["OF_FUNCTION"] = "1"
    logging.setLogRecordFactory(lambda *given, **more: None)  # type: ignore[arg-type, return-value]
    logging.getLogger().addHandler(logging.NullHandler())
    logging.getLogger().setLevel(7)
    os.chdir("/")


ended: list[int] = []


def end(rank: int, error: BaseException) -> None:
    ended.append(rank)
    raise error


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ranks, "rewritten_modules", lambda config: ())
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    sent: list[Any] = []
    wire = SimpleNamespace(send=sent.append, is_interrupted=False)
    spec = SimpleNamespace(rank=1, seed=2**32 + 4, port=5, key=SimpleNamespace(size=2))
    SEEN.clear()
    yield SimpleNamespace(
        rank=SimpleNamespace(wire=wire, spec=spec), world=SimpleNamespace(rank=1), sent=sent
    )
    random.setstate(before[0])
    numpy.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.fixture
def call(tmp_path: Path) -> Call:
    data = pickle.dumps((look, ("x",)))
    return Call("look", data, {"A": "1"}, ["arg"], ["/p"], str(tmp_path), Server(str(tmp_path), {}, None))


def called(request: pytest.FixtureRequest, session: Any, call: Call) -> Any:
    order: Any = SimpleNamespace(parts={FEATURE: call})
    return SpawnOnRank(session).pytest_ranks_item(request.node, order)


def test_only_an_order_with_a_call_is_one(request: pytest.FixtureRequest, session: Any, call: Call) -> None:
    order: Any = SimpleNamespace(parts={})
    assert SpawnOnRank(session).pytest_ranks_item(request.node, order) is None
    item = called(request, session, call)
    assert isinstance(item, SpawnedCall)
    assert (item.name, str(item.nodeid), item.path) == ("look", str(request.node.nodeid), request.node.path)
    assert item.reportinfo() == (request.node.path, None, "look")


def test_a_function_finds_what_its_process_would(
    request: pytest.FixtureRequest, session: Any, call: Call
) -> None:
    root = logging.getLogger()
    before = dict(os.environ), os.getcwd(), sys.argv, sys.path, logging.getLogRecordFactory()
    handlers, level = [*root.handlers], root.level
    called(request, session, call).runtest()
    assert session.sent == [Part(FEATURE, os.getpid())]
    assert (dict(os.environ), os.getcwd(), sys.argv, sys.path, logging.getLogRecordFactory()) == before
    assert sys.argv is before[2]
    assert sys.path is before[3]
    assert (root.handlers, root.level) == (handlers, level)
    called(request, session, call).runtest()
    first, second = SEEN
    args, environ, folder, argv, path, drawn = first
    assert (args, environ, folder) == ((1, "x"), {"A": "1"}, call.directory)
    assert (argv, path) == (["arg"], ["/p"])
    assert second == first
    assert drawn[2] == 2**32 + 5
    assert drawn[0] == random.Random(2**32 + 5).random()
    assert drawn[1] == numpy.random.RandomState(5).rand()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (SystemExit(3), 3, "exited with code 3"),
        (SystemExit("text"), 1, "exited with code 1"),
        (unittest.SkipTest("no"), 1, "SkipTest: no"),
        (pytest.skip.Exception("no"), 1, "Skipped: no"),
        (pytest.xfail.Exception("no"), 1, "XFailed: no"),
    ],
)
def test_a_function_may_leave_by_another_way(
    request: pytest.FixtureRequest,
    session: Any,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    item = called(request, session, replace(call, data=b""))
    monkeypatch.setattr(ranks.pickle, "loads", lambda data: (end, (error,)))
    with pytest.raises(Exited) as raised:
        item.runtest()
    assert (raised.value.exitcode, str(raised.value)) == (code, text)
    assert raised.value.__cause__ is error
    parts: dict[str, Any] = {}
    SpawnOnRank(session).pytest_ranks_failed(item, raised.value, parts)
    assert parts[FEATURE][EXIT_CODE] == code
    assert type(error).__name__ in str(item.repr_failure(raised))
    assert "Exited" not in str(item.repr_failure(raised))


@pytest.mark.parametrize("code", [None, 0])
def test_a_function_may_exit_with_success(
    request: pytest.FixtureRequest, session: Any, call: Call, code: int | None
) -> None:
    ended.clear()
    called(request, session, replace(call, data=pickle.dumps((end, (SystemExit(code),))))).runtest()
    assert ended == [1]


def test_an_interruption_that_is_the_functions_own_is_no_failure(
    request: pytest.FixtureRequest, session: Any, call: Call
) -> None:
    item = called(request, session, replace(call, data=pickle.dumps((end, (KeyboardInterrupt(),)))))
    item.runtest()
    session.rank.wire.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        item.runtest()


def test_a_failure_has_its_traceback_from_the_function_on(
    request: pytest.FixtureRequest, session: Any, call: Call
) -> None:
    item = called(request, session, replace(call, data=pickle.dumps((end, (ValueError("of user"),)))))
    spawned = SpawnOnRank(session)
    with pytest.raises(ValueError, match="of user") as raised:
        item.runtest()
    parts: dict[str, Any] = {}
    spawned.pytest_ranks_failed(item, raised.value, parts)
    lines = parts[FEATURE][TRACEBACK].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in lines[1]
    assert lines[1].endswith(" in end")
    assert lines[-1] == "ValueError: of user"
    assert parts[FEATURE][EXIT_CODE] is None
    spawned.pytest_ranks_failed(item, pytest.fail.Exception("x"), parts)
    assert parts[FEATURE] == {TRACEBACK: "Failed: x\n", EXIT_CODE: 1}
    parts.clear()
    spawned.pytest_ranks_failed(request.node, raised.value, parts)
    assert parts == {}
    assert "of user" in str(item.repr_failure(raised))


def test_ranks_that_meet_on_this_host_meet_in_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    current: list[Any] = [lambda *given, **more: made.append((given, more))]

    def swap(make: Any) -> Any:
        current.append(make)
        return current[-2]

    monkeypatch.setattr(ranks, "replace_store_maker", swap)
    with ranks._meets_in_world(5, 2):
        for host in ("127.0.0.1", "localhost", "0.0.0.0", "::1", socket.gethostname()):
            current[-1](host, 9, 1, 2, "x", y=3)
        assert made == [(("127.0.0.1", 5, 1, 2, "x"), {"y": 3})] * 5
        made.clear()
        current[-1]("10.0.0.1", 9, 1, 2)
        current[-1]("localhost", 9, 1, 3)
        assert made == [(("10.0.0.1", 9, 1, 2), {}), (("localhost", 9, 1, 3), {})]
    assert current[-1] is current[0]


def test_processes_of_a_function_end_with_it(
    request: pytest.FixtureRequest, session: Any, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []

    class Starter:
        def __init__(self, server: Server, rewritten: Any) -> None:
            noted.append((server, rewritten()))

        def start(self) -> None: ...

        def close(self) -> None:
            noted.append("close")

    @contextmanager
    def started_by(start: Any) -> Any:
        noted.append(start.__name__)
        yield
        noted.append("restored")

    monkeypatch.setattr(ranks, "Starter", Starter)
    monkeypatch.setattr(ranks, "processes_started_by", started_by)
    called(request, session, call).runtest()
    assert noted == [(call.server, ()), "start", "restored", "close"]
