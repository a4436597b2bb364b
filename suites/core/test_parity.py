"""Parity with DDP: a sharded model learns what the same model learns there, whatever the settings.

After PyTorch's test/distributed/fsdp/test_fsdp_core.py, class TestParityWithDDP.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep import CollectivesLog
from lockstep.assertions import (
    Run,
    Trainee,
    Training,
    assert_parity,
    named_gradients,
    named_parameters,
    train,
)
from lockstep.conformance import Capability, Precision, ShardSpec, offers, trainee
from lockstep.conformance.models import (
    AlwaysWrapNestedWrappedModule,
    DummyDDP,
    InHalf,
    MixtureOfExperts,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    TransformerWithSharedParams,
    copier,
)

HALF = torch.float16


def late_on_rank_0(world) -> float:
    """Return milliseconds: more than the other ranks need to come to their next collective."""
    return 2.0 if world.rank == 0 else 0.0


def nested_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return NestedWrappedModule.loss(model(batch))


def transformer_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return TransformerWithSharedParams.loss(model(*batch), batch[1])


def ddp(bare: nn.Module) -> Trainee:
    return Trainee(DistributedDataParallel(bare), full_gradients=named_gradients)


def ddp_in_half(bare: nn.Module) -> Trainee:
    """Return the model under DDP with fp16 in forward, in backward and on the wire, and fp32 parameters."""
    model = DistributedDataParallel(InHalf(bare))
    model.register_comm_hook(None, fp16_compress_hook)
    return Trainee(model, lambda _: named_parameters(bare), lambda _: named_gradients(bare))


def dummy_ddp(bare: MixtureOfExperts) -> Trainee:
    return Trainee(
        DummyDDP(bare),
        lambda _: named_parameters(bare),
        lambda _: named_gradients(bare),
        backward=lambda _, loss: bare.backward(loss),
    )


@dataclass(frozen=True)
class Claim:
    """The claim that what `bare` returns learns, sharded, what its reference `learned` in `training`.

    `backward`: of the sharded model, if not the engine's; `alone`: units of each rank's own.
    """

    bare: Callable[[], nn.Module]
    learned: Run
    training: Training
    backward: Callable[[nn.Module, Tensor], object] | None = None
    precision: Precision | None = None
    alone: tuple[str, ...] = ()


def check_parity(world, engine, claim, device_init_mode, **settings):
    bare, training = claim.bare(), claim.training
    with own_groups(claim.alone) as unit_groups:
        spec = ShardSpec(units=bare.units, precision=claim.precision, unit_groups=unit_groups, **settings)
        sharded = shard(engine, bare, spec, device_init_mode, world.device)
        if spec.offload and device_init_mode == "after" and world.device.type != "cpu":
            with pytest.raises(RuntimeError, match="do not move the module"):
                training.loss(sharded, training.batches(0))
            return
        backward = engine.backward if claim.backward is None else claim.backward
        candidate = trainee(engine, sharded, backward=backward)
        assert_parity(claim.learned, candidate, training)
        wanted = "cpu" if spec.offload else world.device.type
        assert {parameter.device.type for parameter in sharded.parameters()} == {wanted}


def shard(engine, bare, spec, device_init_mode, device):
    if device_init_mode == "before":
        return engine.shard(bare.to(device), spec)
    sharded = engine.shard(bare, spec)
    return sharded.to(device) if device_init_mode == "after" else sharded


@contextmanager
def own_groups(units: tuple[str, ...]) -> Iterator[Mapping[str, dist.ProcessGroup]]:
    """Give each of the units a process group of this rank alone."""
    if not units:
        yield {}
        return
    own, all_of_them = dist.new_subgroups(1)
    try:
        yield dict.fromkeys(units, own)
    finally:
        for group in all_of_them:
            dist.destroy_process_group(group)


def large_steps(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer after whose steps stale weights cannot be taken for new ones."""
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def assert_each_case(run_subtests, world, engine, batches, strategy, offload):
    """Hold a model to its reference in every case of the item; the reference is trained once.

    `training`: what differs from two steps with the loss of the nested models.
    """
    settings = {
        "device_init_mode": ["before", "after", "never"] if offload else ["before", "after"],
        "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
        "forward_prefetch": [False, True],
        "use_orig_params": [False, True],
    }
    if world.size > 2:  # where a model is moved, and when it is gathered, does not depend on how many ranks
        settings |= {"device_init_mode": ["before"], "backward_prefetch": ["BACKWARD_PRE"]}

    def run(model, reference=ddp, training=(), **claim):
        how = Training(batches(model.batch), **{"loss": nested_loss, "steps": 2, **dict(training)})
        copied = copier(model)
        learned = train(reference(copied().to(world.device)), how)
        whole = Claim(copied, learned, how, **claim)
        run_subtests(settings, check_parity, world, engine, whole, strategy=strategy, offload=offload)

    return run


# Three of the eight run on 3 and 4 ranks too, where shards are padded or empty and divisions are not exact:
# those whose models differ in how parameters lie in shards, are tied, and belong to process groups.
ON_MORE_RANKS = pytest.mark.ranks(2, 3, 4)


@pytest.mark.ranks(2)
class TestParityWithDDP:
    @ON_MORE_RANKS
    def test_nested_wrapped_model(self, assert_each_case):
        assert_each_case(NestedWrappedModule(), training={"steps": 3})

    def test_nested_wrapped_model_single_iteration_mixed_precision(self, engine, assert_each_case):
        def backward(sharded, loss):
            with CollectivesLog() as log:  # else every operation of the training would pass through it
                engine.backward(sharded, loss)
            assert {dtype for entry in log for dtype in entry.dtypes} == {HALF}

        one_step = {"steps": 1, "tolerance": HALF}
        half = Precision(HALF, HALF, HALF)
        assert_each_case(NestedWrappedModule(), ddp_in_half, one_step, precision=half, backward=backward)

    def test_nested_always_wrap_model(self, assert_each_case):
        assert_each_case(AlwaysWrapNestedWrappedModule())

    @ON_MORE_RANKS
    def test_transformer(self, assert_each_case):
        assert_each_case(TransformerWithSharedParams(), training={"loss": transformer_loss})

    def test_delayed_optim_step(self, world, engine, assert_each_case):
        model = NestedWrappedModuleWithDelay(delay_after_loss_ms=late_on_rank_0(world))

        def late_backward(sharded, loss):
            engine.backward(sharded, loss)
            model.after_backward(loss)
            # A gather for the next forward would have begun.
            if not offers(engine, Capability.GROUPS):
                return
            assert {(g.state.name, g.gathered_bytes) for g in engine.groups(sharded)} == {("SHARDED", 0)}

        assert_each_case(model, training={"optimizer": large_steps}, backward=late_backward)

    def test_delayed_reduce_scatter(self, world, assert_each_case):
        assert_each_case(NestedWrappedModuleWithDelay(delay_before_reduction_ms=late_on_rank_0(world)))

    @ON_MORE_RANKS
    def test_mixture_of_experts(self, world, assert_each_case):
        assert_each_case(MixtureOfExperts(world.rank), dummy_ddp, alone=(MixtureOfExperts.expert,))

    def test_mixture_of_experts_with_delay_before_free(self, world, assert_each_case):
        model = MixtureOfExperts(world.rank, delay_before_free_ms=late_on_rank_0(world))
        assert_each_case(model, dummy_ddp, alone=(MixtureOfExperts.expert,))
