"""Scale and weights through any sequence of clean and overflowing steps, against their rules."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.conformance import ShardSpec
from lockstep.conformance.models import KnownGradient
from lockstep.conformance.models.trees import Tree

INF, NAN = float("inf"), float("nan")

# A step: None is clean, else what a rank finds in an element of its gradient; taken modulo what there are.
STEPS = st.lists(
    st.none() | st.tuples(st.sampled_from([INF, -INF, NAN]), st.integers(0, 3), st.integers(0, 4)), min_size=1
)
SCALING = st.fixed_dictionaries(
    {},
    optional={
        "init_scale": st.sampled_from([2.0**-100, 1.0, 2.0**100, 2.0**127]),
        "growth_interval": st.integers(1, 4),
        "growth_factor": st.sampled_from([4.0, 2.0**40]),
        "backoff_factor": st.sampled_from([0.25, 2.0**-40]),
    },
)
OPTIONS = {
    "strategy": st.sampled_from(["SHARD_GRAD_OP", "NO_SHARD"]),
    "offload": st.just(True),
    "use_orig_params": st.just(True),
}


class Rule:
    """The rule of a scale: it grows after clean steps in a row, backs off after others, and stays finite."""

    def __init__(self, init_scale=2.0, growth_interval=2, growth_factor=2.0, backoff_factor=0.5):
        self.scale, self.interval = init_scale, growth_interval
        self.growth, self.backoff = growth_factor, backoff_factor
        self.clean = 0

    def step(self, is_clean):
        self.clean = self.clean + 1 if is_clean else 0
        if not is_clean:
            self.scale = max(self.scale * self.backoff, torch.finfo(torch.float32).tiny)
        elif self.clean == self.interval:
            self.clean = 0
            if self.scale * self.growth <= torch.finfo(torch.float32).max:
                self.scale *= self.growth


@pytest.mark.ranks(2, 3)
@given(
    steps=STEPS,
    numel=st.integers(1, 5),
    scaling=SCALING,
    options=st.fixed_dictionaries({}, optional=OPTIONS),
)
def test_all_ranks_step_or_none_and_agree_on_the_scale(
    world, engine, offered, steps, numel, scaling, options
):
    _, options = offered(Tree(1, ()), options)
    # One weight: what is wrong with an element, one rank alone can see, or with NO_SHARD all.
    model = engine.shard(KnownGradient(numel).to(world.device), ShardSpec(device=world.device, **options))
    scaling = {"init_scale": 2.0, "growth_interval": 2} | scaling
    scaler, rule = engine.grad_scaler(model, **scaling), Rule(**scaling)
    optimizer = engine.optimizer(model, partial(torch.optim.SGD, lr=1.0))
    taken = 0
    # Its mean is 2^-8, exact at any scale.
    rank, size = world.rank, world.size
    spread = 1.0 if rank == size - 1 and rank % 2 == 0 else 0.5 + rank % 2
    for step in steps:
        gradient = torch.full((numel,), 2.0**-8 * spread)
        if step is not None and step[1] % size == rank:
            gradient[step[2] % numel] = step[0]
        optimizer.zero_grad()
        engine.backward(model, scaler.scale(model(gradient.to(world.device))))
        scaler.step(optimizer)
        scaler.update()
        rule.step(is_clean=step is None)
        taken += step is None
        assert scaler.get_scale() == rule.scale
        assert engine.full_parameters(model)["weight"].tolist() == [-taken * 2.0**-8] * numel
