"""Mixed precision of modules that are sharded or replicated in place.

After PyTorch's test/distributed/_composable/test_replicate_mixed_precision.py, whose classes are for
`replicate`; their claims hold for `fully_shard` as well, in classes derived from them.
"""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close, assert_sharded_parity, per_rank_batches
from lockstep.assertions.closeness import EXACT, Tolerance
from lockstep.conformance.models import MLP, CastingLayers, ExternalInput
from lockstep.recorders import CollectivesLog, ForwardDtypes

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Master:
    """A model in fp32 that Adam steps, and the copy in low precision that computes for it."""

    def __init__(self, bare, param_dtype, reduce_dtype):
        self.model, self.compute = copy.deepcopy(bare), copy.deepcopy(bare).to(param_dtype)
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.sums = [torch.zeros_like(p, dtype=reduce_dtype) for p in bare.parameters()]

    def backward(self, batch):
        """Add this rank's gradients to those that wait for their reduction; return the loss."""
        loss = self.compute(batch.to(self.param_dtype)).sum()
        loss.backward()
        for waiting, p in zip(self.sums, self.compute.parameters(), strict=True):
            waiting += p.grad.to(self.reduce_dtype)
            p.grad = None
        return loss

    def reduce(self, world):
        """Give the model the mean over ranks, added in fp32 in rank order and rounded once."""
        of_ranks = world.gather(torch.cat([waiting.flatten() for waiting in self.sums]))
        mean = (sum(gradients.float() for gradients in of_ranks) / world.size).to(self.reduce_dtype)
        parts = mean.to(world.device).split([waiting.numel() for waiting in self.sums])
        for p, part in zip(self.model.parameters(), parts, strict=True):
            p.grad = part.view_as(p).to(p.dtype)
        for waiting in self.sums:
            waiting.zero_()

    def step(self):
        self.optimizer.step()
        for ours, p in zip(self.compute.parameters(), self.model.parameters(), strict=True):
            ours.detach().copy_(p)


class Learner:
    """The same model with each layer and the rest in a group of its own, and its optimizer."""

    def __init__(self, engine, bare, front, freed, param_dtype, reduce_dtype):
        self.engine, self.model = engine, copy.deepcopy(bare)
        policy = engine.composable.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        # Replicas have nothing to free but copies in low precision, and no argument for it.
        settings = {"reshard_after_forward": freed} if front == "fully_shard" else {}
        self.freed_by_hand = freed and front == "replicate"
        for module in (*self.model, self.model):
            getattr(engine.composable, front)(module, mp_policy=policy, **settings)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def backward(self, batch):
        """Return the loss, and the dtypes in which gradients were reduced."""
        with CollectivesLog() as log:
            loss = self.model(batch).sum()
            for module in self.model if self.freed_by_hand else ():
                module.reshard()
            loss.backward()
        return loss, {entry.dtype for entry in self.engine.traffic(log).reductions}


def stack_of_mlps(world):
    return nn.Sequential(*(MLP(16) for _ in range(3))).to(world.device)


def batches(world):
    make = per_rank_batches(lambda g: torch.randn(4, 16, generator=g), world.seed, world.rank)
    return lambda step: make(step).to(world.device)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("freed", [True, False], ids=["freed_after_forward", "kept"])
class TestReplicateMixedPrecisionTraining:
    front = "replicate"

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
    def test_compute_dtype(self, world, engine, freed, dtype):
        self.check(world, engine, freed, dtype, None)

    @pytest.mark.parametrize(
        "dtypes", [(BF16, F32), (None, BF16)], ids=["bf16_reduced_in_fp32", "reduced_in_bf16"]
    )
    def test_reduce_dtype(self, world, engine, freed, dtypes):
        self.check(world, engine, freed, *dtypes)

    def check(self, world, engine, freed, param_dtype, reduce_dtype):
        """Four steps of Adam equal those of a master in fp32, bit by bit where dtypes are low."""
        bare = stack_of_mlps(world)
        wire = reduce_dtype or param_dtype
        master = Master(bare, param_dtype or F32, wire)
        learner = Learner(engine, bare, self.front, freed, param_dtype, reduce_dtype)
        for step in range(4):
            learner.optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss, reduced_in = learner.backward(batches(world)(step))
            expected = master.backward(batches(world)(step))
            master.reduce(world)
            assert reduced_in == {wire}
            assert_named_close({"loss": loss}, {"loss": expected}, EXACT)
            assert_sharded_parity(learner.model, master.model)
            learner.optimizer.step()
            master.step()

    def test_grad_acc_with_reduce_dtype(self, world, engine, freed):
        bare = stack_of_mlps(world)
        master, learner = Master(bare, BF16, F32), Learner(engine, bare, self.front, freed, BF16, F32)
        for step in range(2):
            for microbatch in range(4):
                is_last = microbatch == 3
                learner.model.set_requires_gradient_sync(is_last)
                batch = batches(world)(4 * step + microbatch)
                loss, reduced_in = learner.backward(batch)
                assert reduced_in == ({F32} if is_last else set())
                assert_named_close({"loss": loss}, {"loss": master.backward(batch)}, EXACT)
            master.reduce(world)
            assert_sharded_parity(learner.model, master.model)
            learner.optimizer.step()
            master.step()
            learner.optimizer.zero_grad()


class TestFullyShardMixedPrecisionTraining(TestReplicateMixedPrecisionTraining):
    front = "fully_shard"


@dataclasses.dataclass
class Input:
    """An argument that has tensors inside, and other values."""

    x: torch.Tensor
    more: dict[str, list[torch.Tensor]]
    name: str = "input"


class TakesDataclass(nn.Linear):
    def forward(self, given):
        assert (type(given), given.name) == (Input, "input")
        return super().forward(given.x) + given.more["ys"][0]


def fresh_input(world, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(world.rank)).to(world.device)


def norm_model(kind, dim):
    """Return a norm between two layers, and the shape of its input."""
    if dim == 3:
        return nn.Sequential(nn.Conv3d(1, 5, 3), kind(5), nn.Conv3d(5, 4, 3)), (3, 1, 5, 5, 5)
    if dim == 2:
        return nn.Sequential(nn.Conv2d(1, 5, 3), kind(5), nn.Conv2d(5, 4, 3)), (3, 1, 9, 9)
    return nn.Sequential(nn.Linear(8, 8), kind(8), nn.Linear(8, 8)), (4, 8)


@pytest.mark.ranks(2)
class TestReplicateMixedPrecisionCasts:
    front = "replicate"

    def apply(self, engine, module, **policy):
        mp_policy = engine.composable.MixedPrecisionPolicy(**policy)
        return getattr(engine.composable, self.front)(module, mp_policy=mp_policy)

    @pytest.mark.parametrize(
        ("low", "casts", "policy", "received"),
        [
            ("c2", False, {}, (F32, F16)),
            ("c2", True, {"cast_forward_inputs": False}, (F32, F32)),
            ("c1", False, {"output_dtype": F32}, (F16, F32)),
        ],
        ids=["engine_casts_inputs", "module_casts_inputs", "engine_casts_outputs"],
    )
    def test_float16_on_one_submodule(self, world, engine, low, casts, policy, received):
        model = CastingLayers(casts).to(world.device)
        bare, dtypes = copy.deepcopy(model), ForwardDtypes(model)
        self.apply(engine, getattr(model, low), param_dtype=F16, **policy)
        self.apply(engine, model)
        x = fresh_input(world, 2, 8)
        with dtypes:
            output = model(x)
        output.sum().backward()
        computed_in = {name: F16 if name == low else F32 for name in ("c1", "c2")}
        assert [dtypes.inputs(name) for name in ("", "c1", "c2")] == [{F32}, *({d} for d in received)]
        for name, dtype in computed_in.items():
            assert dtypes.inputs(f"{name}.l") == dtypes.parameters(f"{name}.l") == {dtype}
            getattr(bare, name).to(dtype)
        expected = bare.c2.l(bare.c1.l(x.to(computed_in["c1"])).to(computed_in["c2"]))
        assert_named_close({"output": output}, {"output": expected}, EXACT)
        assert {p.grad.dtype for p in model.parameters()} == {F32}

    @pytest.mark.parametrize("cast", [True, False], ids=["cast", "not_cast"])
    def test_submodules_with_external_inputs(self, world, engine, cast):
        model = ExternalInput().to(world.device)
        dtypes = ForwardDtypes(model)
        self.apply(engine, model.l2, param_dtype=F16, cast_forward_inputs=cast)
        self.apply(engine, model, param_dtype=F16)
        with dtypes:
            output = model(fresh_input(world, 2, 8))
        output.sum().backward()
        assert dtypes.inputs("") == dtypes.inputs("l1") == {F16}
        assert [call.inputs for call in dtypes.calls("l2")] == [{"0": F16, "1": F16 if cast else F32}]
        assert output.dtype == (F16 if cast else F32)
        assert model.l2.bias.grad.full_tensor().tolist() == [2.0] * 8

    def test_norm_modules_bf16(self, world, engine, run_subtests):
        self.check_norm_modules(world, engine, run_subtests, BF16)

    def test_norm_modules_fp16(self, world, engine, run_subtests):
        self.check_norm_modules(world, engine, run_subtests, F16)

    def check_norm_modules(self, world, engine, run_subtests, dtype):
        layer_norm = {"kind": [nn.LayerNorm], "dim": [1], "remedy": [None]}
        batch_norm_1d = {"kind": [nn.BatchNorm1d], "dim": [1], "remedy": ["buffers", "policy"]}
        batch_norm_2d = {"kind": [nn.BatchNorm2d], "dim": [2], "remedy": ["buffers", "policy"]}
        batch_norm_3d = {"kind": [nn.BatchNorm3d], "dim": [3], "remedy": ["buffers", "policy"]}
        for settings in (layer_norm, batch_norm_1d, batch_norm_2d, batch_norm_3d):
            run_subtests(settings, self.check_norm, world, engine, dtype=dtype)
        # Buffers stay in fp32 while parameters are in low precision: the kernel refuses them.
        for kind, dim in ((nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)):
            with pytest.raises(
                RuntimeError, match=r"expected scalar type|Expected running_mean to have type"
            ):
                self.check_norm(world, engine, kind, dim, None, dtype)

    def check_norm(self, world, engine, kind, dim, remedy, dtype):
        model, shape = norm_model(kind, dim)
        reference = copy.deepcopy(model.to(world.device)).to(dtype)
        if remedy == "buffers":
            model[1].running_mean = model[1].running_mean.to(dtype)
            model[1].running_var = model[1].running_var.to(dtype)
        policy = {"output_dtype": dtype} if remedy == "policy" else {"param_dtype": dtype}
        self.apply(engine, model[1], **policy)
        for module in (model[0], model[2], model):
            self.apply(engine, module, param_dtype=dtype, reduce_dtype=F32)
        x = fresh_input(world, *shape)
        outputs = [model(x), reference(x.to(dtype))]
        for output in outputs:
            output.sum().backward()
        # The norm rounds once more, or once less, where its buffers or its weights are in fp32.
        tolerance = EXACT if remedy != "policy" else Tolerance(0.02, 0.02)
        assert_named_close({"output": outputs[0]}, {"output": outputs[1]}, tolerance)
        buffer_dtype = dtype if remedy == "buffers" else F32
        assert {b.dtype for b in model.buffers() if b.is_floating_point()} <= {buffer_dtype}
        assert {p.grad.dtype for p in model.parameters()} == {F32}

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
    @pytest.mark.filterwarnings("ignore:.*BatchNorm1d. on CPU it computes with:UserWarning")
    def test_batch_norm_1d_computes_in_fp32_where_its_buffers_are(self, world, engine, dtype):
        """As on GPUs, whose kernel takes parameters in low precision beside buffers in fp32."""
        model, shape = norm_model(nn.BatchNorm1d, 1)
        reference = copy.deepcopy(model.to(world.device)).to(dtype)
        reference[1].to(F32)
        for module in (*model, model):
            self.apply(engine, module, param_dtype=dtype, reduce_dtype=F32)
        x = fresh_input(world, *shape)
        for _ in range(2):  # the modules have their own parameters again
            outputs = [model(x), reference(x.to(dtype))]
            for output in outputs:
                output.sum().backward()
        assert {output.dtype for output in outputs} == {dtype}
        assert_named_close({"output": outputs[0]}, {"output": outputs[1]}, EXACT)
        assert_named_close(dict(model.named_buffers()), dict(reference.named_buffers()), EXACT)
        assert [name for name, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
        # All ranks send the gradient of a sum to the last bias: the number of rows, twice.
        assert model[2].bias.grad.full_tensor().tolist() == [8.0] * 8
        assert {p.grad.dtype for p in model.parameters()} == {F32}

    def test_batch_norm_1d_has_its_own_parameters_again_after_its_forward(self, world, engine):
        """Also after one that raised. On CPU a warning says what it computes with in between."""

        class Scaled(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(8)

            def forward(self, x):
                before = [self.norm.weight, self.norm.bias]
                for columns in (7, 8):
                    with nullcontext() if columns == 8 else pytest.raises((RuntimeError, ValueError)):
                        output = self.norm(x[:, :columns])
                    own = self.norm.weight, self.norm.bias
                    seen.append(all(a is b for a, b in zip(before, own, strict=True)))
                return output * self.norm.weight

        seen = []
        model = Scaled().to(world.device)
        self.apply(engine, model, param_dtype=BF16)
        on_cpu = world.device.type == "cpu"
        with pytest.warns(UserWarning, match="BatchNorm1d: on CPU") if on_cpu else nullcontext():
            assert model(fresh_input(world, 4, 8)).dtype == BF16
        assert seen == [True, True]

    @pytest.mark.parametrize("lacks", ["affine", "track_running_stats"])
    def test_batch_norm_1d_may_lack_weights_or_statistics(self, world, engine, lacks):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, **{lacks: False})).to(world.device)
        reference = copy.deepcopy(model)
        reference[0].to(BF16)
        if lacks == "track_running_stats":
            reference[1].to(BF16)
        self.apply(engine, model, param_dtype=BF16)
        x = fresh_input(world, 4, 8)
        assert_named_close({"": model(x)}, {"": reference(x.to(BF16))}, EXACT)

    def test_batch_norm_1d_computes_as_it_is_without_a_dtype_for_it(self, world, engine):
        bare = nn.BatchNorm1d(8).to(world.device)
        bare.weight.data, bare.bias.data = bare.weight.data.to(BF16), bare.bias.data.to(BF16)
        x = fresh_input(world, 4, 8).to(BF16)

        def outcome(model):
            try:
                return str(model(x).dtype)
            except RuntimeError as error:  # of torch's kernel for CPUs
                return str(error)

        expected = outcome(copy.deepcopy(bare))
        self.apply(engine, bare, reduce_dtype=BF16)
        assert outcome(bare) == expected

    @pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
    def test_an_embedding_in_low_precision_among_layers_in_fp32(self, world, engine, dtype):
        model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8), nn.LayerNorm(8)).to(world.device)
        reference = copy.deepcopy(model)
        reference[0].to(dtype)
        self.apply(engine, model[0], param_dtype=dtype, reduce_dtype=F32, output_dtype=F32)
        self.apply(engine, model)
        rows = torch.tensor([world.rank, 2, 2], device=world.device)
        output = model(rows)
        expected = reference[2](reference[1](reference[0](rows).float()))
        assert_named_close({"output": output}, {"output": expected}, EXACT)
        for loss in (output, expected):
            loss.square().sum().backward()
        means = [
            sum(each) / world.size
            for each in zip(*world.gather([p.grad.float() for p in reference.parameters()]), strict=True)
        ]
        names = [name for name, _ in reference.named_parameters()]
        found = {name: model.get_parameter(name).grad.full_tensor() for name in names}
        assert_named_close(found, dict(zip(names, (m.to(world.device) for m in means), strict=True)))

    def test_clamp_reduce_dtype(self, world, engine, collectives):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(BF16)
        policy = engine.composable.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        before = copy.copy(policy)
        for module in (*model, model):
            getattr(engine.composable, self.front)(module.to(world.device), mp_policy=policy)
        model.to(F32)
        model(fresh_input(world, 2, 8)).sum().backward()
        assert policy == before
        assert {entry.dtype for entry in engine.traffic(collectives).reductions} == {BF16}
        assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(F32, F32)}

    def test_dataclass_input(self, world, engine):
        model = TakesDataclass(8, 8).to(world.device)
        bare, dtypes = copy.deepcopy(model).to(BF16), ForwardDtypes(model)
        self.apply(engine, model, param_dtype=BF16, reduce_dtype=BF16, output_dtype=BF16)
        x, y = fresh_input(world, 2, 8), torch.ones(2, 8, device=world.device)
        with dtypes:
            output = model(Input(x, {"ys": [y]}))
        output.sum().backward()
        assert [set(call.inputs.items()) for call in dtypes.calls("")] == [
            {("0.x", BF16), ("0.more.ys.0", BF16)}
        ]
        expected = bare(Input(x.to(BF16), {"ys": [y.to(BF16)]}))
        assert_named_close({"output": output}, {"output": expected}, EXACT)
        assert model.bias.grad.full_tensor().tolist() == [2.0] * 8


class TestFullyShardMixedPrecisionCasts(TestReplicateMixedPrecisionCasts):
    front = "fully_shard"
