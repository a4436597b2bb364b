"""Unit tests of what adopted tests run in place of processes, and of what is put back after them."""

from __future__ import annotations

import os
import sys
import unittest
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.adopt import distributed_test, modules, multi_process, torch_internals
from lockstep.features.adopt.distributed_test import DistributedTest, SkipMessages
from lockstep.features.adopt.kinds import (
    RANKS_VARIABLES,
    LeftAlone,
    RankOfItem,
)
from lockstep.features.adopt.multi_process import Child, Pipe

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
