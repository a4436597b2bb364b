"""Parity of any tree of modules, however it is sharded, with the same one unsharded on all ranks' batches."""

import copy
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.assertions import TOLERANCES, Tolerance, assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, Precision, ShardSpec, offers, require
from lockstep.conformance.models.strategies import trees

BF16, F32 = torch.bfloat16, torch.float32

PRECISIONS = {
    "bf16": Precision(BF16),
    "bf16_reduced_in_fp32": Precision(BF16, F32),
    "reduced_in_bf16": Precision(reduce_dtype=BF16),
    "bf16_with_buffers": Precision(BF16, buffer_dtype=BF16),
}
OPTIONS = {
    "strategy": st.sampled_from(["SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]),
    "precision": st.sampled_from(list(PRECISIONS)),
    "offload": st.just(True),
    "use_orig_params": st.just(True),
    "backward_prefetch": st.sampled_from([None, "BACKWARD_POST"]),
    "forward_prefetch": st.just(True),
    "sync_module_states": st.just(True),
}


class Reference:
    """The bare model of this rank with the casts of a precision, and gradients averaged in rank order."""

    def __init__(self, bare, precision):
        self.bare, self.precision = bare, precision
        self.wire = precision.reduce_dtype or precision.param_dtype or F32
        self.computed, self.unsynced = None, {}
        self.largest = 1.0

    def forward(self, x, number):
        low = self.precision.param_dtype or F32
        self.computed = copy.deepcopy(self.bare)
        for parameter in self.computed.parameters():
            parameter.data = parameter.data.to(low)
        for buffer in self.computed.buffers():
            buffer.data = buffer.data.to(self.precision.buffer_dtype or F32)
        return self.computed(x.to(low), number)

    def backward(self, of_computed, sync):
        of_computed.backward()
        for name, leaf in self.computed.named_parameters():
            if leaf.grad is not None:
                fresh = leaf.grad.to(self.wire)
                self.unsynced[name] = fresh + self.unsynced.get(name, 0)
        if sync:
            for name, gradient in self.unsynced.items():
                parameter = self.bare.get_parameter(name)
                mean = self.mean(gradient).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
            self.unsynced = {}

    def mean(self, gradient):
        of_ranks = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, gradient)
        self.largest = max([self.largest, *(g.abs().max().item() for g in of_ranks if g.numel())])
        summed = of_ranks[0].float()
        for of_rank in of_ranks[1:]:
            summed = summed + of_rank
        return (summed / len(of_ranks)).to(gradient.dtype)

    def check(self, exact, actual, expected):
        """Compare, up to what sums of the largest gradient so far may be off by."""
        rtol = TOLERANCES[self.wire].rtol
        assert_named_close(actual, expected, EXACT if exact else Tolerance(rtol * self.largest, rtol))

    def gradients(self):
        return {name: p.grad for name, p in self.bare.named_parameters()}


def fitting(world, engine, options):
    """Return `options`, hybrid strategies on four ranks only, and precisions in place of their names."""
    if "HYBRID" in options.get("strategy", "") and (world.size != 4 or not offers(engine, Capability.HYBRID)):
        del options["strategy"]
    if "precision" in options:
        precision = PRECISIONS[options["precision"]]
        if not offers(engine, Capability.BUFFER_DTYPE):
            precision = replace(precision, buffer_dtype=None)
        options["precision"] = precision
    return options


@contextmanager
def process_groups(world, strategy):
    """Two replicas of two ranks each, for hybrid strategies."""
    if "HYBRID" not in strategy:
        yield None
        return
    mesh = world.mesh(2, 2)
    groups = mesh.get_group(1), mesh.get_group(0)
    try:
        yield groups
    finally:
        for group in groups:
            dist.destroy_process_group(group)


def zeros_for_none(gradients, like):
    return {n: torch.zeros_like(like[n]) if g is None else g for n, g in gradients.items()}


@pytest.mark.ranks(1, 2, 3, 4)
@given(
    tree=trees(),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    no_sync=st.lists(st.booleans(), max_size=2).map(lambda before: (*before, False)),
)
def test_losses_gradients_and_parameters_are_the_unsharded_ones(
    world, engine, offered, tree, options, no_sync
):
    """`no_sync`: for each microbatch of a step whether it keeps its gradients to itself."""
    tree, options = offered(tree, options)
    options = fitting(world, engine, options)
    if tree.has_mixed_groups():
        options["use_orig_params"] = True
    with process_groups(world, options.get("strategy", "")) as groups:
        check_parity(
            world, engine, tree, no_sync, ShardSpec(units=tree.units, process_group=groups, **options)
        )


@pytest.mark.ranks(1, 2, 3, 4)
@given(
    tree=trees(reads=True),
    options=st.fixed_dictionaries({}, optional=OPTIONS),
    no_sync=st.lists(st.booleans(), max_size=1).map(lambda before: (*before, False)),
)
def test_weights_that_are_read_elsewhere_train_the_same_or_are_refused(
    world, engine, offered, tree, options, no_sync
):
    """Refused is only what is not there: freed, or not yet gathered or cast."""
    require(engine, Capability.OUTSIDE_READS)
    tree, options = offered(tree, options)
    options = fitting(world, engine, options)
    if tree.has_mixed_groups():
        options["use_orig_params"] = True
    strategy = options.get("strategy", "FULL_SHARD")
    whole = strategy == "NO_SHARD" and options.get("precision", Precision()).param_dtype is None
    kept = strategy in ("NO_SHARD", "SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    with process_groups(world, strategy) as groups:
        spec = ShardSpec(units=tree.units, process_group=groups, **options)
        try:
            check_parity(world, engine, tree, no_sync, spec)
        except RuntimeError as error:
            if "while it is sharded" not in str(error) or tree.reads_kept_weights(whole, kept):
                raise


def check_parity(world, engine, tree, no_sync, spec):
    if not offers(engine, Capability.NO_SYNC):
        no_sync = [False] * len(no_sync)
    reference = Reference(tree.build().to(world.device), spec.precision)
    bare = tree.build(seed=world.rank if spec.sync_module_states else 0)
    model = engine.shard(bare.to(world.device), spec)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizers = [sgd(reference.bare.parameters()), engine.optimizer(model, sgd)]
    low = spec.precision != Precision()
    # The mean of two is exact. A sum of no_sync is rounded to the dtype on the wire now or later.
    exact = world.size <= 2 and not (low and len(no_sync) > 1)
    for step in range(2 if exact or not low else 1):
        for index, unsynced in enumerate(no_sync):
            number = step * len(no_sync) + index
            generator = torch.Generator().manual_seed(100 * number + world.rank)
            x = tree.batch(generator).to(world.device)
            losses = [tree.loss(run(x, number)) for run in (reference.forward, model)]
            reference.backward(losses[0], sync=not unsynced)
            with engine.no_sync(model) if unsynced else nullcontext():
                engine.backward(model, losses[1])
            reference.check(exact, {"loss": losses[1]}, {"loss": losses[0]})
        gradients = engine.full_gradients(model), reference.gradients()
        reference.check(
            exact, *(zeros_for_none(g, dict(reference.bare.named_parameters())) for g in gradients)
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        reference.check(exact, engine.full_parameters(model), dict(reference.bare.named_parameters()))
