"""What was saved by some ranks goes on with the same bits on more or fewer ranks that wrap other units."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.adapters import ShardSpec
from harness.assertions import assert_named_close
from harness.assertions.closeness import EXACT
from harness.zoo.strategies import rewraps, trees

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


class Model:
    """A model on the first of the ranks; all of them train on the same batches."""

    def __init__(self, world, engine, tree, spec, seed):
        self.engine, self.tree, self.device = engine, tree, world.device
        ranks = spec.pop("ranks")
        self.group = dist.new_group(range(ranks))
        self.is_here = world.rank < ranks
        if self.is_here:
            bare = tree.build(seed).to(world.device)
            spec["use_orig_params"] = spec.get("use_orig_params", False) or tree.has_mixed_groups()
            self.sharded = engine.shard(bare, ShardSpec(units=tree.units, process_group=self.group, **spec))

    def step(self, number):
        if self.is_here:
            x = self.tree.batch(torch.Generator().manual_seed(number)).to(self.device)
            self.tree.loss(self.sharded(x, number)).backward()
            torch.optim.SGD(self.sharded.parameters(), lr=0.1).step()
            self.sharded.zero_grad()

    def state(self):
        """Return the full state, on every rank of the world."""
        state = self.engine.full_state(self.sharded) if self.is_here else None
        return {name: tensor.cpu() for name, tensor in state.items()} if state is not None else None

    def load(self, state):
        if self.is_here:
            own = self.sharded.state_dict()
            self.sharded.load_state_dict({name: as_in(own[name], tensor) for name, tensor in state.items()})


def as_in(own, tensor):
    tensor = tensor.to(own.device)
    return distribute_tensor(tensor, own.device_mesh, own.placements) if isinstance(own, DTensor) else tensor


@pytest.mark.ranks(3)
@given(trees=wrapped_twice(), saving=SPECS, loading=SPECS)
def test_the_step_after_a_load_elsewhere_has_the_same_bits(world, engine, trees, saving, loading):
    exact = max(saving["ranks"], loading["ranks"]) < 3
    first = Model(world, engine, trees[0], dict(saving), seed=0)
    second = Model(world, engine, trees[1], dict(loading), seed=1)
    first.step(0)
    saved = world.gather(first.state())[0]
    second.step(0)
    second.load(saved)
    assert_named_close(world.gather(second.state())[0], saved, EXACT)
    for model in (first, second):
        model.step(1)
    states = [world.gather(model.state())[0] for model in (first, second)]
    # The mean of one or two equal gradients is exact; a third of a sum of three is not.
    assert_named_close(states[1], states[0], EXACT if exact else torch.float32)
    for model in (first, second):
        if model.is_here:
            dist.destroy_process_group(model.group)
