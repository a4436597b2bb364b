"""What a model trained in mixed precision shows inside forward, in backward, on the wire and between steps.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the end-to-end check.
"""

import copy
import dataclasses

import pytest
import torch

from harness.adapters import Precision, ShardSpec
from harness.assertions import (
    Trainee,
    Training,
    assert_gradient_dtypes,
    assert_parameter_dtypes,
    assert_parity,
    ddp_with_casts,
    per_rank_batches,
    train,
)
from harness.recorders import CollectivesLog, ForwardDtypes
from harness.zoo import LinearMixedPrecision, NestedLinearMixedPrecision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

CONFIGURATIONS = {
    "fp16": Precision(F16, F16, F16),
    "reduce_only": Precision(reduce_dtype=F16),
    "params_and_buffers": Precision(F16, buffer_dtype=F16),
    "none": Precision(),
    "all_different": Precision(F16, F32, BF16),
}
ALL_DIFFERENT = CONFIGURATIONS["all_different"]
PREFETCH = {
    "forward_prefetch": [False, True],
    "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
}
MODELS = (LinearMixedPrecision, NestedLinearMixedPrecision)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """What `Precision` comes to for parameters of one original dtype, and buffers of fp64."""

    original: torch.dtype
    param: torch.dtype
    wire: torch.dtype
    buffer: torch.dtype

    @classmethod
    def of(cls, precision, original):
        param = precision.param_dtype or original
        return cls(original, param, precision.reduce_dtype or param, precision.buffer_dtype or F64)

    @property
    def lowest(self):
        return F16 if F16 in (self.param, self.wire) else None


class Subject:
    """A sharded model under the check; the modules of ``bare`` become its own.

    ``inside``: dtypes that its modules met; ``moments``: what its groups and layers showed as each layer began.
    """

    def __init__(self, world, engine, bare, spec, dtypes):
        self.world, self.engine, self.spec, self.dtypes = world, engine, spec, dtypes
        self.buffers = {name: buffer.cpu() for name, buffer in bare.named_buffers()}
        self.inside, self.moments, self.wire = ForwardDtypes(bare), [], CollectivesLog()
        self.layers = {n: m for n, m in bare.named_modules() if isinstance(m, LinearMixedPrecision)}
        self.model = engine.shard(bare, spec)
        for name, layer in self.layers.items():
            layer.lin.register_forward_pre_hook(lambda *_, name=name: self.note(name))

    def note(self, name):
        seen = {other: layer.lin.weight.dtype for other, layer in self.layers.items()}
        self.moments.append((name, seen, self.engine.groups(self.model)))

    def forward(self, model, batch):
        self.moments, self.wire = [], CollectivesLog()
        with self.inside, self.wire:
            loss = LinearMixedPrecision.loss(model(batch))
        self.check_inside_forward()
        self.check_between(self.kept)
        return loss

    def backward(self, model, scaled_loss):
        assert scaled_loss.dtype == self.dtypes.param
        with self.wire:
            scaled_loss.backward()
        self.check_wire()
        self.check_between("SHARDED")
        assert_gradient_dtypes(model, self.dtypes.original)

    def after_step(self, model):
        self.check_summoned()
        self.check_saved()
        self.check_between("SHARDED")

    @property
    def kept(self):
        """What becomes of a group after its forward."""
        return "SHARDED" if self.spec.strategy == "FULL_SHARD" else "KEPT"

    def check_inside_forward(self):
        for name in self.layers:
            lin = f"{name}.lin" if name else "lin"
            found = self.inside.inputs(name), self.inside.parameters(lin), self.inside.buffers(name)
            assert found == ({self.dtypes.param}, {self.dtypes.param}, {self.dtypes.buffer})
        assert [name for name, *_ in self.moments] == list(self.layers)
        for name, seen, groups in self.moments:
            gathered = {"", name} & {group.name for group in groups}
            self.check_groups(groups, gathered, self.kept)
            # The root holds the layer that is no unit, or the only one.
            of_group = {other: other if other in self.spec.units else "" for other in self.layers}
            assert seen == {
                other: self.dtypes.param if of_group[other] in gathered else self.dtypes.original
                for other in self.layers
            }

    def check_groups(self, groups, gathered, rest):
        """Of ``groups`` those of these names are gathered, and the others are in the state ``rest``."""
        assert [group.name for group in groups] == ["", *self.spec.units]
        for group in groups:
            state = "GATHERED" if group.name in gathered else rest
            assert (group.state.name, group.low_precision_bytes) == (state, 0), group.name
            dtypes = group.original_dtype, group.flat_dtype, group.compute_dtype, group.reduce_dtype
            expected = self.dtypes
            assert dtypes == (expected.original, expected.original, expected.param, expected.wire)
            assert group.local_bytes == 100 // self.world.size * expected.original.itemsize
            full = 0 if state == "SHARDED" else 100 * expected.param.itemsize
            assert group.gathered_bytes == full

    def check_between(self, state):
        self.check_groups(self.engine.groups(self.model), (), state)
        assert_parameter_dtypes(self.model, self.dtypes.original)
        self.check_live_buffers()

    def check_live_buffers(self):
        live = dict(self.model.named_buffers())
        assert {n: b.dtype for n, b in live.items()} == dict.fromkeys(self.buffers, self.dtypes.buffer)
        for name, buffer in live.items():
            assert torch.equal(buffer.cpu(), self.buffers[name].to(self.dtypes.buffer)), name

    def check_wire(self):
        """Check the collectives of one step, forward and backward."""
        traffic = self.engine.traffic(self.wire)
        if self.world.size == 1:
            assert len(self.wire) == 0
            return
        num_gathers = {"FULL_SHARD": 2, "SHARD_GRAD_OP": 1}[self.spec.strategy] * len(self.layers)
        gathers = [(entry.dtype, entry.shape) for entry in traffic.gathers]
        assert gathers == [(self.dtypes.param, (100 // self.world.size,))] * num_gathers
        reductions = [(entry.dtype, entry.shape) for entry in traffic.reductions]
        assert reductions == [(self.dtypes.wire, (100,))] * len(self.layers)
        assert traffic.others == ()

    def check_summoned(self):
        with self.engine.summon(self.model):
            for group in self.engine.groups(self.model):
                assert (group.state.name, group.low_precision_bytes) == ("SUMMONED", 0)
            for layer in self.layers.values():
                weight = layer.lin.weight
                assert (weight.dtype, tuple(weight.shape)) == (self.dtypes.original, (10, 10))
            self.check_live_buffers()

    def check_saved(self):
        saved, parameters = self.model.state_dict(), self.engine.full_parameters(self.model)
        assert set(saved) == {*parameters, *self.buffers}
        for name, tensor in saved.items():
            if name in parameters:
                expected = parameters[name]
            else:  # a cast cannot be undone: the original dtype, with the bits that the cast left
                expected = self.buffers[name].to(self.dtypes.buffer).double()
            assert tensor.dtype == expected.dtype, name
            assert torch.equal(tensor.cpu(), expected.cpu()), name


def check_end_to_end(world, engine, run_subtests, precision, original, settings, **spec):
    """Hold both models to the check at each point of ``settings`` while they learn what DDP learns."""
    dtypes = Dtypes.of(precision, original)
    batches = per_rank_batches(LinearMixedPrecision.batch, world.seed, world.rank)
    training = Training(
        lambda step: batches(step).to(world.device, original),
        lambda model, batch: LinearMixedPrecision.loss(model(batch)),
        optimizer=torch.optim.Adam,
        tolerance=dtypes.lowest,
    )
    learned = {}
    for model in MODELS:
        torch.manual_seed(world.seed)
        bare = model(original).to(world.device)
        casts = precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype
        learned[model] = bare, train(ddp_with_casts(copy.deepcopy(bare), *casts), training)

    def check(scaler=False, **point):
        for bare, run in learned.values():
            how = ShardSpec(precision=precision, units=bare.units, device=world.device, **spec, **point)
            subject = Subject(world, engine, copy.deepcopy(bare), how, dtypes)
            check_training(engine, subject, run, training, scaler)

    run_subtests(settings, check)


def check_training(engine, subject, learned, training, scaler):
    # The gradients of a loss scaled by more would leave the range of fp16, and no step would be taken.
    scale = 2.0**8
    grad_scaler = engine.grad_scaler(subject.model, init_scale=scale, enabled=scaler)
    candidate = Trainee(
        subject.model,
        engine.full_parameters,
        engine.full_gradients,
        subject.backward,
        grad_scaler,
        subject.after_step,
    )
    assert_parity(learned, candidate, dataclasses.replace(training, loss=subject.forward))
    assert grad_scaler.get_scale() == (scale if scaler else 1.0)


NO_RESHARD = {"strategy": "SHARD_GRAD_OP", "offload": True}
ONE_POINT = {"forward_prefetch": [False], "backward_prefetch": [None]}


@pytest.mark.ranks(2)
class TestFSDPMixedPrecisionSharded:
    def test_mixed_precision_no_reshard_after_forward(self, world, engine, run_subtests):
        check_end_to_end(world, engine, run_subtests, ALL_DIFFERENT, F64, ONE_POINT, **NO_RESHARD)

    @pytest.mark.parametrize("precision", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
    @pytest.mark.parametrize("offload", [True, False], ids=["offload", "no_offload"])
    @pytest.mark.parametrize("original", [F32, F64], ids=["fp32", "fp64"])
    @pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "no_scaler"])
    def test_mixed_precision_e2e_full_shard(
        self, world, engine, run_subtests, precision, offload, original, scaler
    ):
        settings = {**PREFETCH, "scaler": [scaler]}
        check_end_to_end(world, engine, run_subtests, precision, original, settings, offload=offload)


@pytest.mark.ranks(1)
class TestFSDPMixedPrecisionUnsharded:
    def test_mixed_precision_no_reshard_after_forward(self, world, engine, run_subtests):
        check_end_to_end(world, engine, run_subtests, ALL_DIFFERENT, F64, ONE_POINT, **NO_RESHARD)

    @pytest.mark.parametrize("precision", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
    @pytest.mark.parametrize("original", [F32, F64], ids=["fp32", "fp64"])
    def test_mixed_precision_e2e_full_shard(self, world, engine, run_subtests, precision, original):
        settings = {"offload": [True, False], "scaler": [True, False]}
        check_end_to_end(world, engine, run_subtests, precision, original, settings)
