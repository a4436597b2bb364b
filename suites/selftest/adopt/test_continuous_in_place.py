"""Unit tests of torch's tests with workers that stay, in place of these: their worlds, groups and ends."""

from __future__ import annotations

import os
import sys
import unittest
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.adopt import continuous, torch_internals
from lockstep.features.adopt.continuous import Continuous
from lockstep.features.adopt.kinds import Demand, LeftAlone, NothingToRun
from suites.selftest.adopt.stand_ins import OfTorchcomms, Process, Workers, item_of, own_launcher, place


class Early:
    """That of torch before 2.12."""


@pytest.mark.usefixtures("common")
def test_a_class_with_workers_has_the_world_that_it_would_start() -> None:
    kind = Continuous()
    assert [kind.matches(cls) for cls in (Workers, OfTorchcomms, Process)] == [True, True, False]
    of_string = type("A", (Workers,), {"world_size": "2"})
    assert kind.demand(item_of(Workers)) == Demand(3, 500.0)
    assert kind.demand(item_of(of_string, "test_b")) == Demand(2)
    assert (of_string.world_size, of_string._processes_spawned) == ("2", True)
    assert (Workers.world_size, Workers._processes_spawned) == (3, True)
    assert sys.modules[torch_internals.COMMON].logger is None
    assert kind.owner_of_groups(item_of(Workers)) is Workers
    for fields, reason in (
        ({"world_size": 0}, "world_size is 0: torch would start no process, and run nothing"),
        ({"skips": "no backend"}, "no backend"),
    ):
        with pytest.raises(NothingToRun, match=f"^{reason}$"):
            kind.demand(item_of(type("A", (Workers,), fields)))
    assert kind.demand(item_of(type("A", (Workers,), {"world_size": 1}))).size == 1


@pytest.mark.usefixtures("common")
@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (type("A", (Workers,), {"world_size": "x"}), "its world_size cannot be read: ValueError: invalid "),
        (OfTorchcomms, "it needs torchcomms, whose groups are not torch's"),
        (Early, "torch before 2.12 starts its processes as soon as the class is set up"),
        *(
            (
                type("Own", (Workers,), {name: own_launcher}),
                f"Own has a launcher of its own: it overrides {name}",
            )
            for name in (
                "_ensure_processes_spawned",
                "_spawn_processes",
                "_worker_loop",
                "_worker_run_main_wait",
            )
        ),
    ],
)
def test_a_class_with_other_workers_is_left_alone(cls: type, reason: str) -> None:
    with pytest.raises(LeftAlone) as left:
        Continuous().demand(item_of(cls))
    assert str(left.value).startswith(reason)


@pytest.mark.usefixtures("common")
def test_what_waits_for_workers_runs_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    met: list[object] = []
    monkeypatch.setattr(continuous.Worker, "run", lambda self: met.append(self._parent))
    case = Workers()

    def waits() -> None:
        """Wait."""
        met.append("waited")

    item = item_of(Workers, instance=case, obj=waits)
    with Continuous().running(item, place()):
        assert item.obj.__doc__ == "Wait."
        item.obj()
        case._spawn_processes(4)
        os.environ["LOCAL_RANK"] = "9"
    assert met == [case]
    assert item.obj is waits
    assert os.environ["LOCAL_RANK"] == "3"
    for name in ("processes", "task_queues", "completion_queues"):
        assert getattr(Workers, name) == []
        delattr(Workers, name)
    assert Workers.rdvz_file == "/dev/null/none"  # type: ignore[attr-defined]
    del Workers.rdvz_file  # type: ignore[attr-defined]


@pytest.mark.usefixtures("common")
@pytest.mark.parametrize("is_up", [True, False])
def test_a_worker_makes_its_group_once(monkeypatch: pytest.MonkeyPatch, is_up: bool) -> None:
    monkeypatch.setattr(torch_internals, "is_initialized", lambda: is_up)
    met: list[object] = []

    class Own(Workers):
        @classmethod
        def _init_pg(cls, *given: object) -> None:
            met.append(given)

        @classmethod
        def _run_test_given_id(cls, name: str) -> None:
            met.append((name, cls.rank))
            cls._worker_run_main_wait(made, lambda: met.append("method"))()  # type: ignore[arg-type]

    made: Any = SimpleNamespace(doCleanups=lambda: met.append("clean"))
    continuous.Worker(Own(), place()).run()
    ran: list[object] = [("module.Workers.test_a", 1), "method", "clean"]
    assert met == ([] if is_up else [(1, 2, "/shared/rendezvous")]) + ran
    assert Own.rank is None


@pytest.mark.usefixtures("common")
@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (None, pytest.fail.Exception, "exited with 0 before its end"),
        (5, pytest.fail.Exception, "exited with 5 before its end"),
        (7, unittest.SkipTest, "too few"),
    ],
)
def test_the_exit_of_a_worker_is_judged(
    monkeypatch: pytest.MonkeyPatch, code: int | None, kind: type[BaseException], message: str
) -> None:
    monkeypatch.setattr(torch_internals, "is_initialized", lambda: True)

    def leave(name: str) -> None:
        raise SystemExit(code)

    with pytest.raises(kind) as ended:
        continuous.Worker(type("A", (Workers,), {"_run_test_given_id": leave})(), place()).run()
    assert str(ended.value) == message
    if code != 7:
        assert ended.traceback[-1].name == "leave"
        assert ended.value.__suppress_context__
