"""The default group of a rank: since when its collectives count, and groups that ended with a case."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch

from lockstep.place import Place
from lockstep.rank import process_group
from lockstep.rank.flight_record import MAX_RECORDED
from lockstep.rank.process_group import DefaultGroup, EndedGroups
from lockstep.rank.rendezvous import NO_TIMEOUT
from lockstep.specification import RankSpec, SessionSpec, WorldKey


class Group:
    """A process group of a test."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The time of the module, which moves on with each look at it."""
    now = itertools.count(1).__next__
    monkeypatch.setattr(process_group, "time", SimpleNamespace(time_ns=now))
    return now


@pytest.fixture
def group(tmp_path: Path) -> DefaultGroup:
    key = SimpleNamespace(backend="gloo", device="cpu", size=2, has_group=False)
    spec = SimpleNamespace(
        rank=0, key=key, place=None, gpus=(), path_of=lambda name: str(tmp_path / name), master=("", 0)
    )
    return DefaultGroup(cast(Any, spec))


def test_collectives_of_other_groups_do_not_count_while_the_group_is_hidden_and_after(
    group: DefaultGroup, clock: Callable[[], int]
) -> None:
    before = clock()
    group.hide()
    hidden = clock()
    assert not group.has_begun(before)
    assert group.has_begun(hidden)  # of the groups that there are now
    group.show()
    assert group.has_begun(before)
    assert not group.has_begun(hidden)
    assert group.has_begun(clock())


def test_collectives_of_before_the_ranks_met_do_not_count(
    group: DefaultGroup, clock: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_prepare", lambda: None)
    before = clock()
    group.join()
    assert not group.has_begun(before)
    assert group.has_begun(clock())


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that torch knows, in a list that a test fills."""
    found: list[Group] = []
    monkeypatch.setattr(process_group, "process_groups", lambda: found)
    return found


def test_groups_of_before_a_failed_case_are_named_once(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "wrap_destroy_process_group", lambda wrap: None)
    ended = EndedGroups()
    ended.begin_case()
    groups.append(Group())  # made in the case
    ended.end("n=1")
    assert ended.note == ""
    ended.begin_case()
    ended.end("n=2")
    words = "process groups and meshes that were made before case [n=2] ended when it failed"
    assert ended.note.startswith(words)
    ended.begin_case()
    ended.end("n=3")
    assert ended.note.startswith(words)


def test_groups_that_ended_with_a_case_may_be_destroyed_again(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[object] = []
    wrapped: list[Callable[..., None]] = []
    monkeypatch.setattr(
        process_group, "wrap_destroy_process_group", lambda wrap: wrapped.append(wrap(destroyed.append))
    )
    ended = EndedGroups()
    ended.end("n=0")  # there is none
    assert wrapped == []
    first, second, other = Group(), Group(), Group()
    for each in (first, second):
        groups[:] = [each]
        ended.end("n=1")
    (destroy,) = wrapped
    for group in (first, second, other, None):
        destroy(group)
    assert destroyed == [other, None]


def test_the_default_group_is_of_no_test(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    groups += [Group(), Group()]
    dist = SimpleNamespace(group=SimpleNamespace(WORLD=groups[0]))
    monkeypatch.setattr(process_group, "dist", dist)
    assert process_group._groups_of_tests() == groups[1:]


# Joining and leaving, with a torch that notes what it is asked for


class Torch:
    """A rank's default group, and the calls of torch and of backends in their order."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.patch = tmp_path, monkeypatch
        self.calls = mock = Mock()
        self.own, self.other = self.backend("own"), self.backend("other")
        self.is_initialized = False
        mock.dist.is_initialized.side_effect = lambda: self.is_initialized
        mock.dist.init_process_group.side_effect = lambda *_, **__: setattr(self, "is_initialized", True)
        mock.dist.destroy_process_group.side_effect = lambda: setattr(self, "is_initialized", False)
        mock.dist.PrefixStore.side_effect = lambda *given: given
        for name in ("dist", "Device", "set_default_store", "take_groups", "importlib"):
            monkeypatch.setattr(process_group, name, getattr(mock, name))
        monkeypatch.setattr(process_group, "objects_of", lambda name: [self.own])
        monkeypatch.setattr(process_group, "meets", lambda name: self.own.meets)
        monkeypatch.setattr(process_group, "BACKENDS", {"own": self.own, "other": self.other})
        monkeypatch.setattr(process_group, "process_groups", lambda: ["a group"])
        monkeypatch.setattr(process_group, "limit_records", lambda: 9)
        monkeypatch.setattr(process_group, "interface_of", lambda address: f"of {address}")
        monkeypatch.setattr(torch, "set_num_threads", mock.set_num_threads)
        self.environ: dict[str, str] = {}
        monkeypatch.setattr(process_group, "os", SimpleNamespace(environ=self.environ))

    def backend(self, name: str) -> Any:
        made = getattr(self.calls, name)
        made.module, made.connects, made.meets = "", True, True
        made.store.return_value = None
        return made

    def group(self, rank: int = 1, **changes: Any) -> DefaultGroup:
        session = SessionSpec((), "/", (), (), {}, {}, captures=True)
        spec = RankSpec(rank, WorldKey(3, "gloo", "cpu"), session, 0, str(self.path), "")
        made = DefaultGroup(dataclasses.replace(spec, **changes))
        self.patch.setattr(made, "stores", self.calls.stores)
        self.calls.reset_mock()
        return made

    def new_calls(self, *names: str) -> list[Any]:
        """Return the calls since the last time whose names begin with one of these, or all but questions."""
        calls = [each for each in self.calls.mock_calls if each[0] != "dist.is_initialized"]
        self.calls.reset_mock()
        return [each for each in calls if not names or each[0].startswith(names)]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(tmp_path, monkeypatch)


PLACE = Place(4, ("a", "b"), 5, 2, 6, "10.0.0.2", "10.0.0.1", 7000)
GROUPLESS = WorldKey(3, "gloo", "cpu", has_group=False)


def test_a_rank_joins_over_a_new_store_each_time(fake: Torch, clock: Callable[[], int]) -> None:
    group = fake.group()
    store = fake.calls.stores.make.return_value
    for number in (1, 2):
        group.is_aborted = True
        group.join()
        assert fake.new_calls("stores", "dist.init") == [
            call.stores.make(f"store-{number}", 3, is_eager=True),
            call.dist.init_process_group("gloo", store=store, rank=1, world_size=3, timeout=NO_TIMEOUT),
        ]
        assert group.is_aborted is False
    assert group.joins == [(1, (0, 1, 2)), (2, (0, 1, 2))]


def test_a_group_is_made_with_the_store_that_its_backend_needs(fake: Torch) -> None:
    group = fake.group()
    fake.own.store.return_value = "own store"
    group.join()
    assert [each[0] for each in fake.new_calls("stores", "dist")] == ["dist.init_process_group"]
    group.begin_item()
    assert fake.new_calls("set_default") == [call.set_default_store(("item-1", "own store"))]


def test_a_world_without_a_group_is_only_prepared(fake: Torch) -> None:
    group = fake.group(key=GROUPLESS)
    group.is_aborted = True
    group.join()
    assert group.is_aborted is False
    assert group.joins == []
    calls = [each[0] for each in fake.new_calls()]
    assert "own.prepare" in calls
    assert "dist.init_process_group" not in calls


def test_a_rank_is_prepared_before_it_joins(fake: Torch) -> None:
    group = fake.group(gpus=("7",))
    fake.own.module = "of.own"
    fake.other.module = "of.other"
    group.join()
    calls = fake.new_calls()
    assert calls[:8] == [
        call.set_num_threads(1),
        call.own.prepare(),
        call.Device(group.device.type),
        call.Device().use(group.device, ("7",)),
        call.importlib.import_module("of.own"),
        call.own.limit_record(9),
        call.other.limit_record(9),
        call.own.store(),
    ]
    assert fake.environ == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GLOO_SOCKET_IFNAME": "of 127.0.0.1",
    }
    fake.own.module = ""
    fake.environ.update(GLOO_SOCKET_IFNAME="eth9", OMP_NUM_THREADS="5")
    group.join()
    assert "importlib.import_module" not in [each[0] for each in fake.calls.mock_calls]
    assert fake.new_calls("set_num") == [call.set_num_threads(5)]
    assert fake.environ["GLOO_SOCKET_IFNAME"] == "eth9"


def test_a_rank_among_hosts_has_its_place_in_the_environment(fake: Torch) -> None:
    group = fake.group(place=PLACE, gpus=("7", "8"))
    group.join()
    assert fake.new_calls("stores.reach") == [call.stores.reach_server(PLACE)]
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "6",
        "GLOO_SOCKET_IFNAME": "of 10.0.0.2",
        "GROUP_RANK": "4",
        "NCCL_SOCKET_IFNAME": "of 10.0.0.2",
    }
    assert fake.environ == expected
    fake.environ.update(NCCL_SOCKET_IFNAME="eth9")
    group.join()
    assert fake.environ == {**expected, "NCCL_SOCKET_IFNAME": "eth9"}
    fake.environ.clear()
    fake.new_calls()
    fake.group(place=dataclasses.replace(PLACE, store_port=0)).join()
    assert fake.new_calls("stores.reach") == []
    assert set(expected) - set(fake.environ) == {"GROUP_RANK", "NCCL_SOCKET_IFNAME"}
    assert fake.environ["GLOO_SOCKET_IFNAME"] == "of 127.0.0.1"
    assert fake.environ["LOCAL_RANK"] == "2"


def test_a_rank_that_stands_for_others_has_no_place_among_hosts(fake: Torch) -> None:
    fake.own.meets = False
    fake.group(place=PLACE).join()
    assert (fake.environ["LOCAL_RANK"], fake.environ["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert fake.new_calls("stores.reach") == []


@pytest.mark.parametrize(("place", "local_rank"), [(None, 1), (PLACE, 2)])
def test_a_rank_uses_the_device_of_its_number_on_its_host(
    fake: Torch, place: Place | None, local_rank: int
) -> None:
    of_rank = fake.calls.Device.return_value.of_rank
    of_rank.side_effect = lambda *given: given
    group = fake.group(place=place, gpus=("7", "8"))
    assert group.device == (local_rank, ("7", "8"))


@pytest.mark.parametrize(
    ("variable", "threads"),
    [("", 1), ("3", 3), (" 4 ,2", 4), ("0", 1), ("99999", 99999), ("100000", 1), ("-2", 1), ("many", 1)],
)
def test_threads_are_those_of_the_environment_or_one(variable: str, threads: int) -> None:
    assert process_group._threads(variable) == threads


def test_groups_of_an_item_meet_under_keys_of_its_own(fake: Torch) -> None:
    group = fake.group()
    store = fake.calls.stores.make.return_value
    group.begin_item()
    assert fake.new_calls() == []
    group.join()
    group.ended.note = "of the item before"
    group.joins.append((5, (0, 1)))
    group.begin_item()
    assert group.ended.note == ""
    assert group.joins == [(5, (0, 1))]
    group.begin_item()
    names = ["item-1", "item-2"]
    assert fake.new_calls("set_default") == [call.set_default_store((name, store)) for name in names]
    group.join()
    group.begin_item()
    assert fake.new_calls("set_default") == [call.set_default_store(("item-1", store))]
    fake.is_initialized = False
    group.begin_item()
    assert fake.new_calls("set_default") == []


def test_no_group_of_an_earlier_item_counts_in_the_next(fake: Torch, clock: Callable[[], int]) -> None:
    group = fake.group(key=GROUPLESS)
    group.join()
    group.is_aborted = True
    before = clock()
    group.begin_item()
    assert group.is_aborted is False
    assert not group.has_begun(before)
    assert group.has_begun(clock())
    fake.is_initialized = group.is_aborted = True
    group.begin_item()
    assert group.is_aborted is True
    with_group = fake.group()
    with_group.is_aborted = True
    fake.is_initialized = False
    with_group.begin_item()
    assert with_group.is_aborted is True


def test_a_group_stands_while_it_is_whole(fake: Torch) -> None:
    group = fake.group()
    assert group.stands() is False
    assert fake.group(key=GROUPLESS).stands() is True
    group.join()
    assert group.stands() is True
    group._living = (0, 1)
    assert group.stands() is False
    group._living = ()
    group.is_aborted = True
    assert group.stands() is False


def test_an_aborted_group_closes_all_connections(fake: Torch) -> None:
    group = fake.group()
    group.abort()
    assert fake.new_calls() == []
    assert group.is_aborted is False
    group.join()
    fake.new_calls()
    group.abort()
    abort = call.own.abort(is_of_world=True)
    closed = [call.own.close_connections(), call.other.close_connections()]
    assert fake.new_calls() == [abort, *closed]
    assert group.is_aborted
    fake.own.connects = False
    group.abort()
    assert fake.new_calls() == [abort]
    fake.is_initialized = False
    group.hide()
    fake.new_calls()
    group.abort()
    assert fake.new_calls() == [abort]
    fake.is_initialized = True
    group._backends.append(fake.other)
    group.abort()
    assert fake.new_calls()[2:] == closed
    own = fake.group(key=GROUPLESS)
    fake.is_initialized = True
    own.abort()
    assert fake.new_calls() == [call.own.abort(is_of_world=False), *closed]


def test_a_forked_child_leaves_groups_to_the_rank(fake: Torch) -> None:
    group = fake.group()
    group.detach()
    assert fake.new_calls() == [call.take_groups(), call.own.detach(), call.other.detach()]
    assert group._of_rank is fake.calls.take_groups.return_value
    fake.own.meets = False
    fake.group().detach()
    assert fake.new_calls() == [call.take_groups()]


def test_hidden_groups_are_put_back_for_those_of_a_test(fake: Torch) -> None:
    group = fake.group()
    hidden, of_test = Mock(), Mock()
    fake.calls.take_groups.side_effect = [hidden, of_test]
    group.hide()
    assert group.lend("store") is hidden.lend_default.return_value  # type: ignore[arg-type]
    hidden.lend_default.assert_called_once_with("store")
    assert group.show() is of_test
    hidden.put_back.assert_called_once_with()
    group.abort()
    assert not group.is_aborted


def test_a_group_is_repaired_by_leaving_and_joining(fake: Torch) -> None:
    group = fake.group()
    fake.patch.setattr(group, "ended", fake.calls.ended)
    group.join()
    fake.new_calls()
    group.repair()
    assert [each[0] for each in fake.new_calls("own.abort", "dist", "own.release", "ended")] == [
        "own.abort",
        "dist.destroy_process_group",
        "own.release",
        "dist.init_process_group",
    ]
    group.repair("n=1")
    assert fake.new_calls("ended", "own.abort") == [call.ended.end("n=1"), call.own.abort(is_of_world=True)]
    assert group.is_aborted is False


def test_a_destroyed_group_is_released_by_its_backend(fake: Torch) -> None:
    group = fake.group()
    group._destroy()
    assert fake.new_calls() == []
    fake.is_initialized = True
    group._destroy()
    assert fake.new_calls() == [call.dist.destroy_process_group(), call.own.release(["a group"])]
    group.leave()
    assert fake.new_calls() == [call.own.leave(group._destroy)]


def test_ranks_that_are_left_meet_under_new_numbers(fake: Torch, clock: Callable[[], int]) -> None:
    group = fake.group(rank=2)
    group.join()
    fake.new_calls()
    found = [("a group", (0, 1))]
    fake.patch.setattr(process_group, "group_members", lambda: found)
    assert group.members() == found
    group.regroup((0, 2))
    (init,) = fake.new_calls("dist.init")
    assert (init.kwargs["rank"], init.kwargs["world_size"]) == (1, 2)
    assert (fake.environ["RANK"], fake.environ["WORLD_SIZE"]) == ("1", "2")
    assert group.joins[1:] == [(2, (0, 2))]
    assert group.members() == [("a group", (0, 2))]
    assert group._left == ["a group"]
    assert not group.stands()


def test_a_group_of_one_process_stands_for_another_rank_or_size(fake: Torch) -> None:
    group = fake.group()
    group.join()
    fake.new_calls()
    group.stand_for(1, 3)
    assert fake.new_calls() == []
    for rank, size in ((0, 3), (0, 8)):
        group.stand_for(rank, size)
        destroyed, init = fake.new_calls("dist")
        assert destroyed == call.dist.destroy_process_group()
        assert (init.kwargs["rank"], init.kwargs["world_size"]) == (rank, size)


def test_hidden_times_are_known_for_as_many_calls_as_are_kept(fake: Torch) -> None:
    group = fake.group()
    assert group._foreign.maxlen == MAX_RECORDED
    assert group.has_begun(0)
