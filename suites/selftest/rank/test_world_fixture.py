"""The fixture `world`: equality of what ranks hold, bit by bit; meshes, and what it refuses."""

from __future__ import annotations

import copy
import socket
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lockstep import RankWorld

pytestmark = pytest.mark.ranks(2)

COMPLEX = torch.tensor([complex(1, -0.0), complex(float("nan"), 2)])


@pytest.mark.parametrize("value", [COMPLEX, COMPLEX.conj()], ids=["complex", "conjugated"])
def test_equal_complex_tensors_are_the_same(world: RankWorld, value: torch.Tensor) -> None:
    world.assert_same(value.clone())


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (torch.tensor([complex(1, 0.0)]), torch.tensor([complex(1, -0.0)])),
        (torch.tensor([complex(float("nan"), 1)]), torch.tensor([complex(float("nan"), 2)])),
    ],
    ids=["sign", "part-of-nan"],
)
def test_each_part_of_a_complex_number_counts(
    world: RankWorld, here: torch.Tensor, there: torch.Tensor
) -> None:
    with pytest.raises(AssertionError, match="rank"):
        world.assert_same(there if world.rank else here)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1, 2, 3]),
        ([1], (1,)),
        (1, True),
        (float("nan"), 1.0),
    ],
    ids=["dtype", "shape", "integers", "values", "keys", "length", "container", "type", "nan"],
)
def test_values_that_differ_on_a_rank_fail_on_both(world: RankWorld, here: object, there: object) -> None:
    with pytest.raises(
        AssertionError, match=r"ranks hold different values: 1 against 0\n  rank 0: .*\n  rank 1:"
    ):
        world.assert_same(there if world.rank else here)


@pytest.mark.parametrize(
    "value",
    [{"a": [torch.tensor([float("nan"), -0.0])], "b": (1, "c")}, float("nan"), torch.tensor([1, 2])],
    ids=["containers", "nan", "integers"],
)
def test_copies_of_a_value_are_the_same(world: RankWorld, value: object) -> None:
    world.assert_same(copy.deepcopy(value))


def test_a_mesh_has_a_place_for_each_rank(world: RankWorld) -> None:
    mesh = world.mesh(names=("hosts", "ranks"))
    assert (mesh.shape, mesh.mesh_dim_names) == ((1, 2), ("hosts", "ranks"))
    with pytest.raises(ValueError, match=r"a mesh of shape \(2, 2\) has 4 places, the world 2 ranks"):
        world.mesh(2, 2)
    uneven = copy.copy(world)
    uneven.hosts = ("a", "b")
    with pytest.raises(ValueError, match="2 ranks are not spread evenly over 2 hosts"):
        uneven.mesh(names=("hosts", "ranks"))


def test_a_shared_directory_is_of_a_test_and_of_all_hosts(world: RankWorld) -> None:
    between = copy.copy(world)
    between.enter_test("")
    with pytest.raises(RuntimeError, match="exists only while a test runs"):
        _ = between.shared_tmp_path
    between.hosts = ("a", "b")
    with pytest.raises(RuntimeError, match=r"the ranks are on 2 hosts.*name one with --shared-dir DIR"):
        _ = between.shared_tmp_path


@pytest.mark.filterwarnings("ignore:the test left behind no default process group")
def test_a_destroyed_default_group_is_named(world: RankWorld) -> None:
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="the test has destroyed the default process group"):
        _ = world.group


@pytest.mark.ranks(2, group=False)
def test_a_world_without_a_group_says_how_to_make_one(world: RankWorld) -> None:
    with pytest.raises(
        RuntimeError, match=r"\(group=False\): call torch.distributed.init_process_group\(\) first"
    ):
        _ = world.group


def test_a_world_reads_the_same_on_all_ranks(world: RankWorld) -> None:
    assert repr(world) == f"<world of 2, {world.backend}, cpu>"
    assert (world.local_rank, world.local_size, world.old_ranks) == (world.rank, 2, (0, 1))
    assert world.hosts == (socket.gethostname(),) == (world.host,)
    assert world.gather(world.rank) == [0, 1]
    assert world.seed == torch.initial_seed()
    assert world.group is dist.group.WORLD
    assert world.mesh().shape == (2,)
    assert world.mesh(1, 2).shape == (1, 2)


def test_a_rank_picks_its_own_value(world: RankWorld) -> None:
    assert world.pick(["first", "second", "third"]) == ("first", "second")[world.rank]
    assert world.pick([5, 6]) == 5 + world.rank
    with pytest.raises(ValueError, match=r"\Aworld.pick: 1 values for 2 ranks; draw at least world.size of"):
        world.pick(["first"])


def test_a_shared_directory_is_made_and_the_same(world: RankWorld) -> None:
    path = world.shared_tmp_path
    assert path.is_dir()
    world.assert_same(path)
    assert world.shared_tmp_path == path


def test_a_world_that_others_have_left_refuses(world: RankWorld) -> None:
    left = copy.copy(world)
    left._regroup = lambda: (0, 1)
    new = left.rebuild()
    assert (new.size, new.rank, new.old_ranks) == (2, world.rank, (0, 1))
    assert left.gather(world.rank) == [0, 1]
    left._regroup = lambda: (world.rank,)
    alone = left.rebuild()
    assert (alone.size, alone.rank, alone.old_ranks) == (1, 0, (world.rank,))
    assert (alone.local_size, alone.local_rank) == (1, 0)
    assert (left.size, left.rank) == (2, world.rank)
    refused = r"\A2 ranks were in this world, and the others have left it: use the world that rebuild\(\)"
    for call in (left.mesh, lambda: left.gather(1), lambda: left.assert_same(1)):
        with pytest.raises(RuntimeError, match=refused):
            call()
    alone._refuse_if_left()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "fake"}, r"\Aworld.rebuild: a fake world is one process, and loses no rank\Z"),
        (
            {"_starts_with_group": False},
            r"\Aworld.rebuild: this world starts without a default process group",
        ),
        ({"hosts": ("a", "b")}, r"\Aworld.rebuild: the ranks are on 2 hosts; only a world on one can be "),
    ],
    ids=["fake", "no-group", "hosts"],
)
def test_a_world_that_cannot_be_rebuilt_says_why(
    world: RankWorld, changes: dict[str, object], message: str
) -> None:
    other = copy.copy(world)
    vars(other).update(changes)
    with pytest.raises(RuntimeError, match=message):
        other.rebuild()


def test_ranks_of_several_hosts_are_an_axis_of_a_mesh(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        f"{type(world).__module__}.init_device_mesh",
        lambda kind, shape, mesh_dim_names: made.append((kind, shape, mesh_dim_names)),
    )
    spread = copy.copy(world)
    spread.size, spread.hosts, spread.local_size = 6, ("a", "b"), 3
    spread.mesh(names=("hosts", "ranks"))
    spread.mesh(names=("hosts",))
    spread.mesh(3, 2, names=("hosts", "ranks"))
    spread.mesh(6, names=("all",))
    assert made == [
        ("cpu", (2, 3), ("hosts", "ranks")),
        ("cpu", (6,), ("hosts",)),
        ("cpu", (3, 2), ("hosts", "ranks")),
        ("cpu", (6,), ("all",)),
    ]
    spread.size = 7
    with pytest.raises(ValueError, match="7 ranks are not spread evenly over 2 hosts"):
        spread.mesh(names=("hosts", "ranks"))


def test_what_differs_is_listed_by_rank(world: RankWorld) -> None:
    with pytest.raises(AssertionError) as failure:
        world.assert_same([world.rank, (True,)])
    assert str(failure.value) == (
        "ranks hold different values: 1 against 0\n  rank 0: [0, (True,)]\n  rank 1: [1, (True,)]"
    )
