"""Saved state, resumed with the same bits on more or fewer ranks that wrap other units."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, ShardSpec, require
from lockstep.conformance.models.strategies import rewraps, trees

SPECS = st.fixed_dictionaries(
    {"ranks": st.integers(1, 3)},
    optional={
        "strategy": st.sampled_from(["SHARD_GRAD_OP", "NO_SHARD"]),
        "use_orig_params": st.just(True),
    },
)


@st.composite
def wrapped_twice(draw):
    """Draw the same tree with two choices of units."""
    tree = draw(trees())
    return tree, draw(rewraps(tree))


@contextmanager
def first_ranks(world, *sizes):
    """For each of the sizes, a process group of so many ranks, where this one is among them."""
    made = [dist.new_group(range(size)) for size in sizes]
    here = [group if world.rank < size else None for group, size in zip(made, sizes, strict=True)]
    try:
        yield here
    finally:
        for group in filter(None, here):
            dist.destroy_process_group(group)


class Model:
    """A model on the ranks of a group, which train on the same batches; elsewhere it does nothing."""

    def __init__(self, world, engine, tree, group, seed, options):
        self.engine, self.tree, self.device, self.is_here = engine, tree, world.device, group is not None
        if self.is_here:
            options = {name: value for name, value in options.items() if name != "ranks"}
            if tree.has_mixed_groups():
                options["use_orig_params"] = True
            spec = ShardSpec(units=tree.units, process_group=group, **options)
            self.sharded = engine.shard(tree.build(seed).to(world.device), spec)

    def step(self, number):
        if self.is_here:
            x = self.tree.batch(torch.Generator().manual_seed(number)).to(self.device)
            self.engine.backward(self.sharded, self.tree.loss(self.sharded(x, number)))
            self.engine.optimizer(self.sharded, partial(torch.optim.SGD, lr=0.1)).step()
            self.sharded.zero_grad()

    def state(self):
        """Return the full state, on every rank of the world."""
        state = self.engine.full_state(self.sharded) if self.is_here else None
        return {name: tensor.cpu() for name, tensor in state.items()} if state is not None else None

    def load(self, state):
        if self.is_here:
            self.sharded.load_state_dict(state)


@pytest.mark.ranks(3)
@given(trees=wrapped_twice(), saving=SPECS, loading=SPECS)
def test_the_step_after_a_load_elsewhere_has_the_same_bits(world, engine, offered, trees, saving, loading):
    # DTensor's caches know meshes by their ranks: they would bring back those of an example before.
    require(engine, Capability.PLAIN_PARAMETERS)
    sizes = saving["ranks"], loading["ranks"]
    (tree, saving), (rewrapped, loading) = offered(trees[0], saving), offered(trees[1], loading)
    with first_ranks(world, *sizes) as groups:
        first = Model(world, engine, tree, groups[0], 0, saving)
        second = Model(world, engine, rewrapped, groups[1], 1, loading)
        first.step(0)
        saved = world.gather(first.state())[0]
        second.step(0)
        second.load(saved)
        assert_named_close(world.gather(second.state())[0], saved, EXACT)
        for model in (first, second):
            model.step(1)
        states = [world.gather(model.state())[0] for model in (first, second)]
    # The mean of one or two equal gradients is exact; a third of a sum of three is not.
    assert_named_close(states[1], states[0], EXACT if max(sizes) < 3 else torch.float32)
