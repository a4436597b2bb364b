"""The fixture `world`: equality of what ranks hold, bit by bit; meshes, and what it refuses."""

from __future__ import annotations

import copy
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
