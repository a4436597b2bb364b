"""A model trained in mixed precision: inside forward, in backward, on the wire and between steps.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the end-to-end check.
"""

import dataclasses

import pytest
import torch

from lockstep.assertions import (
    Tolerance,
    Training,
    assert_gradient_dtypes,
    assert_named_close,
    assert_parameter_dtypes,
    assert_parity,
    per_rank_batches,
    train,
    unsharded_with_casts,
)
from lockstep.conformance import Capability, Precision, ShardSpec, offers, trainee
from lockstep.conformance.models import LinearMixedPrecision, NestedLinearMixedPrecision, copier
from lockstep.recorders import CollectivesLog, ForwardDtypes

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

CONFIGURATIONS = {
    "fp16": Precision(F16, F16, F16),
    "reduce_only": Precision(reduce_dtype=F16),
    "params_and_buffers": Precision(F16, buffer_dtype=F16),
    "none": Precision(),
    "all_different": Precision(F16, F32, BF16),
}
WITHOUT_BUFFERS = {"params": Precision(F16), "params_and_reduce": Precision(F16, F32)}
ALL_DIFFERENT = CONFIGURATIONS["all_different"]
EXACT = Tolerance(0, 0)
PREFETCH = {
    "forward_prefetch": [False, True],
    "backward_prefetch": [None, "BACKWARD_PRE", "BACKWARD_POST"],
}
NUMEL = 100  # in each group
MODELS = (LinearMixedPrecision, NestedLinearMixedPrecision)


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes that `Precision` gives for parameters of one original dtype, and buffers of fp64."""

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
        return F16 if F16 in (self.param, self.wire) else self.original

    @property
    def low_precision(self):
        """Bytes per element of a shard that is cast to be sent; 0 if it is sent as it is."""
        return 0 if self.param == self.original else self.param.itemsize


@dataclasses.dataclass(frozen=True)
class Moment:
    """The state of layers and groups as the layer `name` began its forward or its backward.

    No groups where the engine gives no view of them: then of weights only the layer's own is checked.
    """

    name: str
    weights: dict[str, torch.dtype]
    groups: tuple


class Subject:
    """A sharded model under the check; the modules of `bare` become its own."""

    def __init__(self, world, engine, bare, spec, dtypes):
        self.world, self.engine, self.spec, self.dtypes = world, engine, spec, dtypes
        self.buffers = {name: buffer.cpu() for name, buffer in bare.named_buffers()}
        self.layers = {n: m for n, m in bare.named_modules() if isinstance(m, LinearMixedPrecision)}
        self.log, self.wire = ForwardDtypes(bare), CollectivesLog()
        self.in_forward, self.in_backward = [], []
        start = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
        self.model = engine.shard(bare, spec)
        # While nothing is cast yet: every bit, which fp16 would not hold.
        assert_named_close(self.engine.full_state(self.model), start, EXACT)
        for name, layer in self.layers.items():
            layer.lin.register_forward_pre_hook(lambda *_, name=name: self.note(name, self.in_forward))
            layer.lin.register_forward_hook(lambda *args, name=name: self.watch_backward(name, args[-1]))

    def watch_backward(self, name, output):
        output.register_hook(lambda _: self.note(name, self.in_backward))

    def note(self, name, moments):
        weights = {other: layer.lin.weight.dtype for other, layer in self.layers.items()}
        moments.append(Moment(name, weights, self.groups()))

    def groups(self):
        return tuple(self.engine.groups(self.model)) if offers(self.engine, Capability.GROUPS) else ()

    def forward(self, model, batch):
        self.in_forward.clear()
        self.in_backward.clear()
        self.wire = CollectivesLog()
        with self.log, self.wire:
            loss = LinearMixedPrecision.loss(model(batch))
        assert loss.dtype == self.dtypes.param
        self.check_in_forward()
        self.check_between(self.kept)
        return loss

    def backward(self, model, scaled_loss):
        with self.wire:
            self.engine.backward(model, scaled_loss)
        self.check_in_backward()
        if offers(self.engine, Capability.TRAFFIC):
            self.check_wire()
        self.check_between("SHARDED")
        assert_gradient_dtypes(model, self.dtypes.original)

    def after_step(self, model):
        if offers(self.engine, Capability.SUMMON):
            self.check_summoned()
        self.check_saved()
        self.check_between("SHARDED")

    @property
    def kept(self):
        """The state of a group after its forward."""
        return "SHARDED" if self.spec.strategy == "FULL_SHARD" else "RETAINED"

    def group_of(self, layer):
        """Return the group's name: the layer that is no unit is the root's."""
        return layer if layer in self.spec.units else ""

    def check_in_forward(self):
        for name in self.layers:
            lin = f"{name}.lin" if name else "lin"
            found = self.log.inputs(name), self.log.parameters(lin), self.log.buffers(name)
            assert found == ({self.dtypes.param}, {self.dtypes.param}, {self.dtypes.buffer})
        assert [moment.name for moment in self.in_forward] == list(self.layers)
        assert {moment.weights[moment.name] for moment in self.in_forward} == {self.dtypes.param}
        if offers(self.engine, Capability.GROUPS):
            self.check_groups_in_forward()

    def check_groups_in_forward(self):
        seen = {""}
        for moment in self.in_forward:
            gathered = {"", self.group_of(moment.name)}
            self.check_groups(moment.groups, gathered, self.kept)
            # What a unit keeps after its forward, the modules that come after it see.
            seen = gathered if self.kept == "SHARDED" else seen | gathered
            assert moment.weights == {
                name: self.dtypes.param if self.group_of(name) in seen else self.dtypes.original
                for name in self.layers
            }

    def check_in_backward(self):
        """Check that a shard exists in low precision where one is under way in it, and nowhere else."""
        assert [moment.name for moment in self.in_backward] == list(self.layers)[::-1]
        if not offers(self.engine, Capability.GROUPS):
            return
        seen = [(g.state.name, g.low_precision_bytes) for m in self.in_backward for g in m.groups]
        assert {low for state, low in seen if state != "PREFETCHED"} == {0}
        how = self.spec.strategy, self.spec.backward_prefetch
        is_ahead = self.spec.units and how == ("FULL_SHARD", "BACKWARD_PRE")
        shard = self.dtypes.low_precision * NUMEL // self.world.size if self.world.size > 1 else 0
        assert {low for state, low in seen if state == "PREFETCHED"} == ({shard} if is_ahead else set())

    def check_groups(self, groups, gathered, rest):
        """Check that of `groups` those of these names are gathered, and the others as `rest` says."""
        dtypes = self.dtypes
        assert [group.name for group in groups] == ["", *self.spec.units]
        for group in groups:
            state = "UNSHARDED" if group.name in gathered else rest
            assert (group.state.name, group.low_precision_bytes) == (state, 0), group.name
            assert (group.original_dtype, group.flat_dtype) == (dtypes.original, dtypes.original)
            assert (group.compute_dtype, group.reduce_dtype) == (dtypes.param, dtypes.wire)
            assert group.local_bytes == NUMEL // self.world.size * dtypes.original.itemsize
            assert group.gathered_bytes == (0 if state == "SHARDED" else NUMEL * dtypes.param.itemsize)

    def check_between(self, state):
        if groups := self.groups():
            self.check_groups(groups, (), state)
        assert_parameter_dtypes(self.model, self.dtypes.original)
        self.check_live_buffers()

    def check_live_buffers(self):
        live = dict(self.model.named_buffers())
        assert {n: b.dtype for n, b in live.items()} == dict.fromkeys(self.buffers, self.dtypes.buffer)
        for name, buffer in live.items():
            assert torch.equal(buffer.cpu(), self.buffers[name].to(self.dtypes.buffer)), name

    def check_wire(self):
        """Check the collectives of one step."""
        if self.world.size == 1:
            assert len(self.wire) == 0
            return
        traffic = self.engine.traffic(self.wire)
        num_gathers = {"FULL_SHARD": 2, "SHARD_GRAD_OP": 1}[self.spec.strategy] * len(self.layers)
        gathers = [(entry.dtype, entry.shape) for entry in traffic.gathers]
        assert gathers == [(self.dtypes.param, (NUMEL // self.world.size,))] * num_gathers
        reductions = [(entry.dtype, entry.shape) for entry in traffic.reductions]
        assert reductions == [(self.dtypes.wire, (NUMEL,))] * len(self.layers)
        assert traffic.others == ()

    def check_summoned(self):
        with self.engine.summon(self.model):
            for group in self.groups():
                assert (group.state.name, group.low_precision_bytes) == ("SUMMONED", 0)
            for layer in self.layers.values():
                weight = layer.lin.weight
                assert (weight.dtype, tuple(weight.shape)) == (self.dtypes.original, (10, 10))
            self.check_live_buffers()

    def check_saved(self):
        saved, parameters = self.engine.full_state(self.model), self.engine.full_parameters(self.model)
        # A cast cannot be undone: buffers are saved in their dtype with the bits that the cast left.
        buffers = {n: b.to(self.dtypes.buffer).double() for n, b in self.buffers.items()}
        assert {tensor.dtype for tensor in parameters.values()} == {self.dtypes.original}
        assert_named_close(saved, {**parameters, **buffers}, EXACT)


def check_end_to_end(world, engine, run_subtests, precision, original, settings, **spec):
    """Hold both models to the check in each case of `settings`, and to what they learn unsharded."""
    dtypes = Dtypes.of(precision, original)
    batches = per_rank_batches(LinearMixedPrecision.batch, world.seed, world.rank)
    training = Training(
        lambda step: batches(step).to(world.device, original),
        lambda model, batch: LinearMixedPrecision.loss(model(batch)),
        steps=2,
        optimizer=torch.optim.Adam,
        tolerance=dtypes.lowest,
    )
    casts = precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype
    # Training seeds each rank differently.
    models = [copier(model(original).to(world.device)) for model in MODELS]
    learned = [train(unsharded_with_casts(copied(), *casts), training) for copied in models]

    def check(scaler=False, **case):
        for copied, run in zip(models, learned, strict=True):
            bare = copied()
            how = ShardSpec(precision=precision, units=bare.units, device=world.device, **spec, **case)
            subject = Subject(world, engine, bare, how, dtypes)
            check_training(engine, subject, run, training, scaler)

    run_subtests(settings, check)


def check_training(engine, subject, learned, training, scaler):
    # The gradients of a loss scaled by more would leave the range of fp16, and no step would be taken.
    scale = 2.0**8
    grad_scaler = engine.grad_scaler(subject.model, init_scale=scale, enabled=scaler)
    candidate = trainee(
        engine,
        subject.model,
        backward=subject.backward,
        scaler=grad_scaler,
        after_step=subject.after_step,
    )
    assert_parity(learned, candidate, dataclasses.replace(training, loss=subject.forward))
    assert grad_scaler.get_scale() == (scale if scaler else 1.0)


NO_RESHARD = {"strategy": "SHARD_GRAD_OP", "offload": True}


@pytest.mark.ranks(2)
class TestFSDPMixedPrecisionSharded:
    def test_mixed_precision_no_reshard_after_forward(self, world, engine, run_subtests):
        settings = {**PREFETCH, "use_orig_params": [False, True]}
        check_end_to_end(world, engine, run_subtests, ALL_DIFFERENT, F64, settings, **NO_RESHARD)

    @pytest.mark.parametrize("precision", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
    @pytest.mark.parametrize("offload", [True, False], ids=["offload", "no_offload"])
    @pytest.mark.parametrize("original", [F32, F64], ids=["fp32", "fp64"])
    @pytest.mark.parametrize("scaler", [True, False], ids=["scaler", "no_scaler"])
    def test_mixed_precision_e2e_full_shard(
        self, world, engine, run_subtests, offload, precision, original, scaler
    ):
        settings = {**PREFETCH, "scaler": [scaler]}
        check_end_to_end(world, engine, run_subtests, precision, original, settings, offload=offload)

    @pytest.mark.parametrize("precision", WITHOUT_BUFFERS.values(), ids=WITHOUT_BUFFERS)
    @pytest.mark.parametrize("original", [F32, F64], ids=["fp32", "fp64"])
    def test_parameters_are_cast_and_buffers_are_not(self, world, engine, run_subtests, precision, original):
        settings = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP"], "scaler": [True, False]}
        check_end_to_end(world, engine, run_subtests, precision, original, settings)


@pytest.mark.ranks(1)
class TestFSDPMixedPrecisionUnsharded:
    def test_mixed_precision_no_reshard_after_forward(self, world, engine, run_subtests):
        settings = {**PREFETCH, "use_orig_params": [False, True]}
        check_end_to_end(world, engine, run_subtests, ALL_DIFFERENT, F64, settings, **NO_RESHARD)

    @pytest.mark.parametrize("precision", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
    @pytest.mark.parametrize("original", [F32, F64], ids=["fp32", "fp64"])
    def test_mixed_precision_e2e_full_shard(self, world, engine, run_subtests, precision, original):
        settings = {"offload": [True, False], "scaler": [True, False]}
        check_end_to_end(world, engine, run_subtests, precision, original, settings)
