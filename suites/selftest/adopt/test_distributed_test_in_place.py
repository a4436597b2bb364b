"""Unit tests of DeepSpeed's tests in place of processes: world sizes, launchers, items and directories."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.features.adopt import distributed_test
from lockstep.features.adopt.distributed_test import DistributedTest, SkipMessages
from lockstep.features.adopt.kinds import RANKS_VARIABLES, Demand, LeftAlone
from suites.selftest.adopt.stand_ins import function, item_of, own_launcher, place


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


def _run_with_more(self: object, local_rank: int, colour: int) -> None: ...


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (type("Bare", (), {"is_dist_test": True}), "it has no _dist_run"),
        (type("Bare", (), {"is_dist_test": True, "_dist_run": own_launcher}), "it has no _launch_procs"),
        (
            type("A", (Base,), {"_launch_procs": own_launcher}),
            "A has a launcher of its own: it overrides _launch_procs",
        ),
        (
            type("A", (Base,), {"_launch_with_file_store": own_launcher}),
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
    alone = type("A", (Base,), {"world_size": [1, 2], "_launch_procs": own_launcher})
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
        kind.demand(of_deepspeed(type("A", (Base,), {"_launch_procs": own_launcher})))


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
