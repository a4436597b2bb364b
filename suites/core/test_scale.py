"""Shards and traffic of worlds with up to 1,024 ranks, seen from one rank of a fake world."""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.assertions import local_part
from lockstep.conformance import Capability, Precision, offers, require

MESHES = {8: (2, 4), 64: (8, 8), 1024: (32, 32)}
"""By the number of ranks, how many replicas there are, and how many shards each has."""

pytestmark = [pytest.mark.ranks(*MESHES, backend="fake"), pytest.mark.inside]

F32, BF16 = torch.float32, torch.bfloat16
OF_ALL = pytest.mark.parametrize(
    "front",
    ["FULL_SHARD-orig", "SHARD_GRAD_OP-orig", "NO_SHARD-orig", "fully_shard", "replicate"],
    indirect=True,
)


class Blocks(nn.Module):
    """Three units, and layers of the root around them; none has a size that fills many shards."""

    units = ("blocks.0", "blocks.1", "blocks.2")

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 30)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 30)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(30)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


GROUPS = ("", *Blocks.units)
BACKWARD = tuple(reversed(Blocks.units))
# Which groups are gathered in forward and in backward; the root's is kept by all fronts but the wrapper's.
GATHERED = {
    "FULL_SHARD": (GROUPS, ("", *BACKWARD)),
    "SHARD_GRAD_OP": (GROUPS, ()),
    "NO_SHARD": ((), ()),
    "HYBRID_SHARD": (GROUPS, ("", *BACKWARD)),
    "_HYBRID_SHARD_ZERO2": (GROUPS, ()),
    "fully_shard": (GROUPS, BACKWARD),
    "replicate": ((), ()),
}
REDUCED = (*BACKWARD, "")


@dataclass(frozen=True)
class Shards:
    """The formula of a front: how many elements of each parameter, and of each group, a rank holds.

    The wrapper lays the parameters of a group end to end and cuts that; `fully_shard` cuts each along dim 0.
    """

    front: object
    num: int

    def __post_init__(self):
        if not self.front.is_composable:  # how others cut and align a group is their own affair
            require(self.front, Capability.ONE_PADDING)

    @staticmethod
    @cache
    def shapes(group):
        """Return the shapes of the parameters of a group, by name."""
        named = dict(Blocks().named_parameters())
        inside = tuple(f"{unit}." for unit in Blocks.units)
        own = {n for n in named if (n.startswith(f"{group}.") if group else not n.startswith(inside))}
        return {name: parameter.shape for name, parameter in named.items() if name in own}

    def numel(self, group):
        """Return the elements of one shard of a group, with its padding."""
        shapes = self.shapes(group).values()
        if self.front.is_composable:
            return sum(-(-shape[0] // self.num) * shape[1:].numel() for shape in shapes)
        return -(-sum(shape.numel() for shape in shapes) // self.num)

    def pieces(self, group, shard):
        """Return from where to where each flattened parameter of a group lies in a shard, by name."""
        found, offset, size = {}, 0, self.numel(group)
        for name, shape in self.shapes(group).items():
            if self.front.is_composable:
                rows, row = -(-shape[0] // self.num), shape[1:].numel()
                bounds = [min(index * rows, shape[0]) * row for index in (shard, shard + 1)]
            else:
                ends = (index * size - offset for index in (shard, shard + 1))
                bounds = [min(max(end, 0), shape.numel()) for end in ends]
                offset += shape.numel()
            found[name] = tuple(bounds)
        return found


def kind(front):
    return front.settings.get("strategy", front.name)


def shards_of(world, front, num=None):
    is_whole = kind(front) in ("NO_SHARD", "replicate")
    return Shards(front, 1 if is_whole else num or world.size)


def step(world, front, model):
    front.backward(model, model(torch.randn(4, 8, device=world.device)).float().sum())


# Shards


def check_shards(world, model, shards):
    """Hold what this rank has of each parameter to the formula: its size, and the values that it alone has.

    What replicas share some engines take from the first of them, and in a fake world there is none.
    """
    pieces = {}
    for group in GROUPS:
        pieces |= shards.pieces(group, world.rank % shards.num)
    torch.manual_seed(world.seed)
    for (name, whole), held in zip(Blocks().named_parameters(), model.parameters(), strict=True):
        found, expected = local_part(held).detach().flatten(), whole.flatten()[slice(*pieces[name])]
        assert found.numel() == expected.numel(), name
        assert shards.num < world.size or torch.equal(found, expected), name


@OF_ALL
def test_a_rank_holds_its_part_of_each_parameter(world, front):
    model = front.shard(Blocks())
    check_shards(world, model, shards_of(world, front))


@pytest.mark.ranks(*MESHES, backend="fake", as_rank=0)
@OF_ALL
def test_the_parts_of_all_ranks_tile_each_parameter(world, front):
    """Of the formula, to which the test above holds the engine."""
    shards = shards_of(world, front)
    for group in GROUPS:
        parts = [shards.pieces(group, shard) for shard in range(shards.num)]
        for name, shape in shards.shapes(group).items():
            bounds = [part[name] for part in parts if part[name][0] < part[name][1]]
            assert (bounds[0][0], bounds[-1][1]) == (0, shape.numel())
            assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


@OF_ALL
def test_a_shard_has_the_bytes_of_its_elements_and_padding(world, front):
    groups = {group.name: group for group in front.engine.groups(front.shard(Blocks()))}
    shards = shards_of(world, front)
    assert {name: group.local_bytes for name, group in groups.items()} == {
        name: shards.numel(name) * F32.itemsize for name in GROUPS
    }
    assert {name: group.full_numel for name, group in groups.items()} == {
        name: shards.numel(name) * shards.num for name in GROUPS
    }


# Traffic of one step


@pytest.mark.parametrize("precision", [Precision(), Precision(BF16, F32)], ids=["fp32", "bf16"])
@OF_ALL
def test_a_step_sends_what_the_formula_says(world, front, collectives, precision):
    model = front.shard(Blocks(), precision=precision)
    shards, dtype = shards_of(world, front), precision.param_dtype or F32
    step(world, front, model)
    traffic = front.engine.traffic(collectives)
    found = [
        [(e.dtype, e.nbytes, e.group_size) for e in traffic.gathers if e.in_backward == where]
        for where in (False, True)
    ]
    assert found == [
        [(dtype, shards.numel(name) * dtype.itemsize, world.size) for name in names]
        for names in GATHERED[kind(front)]
    ], collectives
    sent = [(e.dtype, e.nbytes, e.group_size) for e in traffic.reductions]
    expected = [(F32, shards.numel(name) * shards.num * F32.itemsize, world.size) for name in REDUCED]
    if not offers(front, Capability.EARLY_REDUCTION):
        sent, expected = sorted(sent, key=str), sorted(expected, key=str)
    assert sent == expected, collectives
    assert traffic.others == (), collectives


def test_a_replica_gathers_inside_and_reduces_inside_and_across(world, hybrid_front, collectives):
    replicas, num_shards = shape = MESHES[world.size]
    mesh = world.mesh(*shape, names=("replicate", "shard"))
    settings = {} if hybrid_front.is_composable else {"use_orig_params": True}
    model = hybrid_front.shard(Blocks(), mesh=mesh, **settings)
    assert mesh.get_coordinate() == (world.rank // num_shards, world.rank % num_shards)
    shards = Shards(hybrid_front, num_shards)
    check_shards(world, model, shards)
    step(world, hybrid_front, model)
    traffic = hybrid_front.engine.traffic(collectives)
    nbytes = {name: shards.numel(name) * F32.itemsize for name in GROUPS}
    found = [
        [(e.nbytes, e.group_size) for e in traffic.gathers if e.in_backward == where]
        for where in (False, True)
    ]
    assert found == [
        [(nbytes[name], num_shards) for name in names] for names in GATHERED[kind(hybrid_front)]
    ], collectives
    sent = [(e.nbytes, e.group_size) for e in traffic.reductions]
    expected = [
        each
        for name in REDUCED
        for each in ((nbytes[name] * num_shards, num_shards), (nbytes[name], replicas))
    ]
    if not offers(hybrid_front, Capability.EARLY_REDUCTION):
        sent, expected = sorted(sent), sorted(expected)
    assert sent == expected, collectives
    assert traffic.others == (), collectives


# Construction


class Counted(TorchDispatchMode):
    """Counts the operations of torch, collectives among them."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(64, 1024, backend="fake", as_rank=63)
@OF_ALL
def test_making_units_takes_no_operations_for_each_rank(world, front):
    """The seconds of a hundred units are in benchmarks/scale.py."""
    two = world.mesh(world.size // 2, 2, names=("others", "two"))["two"]
    counted = []
    for mesh in (two, world.mesh(world.size)):
        over = {"mesh": mesh} if front.is_composable else {"process_group": mesh.get_group()}
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
        with Counted() as count:
            front.shard(layers, units=(nn.Linear,), **over)
        counted.append(count.num)
    # Here and there one is needed for padding; one for each rank would be ten times as many and more.
    assert 20 < counted[1] < 2 * counted[0]
