"""Traffic of any tree of modules: which groups, how often, in which dtype and how many bytes."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.conformance import Capability, Precision, ShardSpec, offers, require
from lockstep.conformance.models.strategies import trees
from lockstep.recorders import CollectivesLog

pytestmark = pytest.mark.inside

BF16, F32 = torch.bfloat16, torch.float32

# precision -> dtype of gathers, dtype of reductions
DTYPES = {
    "fp32": (Precision(), F32, F32),
    "bf16": (Precision(BF16), BF16, BF16),
    "bf16_reduced_in_fp32": (Precision(BF16, F32), BF16, F32),
    "reduced_in_bf16": (Precision(reduce_dtype=BF16), F32, BF16),
}
STRATEGIES = st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
# For each microbatch of a step whether it keeps its gradients to itself.
NO_SYNC = st.lists(st.booleans(), max_size=2).map(lambda before: (*before, False))
PRECISIONS = st.sampled_from(list(DTYPES))


class Course:
    """The events of the groups of a tree in a run of the bare model.

    `calls`: the groups in the order in which their units are called, each with whether what it returns
    takes part in backward. `learning`: those that are not frozen.
    """

    def __init__(self, tree):
        bare, self.calls = tree.build(), []
        parameters = {group: [bare.get_parameter(n) for n in names] for group, names in tree.groups().items()}
        self.numel = {group: sum(p.numel() for p in of_group) for group, of_group in parameters.items()}
        for name in self.numel:
            module, call = bare.get_submodule(name), [name, False]
            module.register_forward_pre_hook(lambda *_, call=call: self.calls.append(list(call)))
            module.register_forward_hook(lambda _, args, output, name=name: self.returned(name, output))
        bare(tree.batch(torch.Generator().manual_seed(0)))
        self.learning = {group for group, found in parameters.items() if any(p.requires_grad for p in found)}

    def returned(self, name, output):
        call = next(call for call in reversed(self.calls) if call[0] == name)
        call[1] = output.requires_grad

    def read_twice(self):
        """Return frozen groups that backward comes to more than once: they are given up in between."""
        names = [name for name, graded in self.calls if graded]
        return {name for name in names if names.count(name) > 1 and name not in self.learning}

    def gathers(self, strategy):
        """Return the groups gathered in forward, in order, and those in backward, each once."""
        if strategy == "NO_SHARD":
            return [], set()
        kept, forward = set(), []
        for name, _ in self.calls:
            if name not in kept:
                forward.append(name)
            if strategy == "SHARD_GRAD_OP":  # to the end of the root's forward, frozen ones too
                kept.add(name)
        backward = {name for name, graded in self.calls if graded} - kept
        return [name for name in forward if self.numel[name]], {n for n in backward if self.numel[n]}


def run(world, engine, tree, strategy, precision, no_sync):
    """Return the traffic of a step, and how many elements of each group do."""
    spec = ShardSpec(strategy, units=tree.units, precision=DTYPES[precision][0], use_orig_params=True)
    model = engine.shard(tree.build().to(world.device), spec)
    with CollectivesLog() as log:
        for number, unsynced in enumerate(no_sync):
            x = tree.batch(torch.Generator().manual_seed(number)).to(world.device)
            with engine.no_sync(model) if unsynced else nullcontext():
                engine.backward(model, tree.loss(model(x, number)))
    return log, {group.name: group.full_numel for group in engine.groups(model)}


def padded(world, numel):
    return -(-numel // world.size) * world.size


@pytest.mark.ranks(1, 2, 3)
@given(tree=trees(idle=False, recomputed=False), strategy=STRATEGIES, precision=PRECISIONS, no_sync=NO_SYNC)
def test_units_are_gathered_per_call_and_once_per_backward(
    world, engine, offered, tree, strategy, precision, no_sync
):
    require(engine, Capability.TRAFFIC, Capability.GROUPS, Capability.SHARDING, Capability.MIXED_PRECISION)
    tree, _ = offered(tree, {})
    log, numel = run(world, engine, tree, strategy, precision, no_sync)
    course, dtype = Course(tree), DTYPES[precision][1]
    if offers(engine, Capability.ONE_PADDING) and strategy != "NO_SHARD":
        assert {name: numel[name] for name in course.numel} == {
            name: padded(world, of_group) for name, of_group in course.numel.items()
        }
    forward, backward = course.gathers(strategy) if world.size > 1 else ([], set())
    size = {name: (dtype, padded(world, numel[name]) // world.size * dtype.itemsize) for name in numel}
    gathers = engine.traffic(log).gathers
    found = [(entry.dtype, entry.nbytes) for entry in gathers if not entry.in_backward]
    assert found == [size[name] for name in forward] * len(no_sync), log
    found = [(entry.dtype, entry.nbytes) for entry in gathers if entry.in_backward]
    again = course.read_twice() if strategy != "NO_SHARD" else set()
    if again and world.size > 1:
        assert {size[name] for name in backward} <= set(found) <= {size[n] for n in backward | again}, log
    else:
        assert sorted(found, key=str) == sorted([size[name] for name in backward] * len(no_sync), key=str), (
            log
        )


@pytest.mark.ranks(1, 2, 3)
@given(
    tree=trees(),
    strategy=STRATEGIES,
    precision=PRECISIONS,
    no_sync=NO_SYNC,
)
def test_each_synced_backward_reduces_groups_with_gradients_once(
    world, engine, offered, tree, strategy, precision, no_sync
):
    require(engine, Capability.TRAFFIC, Capability.GROUPS, Capability.SHARDING, Capability.MIXED_PRECISION)
    tree, _ = offered(tree, {})
    log, numel = run(world, engine, tree, strategy, precision, no_sync)
    if not offers(engine, Capability.ONE_PADDING):  # each parameter travels by itself, and no frozen one
        frozen = num_frozen(tree, lambda rows: rows if strategy == "NO_SHARD" else padded(world, rows))
        numel = {name: numel[name] - frozen.get(name, 0) for name in numel}
    dtype, expected = DTYPES[precision][2], []
    since = 0
    for index, unsynced in enumerate(no_sync):
        if not unsynced:
            learning = learning_in(tree, since, index + 1)
            expected += [name for name in learning if numel[name]]
            since = index + 1
    reductions = engine.traffic(log).reductions
    whole = strategy == "NO_SHARD" and "all_reduce" in {entry.op for entry in reductions}
    sizes = [numel[name] if whole else padded(world, numel[name]) for name in expected]
    assert sorted((entry.dtype, entry.nbytes) for entry in reductions) == sorted(
        (dtype, size * dtype.itemsize) for size in (sizes if world.size > 1 else [])
    ), log
    assert all(entry.in_backward for entry in reductions)
    assert engine.traffic(log).others == (), log


def num_frozen(tree, pad):
    """Return the elements of frozen parameters of each group, each with as many rows as `pad` gives."""
    bare = tree.build()
    groups = {group: map(bare.get_parameter, names) for group, names in tree.groups().items()}
    return {
        group: sum(pad(len(p)) * p.shape[1:].numel() for p in of_group if not p.requires_grad)
        for group, of_group in groups.items()
    }


def learning_in(tree, start, stop):
    """Return the groups that get a gradient from the batches of these numbers."""
    bare = tree.build()
    for number in range(start, stop):
        tree.loss(bare(tree.batch(torch.Generator().manual_seed(number)), number)).backward()
    return [
        group
        for group, names in tree.groups().items()
        if any(bare.get_parameter(name).grad is not None for name in names)
    ]
