"""Unit tests of torch's tests in place of processes: the child that a rank runs, and its end."""

from __future__ import annotations

import multiprocessing
import os
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.adopt import multi_process, torch_internals
from lockstep.features.adopt.kinds import RANKS_VARIABLES, Demand, LeftAlone, NothingToRun, NotOnRanks
from lockstep.features.adopt.multi_process import Child, MultiProcess, Pipe
from suites.selftest.adopt.stand_ins import Process, Workers, function, item_of, own_launcher, place


class Parent:
    """A test of torch's after its `setUp`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        Parent.latest = self

    latest: Any

    def _current_test_name(self) -> str:
        return "test_a"

    @classmethod
    def _run(cls, rank: int, name: str, file: str, pipe: Pipe, fake_pg: bool) -> None:
        cls.latest.met = rank, name, file, fake_pg
        pipe.send(3)
        assert not pipe.poll()
        pipe.close()
        cls.left = "behind"  # type: ignore[attr-defined]
        if cls.latest.error:
            raise cls.latest.error


class BaseOfTorch:
    run_test = None


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "base", lambda name: BaseOfTorch)
    monkeypatch.setattr(torch_internals, "skip_message", {7: "too few"}.get)


@pytest.mark.usefixtures("torchs")
def test_a_child_runs_in_a_rank_and_leaves_nothing_in_its_class() -> None:
    parent = Parent()
    Child(parent, place()).run(function)
    assert parent.met == (1, "test_a", "/shared/rendezvous", False)
    assert not hasattr(Parent, "left")
    assert BaseOfTorch.run_test is None
    parent.fake_pg = True
    Child(parent, place()).run(function)
    assert parent.met[-1] is True


@pytest.mark.usefixtures("torchs")
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SystemExit(), pytest.fail.Exception, "exited with 0 before its end: 3"),
        (SystemExit(5), pytest.fail.Exception, "exited with 5 before its end: 3"),
        (SystemExit(7), unittest.SkipTest, "too few"),
        (unittest.SkipTest("why"), unittest.SkipTest, "why"),
        (ValueError("no"), ValueError, "no"),
    ],
)
def test_the_end_of_a_child_is_judged(error: BaseException, kind: type[BaseException], message: str) -> None:
    with pytest.raises(kind) as ended:
        Child(Parent(error), place()).run(function)
    assert str(ended.value) == message


@pytest.mark.usefixtures("torchs")
def test_a_failure_that_is_expected_is_one_of_all_ranks() -> None:
    met: list[object] = []

    def any_rank(value: bool) -> bool:
        met.append(value)
        return value

    with_failure = place(any_rank=any_rank, fail_peers=lambda: met.append("broken"))
    expects = SimpleNamespace(__unittest_expecting_failure__=True)
    with pytest.raises(ValueError, match="no"):
        Child(Parent(ValueError("no")), with_failure).run(expects)
    assert met == ["broken", True]
    with pytest.raises(unittest.SkipTest):
        Child(Parent(unittest.SkipTest("why")), with_failure).run(expects)
    Child(Parent(), with_failure).run(expects)
    assert met == ["broken", True, False]
    with pytest.raises(pytest.fail.Exception, match=r"^another rank failed, as the test expects$"):
        Child(Parent(), place(any_rank=lambda _: True)).run(expects)
    parent = Parent()
    parent.__unittest_expecting_failure__ = False  # type: ignore[attr-defined]
    Child(parent, place(any_rank=lambda _: True)).run(expects)


@pytest.mark.usefixtures("torchs")
def test_a_method_of_a_child_ends_with_its_cleanups(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    monkeypatch.setattr(torch_internals, "seed", lambda: met.append("seeded"))
    run = Child(Parent(), place(end_groups=lambda: met.append("ended")))._run_test_of()
    child = SimpleNamespace(
        test_a=lambda: met.append("ran"), doCleanups=lambda: met.append("clean"), destroy_pg_upon_exit=True
    )
    run(child, "test_a", None)
    assert met == ["seeded", "ran", "clean", "ended"]
    child.destroy_pg_upon_exit = False
    run(child, "test_a", None)
    assert met[4:] == ["seeded", "ran", "clean"]


def test_attributes_of_a_class_and_its_bases_are_put_back() -> None:
    class Above:
        a = 1
        b = 2

    class Below(Above):
        c = 3

    with multi_process._attributes_restored(Below):
        Above.a, Below.c, Below.d = 7, 8, 9  # type: ignore[attr-defined]
        del Above.b
    assert (Below.a, Below.b, Below.c, hasattr(Below, "d")) == (1, 2, 3, False)


def test_torchs_launcher_runs_from_one_rank() -> None:
    met: list[object] = []
    process = SimpleNamespace(join=lambda seconds: met.append(seconds))
    case = SimpleNamespace(
        _spawn_processes=lambda: met.append("spawned"), _join_processes=met.append, processes=[process]
    )
    multi_process._launch(case, "function", place(rank=1))
    assert met == []
    multi_process._launch(case, "function", place(rank=0))
    assert met == ["spawned", "function", 1.0]


class OfMethod(Process):
    @property
    def world_size(self) -> int:  # type: ignore[override]
        return {"test_a": 5}[self.method]


@pytest.mark.usefixtures("common")
def test_a_class_of_processes_has_the_world_that_its_instance_asks_for() -> None:
    kind = MultiProcess()
    assert [kind.matches(cls) for cls in (Process, OfMethod, Workers)] == [True, True, False]
    assert kind.demand(item_of(Process)) == Demand(2, 500.0)
    assert kind.demand(item_of(type("A", (Process,), {"world_size": "1", "test_b": 0}), "test_b")) == Demand(
        1
    )
    assert kind.demand(item_of(OfMethod)).size == 5
    item = item_of(Process)
    assert kind.owner_of_groups(item) is item
    for cls in (unittest.skip("why")(type("A", (Process,), {})), type("A", (Process,), {"test_a": skipped})):
        with pytest.raises(NotOnRanks):
            kind.demand(item_of(cls))
    none = "world_size is 0: torch would start no process, and run nothing"
    with pytest.raises(NothingToRun, match=f"^{none}$"):
        kind.demand(item_of(type("A", (Process,), {"world_size": 0})))
    with pytest.raises(LeftAlone, match=r"^its world_size cannot be read: KeyError: 'test_b'$"):
        kind.demand(item_of(type("A", (OfMethod,), {"test_b": function}), "test_b"))


@unittest.skip("why")
def skipped() -> None: ...


@pytest.mark.usefixtures("common")
@pytest.mark.parametrize(
    "name", [name for name in vars(Process) if name.startswith(("_s", "_j", "_c", "jo"))]
)
def test_a_class_with_a_launcher_of_its_own_is_left_alone(name: str) -> None:
    with pytest.raises(LeftAlone, match=f"^Own has a launcher of its own: it overrides {name}$"):
        MultiProcess().demand(item_of(type("A", (type("Own", (Process,), {name: own_launcher}),), {})))


@pytest.mark.usefixtures("common")
def test_what_waits_for_processes_runs_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in RANKS_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("TORCH_NCCL_DESYNC_DEBUG", raising=False)
    met: list[object] = []
    monkeypatch.setattr(multi_process.Child, "run", lambda self, ran: met.append(("child", ran)))
    monkeypatch.setattr(multi_process, "_launch", lambda case, ran, place: met.append(("launched", ran)))
    before = multiprocessing.get_start_method(allow_none=True)
    for start, cls in (
        ("_spawn_processes", Process),
        ("_start_processes", Process),
        ("_spawn_processes", type("A", (Process,), {"skip_return_code_checks": [function]})),
        ("_spawn_processes", type("A", (Process,), {"special_return_code_checks": [function]})),
    ):
        case: Any = cls()
        case._current_test_name = lambda: "test_a"
        case.file_name = str(tmp_path / "made")
        (tmp_path / "made").touch()
        with MultiProcess().running(item_of(cls, instance=case), place()):
            assert multiprocessing.get_start_method() == "spawn"
            assert not {*RANKS_VARIABLES} & os.environ.keys()
            os.environ["TORCH_NCCL_DESYNC_DEBUG"] = os.environ["RANK"] = "1"
            with pytest.raises(unittest.SkipTest, match=r"^its setUp started no process, so nothing ran$"):
                case._join_processes(function)
            getattr(case, start)(*([case] if start == "_start_processes" else []))
            case._join_processes(function)
            assert not {"_spawn_processes", "_start_processes", "_join_processes"} & vars(case).keys()
        assert not (tmp_path / "made").exists()
        assert multiprocessing.get_start_method(allow_none=True) == before
        assert [os.environ.get(name) for name in RANKS_VARIABLES] == ["7"] * len(RANKS_VARIABLES)
        assert "TORCH_NCCL_DESYNC_DEBUG" not in os.environ
    assert met == [("child", function)] * 2 + [("launched", function)] * 2
    with MultiProcess().running(item_of(Process, instance=case), place()):
        pass  # its file is gone already
