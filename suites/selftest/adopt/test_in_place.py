"""Unit tests of what adopted tests run in place of processes, and of what is put back after them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.adopt import continuous, distributed_test, modules, multi_process, torch_internals
from lockstep.features.adopt.continuous import Continuous
from lockstep.features.adopt.distributed_test import DistributedTest, SkipMessages
from lockstep.features.adopt.kinds import (
    RANKS_VARIABLES,
    Demand,
    LeftAlone,
    NothingToRun,
    NotOnRanks,
    RankOfItem,
)
from lockstep.features.adopt.multi_process import Child, MultiProcess, Pipe

# Variables of modules


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return the module `left_over`, and `left_over_else`, of another package."""
    made = ModuleType("left_over"), ModuleType("left_over_else")
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(one=1, gone=2, items=[1, 2], names={"a": 1}, members={1}, text="a")
    return made


def test_variables_of_a_package_are_put_back(package: tuple[ModuleType, ModuleType]) -> None:
    module, other = package
    items, names, members = module.items, module.names, module.members
    with modules.restored("left_over"):
        for each in package:
            vars(each).update(one=7, new=3, below=ModuleType("left_over.below"), __hidden__=1)
            del each.gone
            each.items.append(3)
            each.names["a"] = 5
            each.members.add(2)
        module.text = "b"
    assert (module.one, module.gone, module.text, hasattr(module, "new")) == (1, 2, "a", False)
    assert (module.items, module.names, module.members) == ([1, 2], {"a": 1}, {1})
    assert module.items is items
    assert module.names is names
    assert module.members is members
    assert (module.below.__name__, module.__hidden__) == ("left_over.below", 1)
    assert (other.one, other.new, other.items, other.members) == (7, 3, [1, 2, 3], {1, 2})


def test_collections_are_put_back_by_identity(package: tuple[ModuleType, ModuleType]) -> None:
    module, _ = package
    module.items[0] = first = torch.zeros(2)
    module.names["a"] = value = torch.ones(2)
    with modules.restored("left_over"):
        module.items[0], module.names["a"] = torch.zeros(2), torch.ones(2)
        module.members.clear()
        module.members.add(5)
    assert module.items[0] is first
    assert module.names["a"] is value
    assert module.members == {1}
    with modules.restored("left_over"):
        module.names["b"] = module.names.pop("a")
    assert list(module.names) == ["a"]


def test_without_a_package_nothing_is_put_back(package: tuple[ModuleType, ModuleType]) -> None:
    with modules.restored(""):
        package[0].one = 9
    assert package[0].one == 9


def test_modules_below_a_package_are_of_it() -> None:
    assert [modules._is_of(name, "a.b") for name in ("a.b", "a.b.c", "a.bc", "a")] == [
        True,
        True,
        False,
        False,
    ]


# DeepSpeed's tests


class Base:
    """The base class of tests of DeepSpeed's kind."""

    is_dist_test = True
    world_size: Any = 2
    exec_timeout = 600

    def _dist_run(self, local_rank: int, num_procs: int, skip_msg: Any) -> Any:
        return None

    def _launch_procs(self, num_procs: int) -> None: ...


def sizes(mark: object = None, fixture: bool = False, cls: type = Base, **params: Any) -> tuple[int, ...]:
    def test(self: object) -> None: ...
    def with_fixture(self: object, world_size: int) -> None: ...

    function = with_fixture if fixture else test
    if mark is not None:
        marks = [SimpleNamespace(name="other", args=(9,)), SimpleNamespace(name="world_size", args=(mark,))]
        function.pytestmark = marks  # type: ignore[attr-defined]
    return distributed_test._sizes_of(function, cls, params)


def test_the_world_size_is_of_the_mark_or_a_parameter_or_the_class() -> None:
    assert sizes() == (2,)
    assert sizes(4, world_size=3) == (4,)
    assert sizes([1, 2]) == (1, 2)
    assert sizes((3,)) == (3,)
    assert sizes(fixture=True, world_size=3) == (3,)
    with pytest.raises(LeftAlone, match=r"^its world size comes from a fixture, which is known only when"):
        sizes(fixture=True)


@pytest.mark.parametrize("size", [0, -1, "two", [], [1, 0], [1, "2"], None])
def test_a_world_size_that_is_none_is_left_alone(size: object) -> None:
    with pytest.raises(LeftAlone) as reason:
        sizes(cls=type("A", (Base,), {"world_size": size}))
    assert str(reason.value) == f"its world size is {size!r}"


def test_a_class_of_deepspeeds_has_a_timeout_if_it_names_one() -> None:
    assert distributed_test._timeout_of(type("A", (Base,), {})) == 0.0
    assert distributed_test._timeout_of(type("A", (Base,), {"exec_timeout": 900})) == 900.0
    bare = type("Bare", (), {"is_dist_test": True})
    assert distributed_test._timeout_of(bare) == 0.0
    classes = Base, bare, object, type("A", (), {"is_dist_test": 1})
    assert [DistributedTest().matches(cls) for cls in classes] == [True, True, False, False]


def _launch(self: object) -> None: ...


def _run_with_more(self: object, local_rank: int, colour: int) -> None: ...


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (type("Bare", (), {"is_dist_test": True}), "it has no _dist_run"),
        (type("Bare", (), {"is_dist_test": True, "_dist_run": _launch}), "it has no _launch_procs"),
        (
            type("A", (Base,), {"_launch_procs": _launch}),
            "A has a launcher of its own: it overrides _launch_procs",
        ),
        (
            type("A", (Base,), {"_launch_with_file_store": _launch}),
            "A has a launcher of its own: it overrides _launch_with_file_store",
        ),
        (
            type("B", (Base,), {"is_dist_test": True, "_dist_run": _run_with_more}),
            "its _dist_run has a parameter colour, which is unknown here",
        ),
    ],
)
def test_a_launcher_that_is_not_known_is_left_alone(cls: type, message: str) -> None:
    distributed_test._check_launcher(type("A", (Base,), {}))
    with pytest.raises(LeftAlone) as reason:
        distributed_test._check_launcher(cls)
    assert str(reason.value) == message


def test_directories_of_all_ranks_have_one_name(tmp_path: Path) -> None:
    made: Counter[str] = Counter()
    names = [("a", True), ("a", True), ("b", False), ("b", True)]
    found = [distributed_test._make_directory(tmp_path, made, *each).name for each in names]
    assert found == ["a0", "a1", "b", "b1"]
    assert distributed_test._make_directory(tmp_path, Counter(), "a") == tmp_path / "a0"
    assert (tmp_path / "a0").stat().st_mode & 0o777 == 0o700


def place(**fields: Any) -> RankOfItem:
    def skip(reason: str) -> Any:
        raise unittest.SkipTest(reason)

    given: dict[str, Any] = {
        "rank": 1,
        "size": 2,
        "device": "cpu",
        "directory": "/shared",
        "end_groups": lambda: None,
        "fail_peers": lambda: None,
        "skip_all": skip,
        "any_rank": lambda value: value,
    }
    return RankOfItem(**given | fields)


def test_a_launch_runs_in_place_as_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANKS_VARIABLES:
        monkeypatch.setenv(name, "7")
    met: list[object] = []

    class Test(Base):
        def _dist_run(self, **given: Any) -> Any:  # type: ignore[override]
            met.append([name for name in RANKS_VARIABLES if name in os.environ])
            os.environ["LEFT"] = "behind"

        def _dist_destroy(self) -> None:
            met.append("destroyed")

    launched = {1: False, 2: False}
    distributed_test._launch(place(end_groups=lambda: met.append("ended")), launched, Wrapped(Test()), 2)
    assert met == [[], "destroyed", "ended"]
    assert launched == {1: False, 2: True}
    assert "LEFT" not in os.environ
    assert os.environ["MASTER_PORT"] == "7"
    distributed_test._launch(place(), launched, Wrapped(Test()), 1)
    assert len(met) == 3
    with pytest.raises(
        pytest.fail.Exception, match="launches 5 processes, and this world is of size 2: the world"
    ):
        distributed_test._launch(place(), launched, Wrapped(Test()), 5)


class Wrapped:
    """A test whose `_dist_run` takes no arguments."""

    def __init__(self, test: Any) -> None:
        self._test = test
        self._dist_destroy = test._dist_destroy

    def _dist_run(self) -> Any:
        return self._test._dist_run()


def test_a_launch_passes_what_dist_run_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29")

    class Old:
        def _dist_run(
            self, local_rank: int, num_procs: int, master_port: str, init_method: str, skip_msg: SkipMessages
        ) -> None:
            self.given = local_rank, num_procs, master_port, init_method
            skip_msg.put("first")
            skip_msg.put("second")

    class New:
        def _dist_run(self, local_rank: int) -> str:
            return "returned"

    for test, reason in ((old := Old(), "first"), (New(), "returned")):
        with pytest.raises(pytest.skip.Exception, match=f"^{reason}$"):
            distributed_test._launch(place(), {2: False}, test, 2)
    assert old.given == (1, 2, "29", "file:///shared/rendezvous")


def test_of_several_world_sizes_an_item_launches_its_own() -> None:
    met: list[object] = []
    test = SimpleNamespace(_launch_procs=lambda *args: met.append(args))
    for given in (2, [1, 2], [1, 3]):
        distributed_test._launch_own_size(2, test, None, given)  # type: ignore[arg-type]
    assert met == [(2, ""), (2, ""), ([1, 3], "")]


# torch's tests


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


def function() -> None: ...


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


class Process:
    """torch's `MultiProcessTestCase`."""

    world_size: Any = 2
    skip_return_code_checks: tuple[object, ...] = ()
    special_return_code_checks: tuple[object, ...] = ()

    def __init__(self, method: str = "test_a") -> None:
        self.method = method

    def test_a(self) -> None: ...
    def _spawn_processes(self) -> None: ...
    def _start_processes(self, proc: object) -> None: ...
    def _join_processes(self, fn: object) -> None: ...
    def _check_return_codes(self, fn: object) -> None: ...
    def join_or_run(self, fn: object) -> None: ...


class OfMethod(Process):
    @property
    def world_size(self) -> int:  # type: ignore[override]
        return {"test_a": 5}[self.method]


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's module of test classes, with ours."""
    given = {
        "MultiProcessTestCase": Process,
        "MultiProcContinuousTest": Workers,
        "C10dTorchCommsTestBase": OfTorchcomms,
        "TIMEOUT_OVERRIDE": {"test_a": 500},
        "TEST_SKIPS": {"x": SimpleNamespace(exit_code=7, message="too few")},
        "logger": None,
    }
    monkeypatch.setitem(sys.modules, torch_internals.COMMON, SimpleNamespace(**given))  # type: ignore[arg-type]


def item_of(cls: type, name: str = "test_a", **fields: Any) -> Any:
    return SimpleNamespace(cls=cls, name=name, **fields)


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
        MultiProcess().demand(item_of(type("A", (type("Own", (Process,), {name: _launch}),), {})))


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


# torch's tests with workers that stay


class Workers:
    """torch's `MultiProcContinuousTest`."""

    world_size: Any = 3
    _processes_spawned = True
    rank: Any = None
    skips: str = ""

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        if cls.skips:
            raise unittest.SkipTest(cls.skips)
        if not cls._processes_spawned:
            cls.world_size = int(cls.world_size)
            sys.modules[torch_internals.COMMON].logger.info("spawns")
            cls._spawn_processes(cls.world_size)

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        raise AssertionError("a process is started")

    @classmethod
    def _worker_loop(cls) -> None: ...
    def _worker_run_main_wait(self, method: Any) -> Any: ...
    def id(self) -> str:
        return "module.Workers.test_a"


class OfTorchcomms(Workers):
    pass


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
            (type("Own", (Workers,), {name: _launch}), f"Own has a launcher of its own: it overrides {name}")
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


# Items of DeepSpeed's


class Metafunc:
    """A method, as `pytest_generate_tests` gets it."""

    def __init__(self, cls: type | None, function: Any) -> None:
        self.cls, self.function = cls, function
        self.fixturenames = ["a"]
        self.made: list[object] = []

    def parametrize(self, name: str, values: list[int], ids: list[str]) -> None:
        self.made.append((name, values, ids))


def test_each_world_size_of_a_list_is_an_item() -> None:
    many, one = type("A", (Base,), {"world_size": [1, 2, 1]}), type("A", (Base,), {"world_size": [2, 2]})
    alone = type("A", (Base,), {"world_size": [1, 2], "_launch_procs": _launch})
    for cls in (many, one, alone, object, None):
        metafunc: Any = Metafunc(cls, function)
        DistributedTest().pytest_generate_tests(metafunc)
        sizes = [("ranks_size", [1, 2], ["1-rank", "2-ranks"])] if cls is many else []
        assert metafunc.made == sizes
        assert metafunc.fixturenames == (["a", "ranks_size"] if sizes else ["a"])


def of_deepspeed(cls: type = Base, fixture: Any = None, **fields: Any) -> Any:
    info = SimpleNamespace(name2fixturedefs={"given": [SimpleNamespace(func=fixture)]})
    return item_of(cls, function=function, _fixtureinfo=info, **fields)


def test_an_item_of_deepspeeds_has_the_world_of_its_size() -> None:
    kind = DistributedTest()
    own = type("A", (Base,), {"exec_timeout": 900, "world_size": [3, 4]})
    assert kind.demand(of_deepspeed()) == Demand(2)
    assert kind.demand(of_deepspeed(own)) == Demand(3, 900.0)
    assert kind.demand(of_deepspeed(callspec=SimpleNamespace(params={"ranks_size": 5}))) == Demand(5)
    assert kind.demand(of_deepspeed(callspec=SimpleNamespace(params={"world_size": 6}))) == Demand(6)
    item = of_deepspeed()
    assert kind.owner_of_groups(item) is item
    starts = "its fixture given is a DistributedFixture, which starts processes itself"
    with pytest.raises(LeftAlone, match=f"^{starts}$"):
        kind.demand(of_deepspeed(fixture=SimpleNamespace(is_dist_fixture=True)))
    assert kind.demand(of_deepspeed(fixture=SimpleNamespace(is_dist_fixture=1))) == Demand(2)
    with pytest.raises(LeftAlone):
        kind.demand(of_deepspeed(type("A", (Base,), {"_launch_procs": _launch})))


def test_what_starts_processes_of_deepspeeds_runs_in_place(
    monkeypatch: pytest.MonkeyPatch, package: tuple[ModuleType, ModuleType]
) -> None:
    met: list[object] = []
    monkeypatch.setattr(
        distributed_test, "_launch", lambda place, done, test, size: done.update({size: True})
    )
    monkeypatch.setattr(distributed_test, "_package_of", lambda cls: "left_over")
    before = multiprocessing.get_start_method(allow_none=True)

    class Starting(Base):
        world_size = (1, 2)

        def _launch_daemonic_procs(self, num_procs: int) -> None: ...

        def _launch_with_file_store(self, request: object, world_size: object) -> None: ...

        def _launch_procs(self, num_procs: int, init_method: str) -> None:  # type: ignore[override]
            met.append(num_procs)
            self._launch_daemonic_procs(num_procs)

    with DistributedTest().running(of_deepspeed(Starting), place()):
        Starting()._launch_with_file_store(None, (1, 2))
        package[0].one = 5
        multiprocessing.set_start_method("fork" if before != "fork" else "spawn", force=True)
    assert met == [2]
    assert package[0].one == 1
    assert multiprocessing.get_start_method(allow_none=True) == before
    with (
        pytest.raises(pytest.fail.Exception) as failed,
        DistributedTest().running(of_deepspeed(Starting), place()),
    ):
        Starting()._launch_daemonic_procs(1)
    assert str(failed.value) == "Starting did not launch the 2 processes of its world_size"
    with DistributedTest().running(of_deepspeed(), place()):  # one size, and nothing launched
        Base()._launch_procs(2)
    assert Base._launch_procs.__module__ == __name__


def test_the_package_of_a_test_is_that_of_the_dist_it_uses() -> None:
    def cls_of(dist: object) -> Any:
        def _dist_run() -> None: ...

        return SimpleNamespace(_dist_run=FunctionType(_dist_run.__code__, {"dist": dist}))

    names = ("deepspeed.comm", "torch.distributed")
    assert [distributed_test._package_of(cls_of(ModuleType(name))) for name in names] == ["deepspeed", ""]
    assert distributed_test._package_of(cls_of(None)) == ""


def test_the_items_of_deepspeeds_share_directories(tmp_path: Path) -> None:
    factory = SimpleNamespace(mktemp=lambda name: Path("/own"))
    session = SimpleNamespace(world=SimpleNamespace(shared_tmp_path=tmp_path))

    def made_by(cls: type | None, session: object) -> Path:
        manager = SimpleNamespace(get_plugin=lambda name: session)
        item: Any = SimpleNamespace(config=SimpleNamespace(pluginmanager=manager, _tmp_path_factory=factory))
        item.cls = cls
        protocol = DistributedTest().pytest_runtest_protocol(item)
        next(protocol)
        found = factory.mktemp("a")
        with pytest.raises(StopIteration) as end:
            protocol.send("result")
        assert end.value.value == "result"
        assert factory.mktemp("a") == Path("/own")
        return found

    assert made_by(Base, session) == tmp_path / "a0"
    assert made_by(object, session) == made_by(None, session) == made_by(Base, None) == Path("/own")
