"""Dtypes that submodules receive where units differ in precision or are ignored.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the classes
TestFSDPMixedPrecisionIgnoredModules and TestFSDPDifferentSubmodulePrecision.
"""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close, assert_parameter_dtypes, named_gradients
from lockstep.conformance import Precision, ShardSpec
from lockstep.recorders import ForwardDtypes

F16, F32 = torch.float16, torch.float32
HALF = Precision(F16, cast_forward_inputs=True)
HALF_WITHOUT_INPUTS = Precision(F16)
FULL = Precision(F32, cast_forward_inputs=True)
SETTINGS = {"strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], "use_orig_params": [False, True]}
MISMATCH = pytest.raises(RuntimeError, match="same dtype")


class Layer(nn.Linear):
    """A linear layer that may cast its input to its weight's dtype."""

    def __init__(self, casts):
        super().__init__(8, 8)
        self.casts = casts

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype) if self.casts else x)


class TwoLayers(nn.Module):
    def __init__(self, casts=False):
        super().__init__()
        self.c1, self.c2 = Layer(casts), Layer(casts)

    def forward(self, x):
        return self.c2(self.c1(x))


class External(nn.Module):
    """A layer that is also given something that the model's forward makes."""

    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(8, 8), Scaled()

    def forward(self, x):
        return self.l2(self.l1(x), torch.full((8,), 1 + 2**-12, device=x.device))


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x, y):
        return super().forward(x) * y


class Run:
    """A sharded model, its forward and backward on data of this rank's own, and what its modules receive."""

    def __init__(self, world, engine, bare, **spec):
        self.world, self.engine = world, engine
        self.reference = copy.deepcopy(bare).to(world.device)
        self.x = torch.randn(4, 8, device=world.device) * (1 + world.rank)
        self.log = ForwardDtypes(bare)
        self.model = engine.shard(bare.to(world.device), ShardSpec(**spec))

    def step(self):
        with self.log:
            self.output = self.model(self.x)
            self.engine.backward(self.model, self.output.float().square().sum())

    def received(self):
        return {call.module: call.inputs["0"] for call in self.log}

    def assert_values(self, half):
        """Hold output and gradients to an unsharded model's with casts at each layer, to fp16 at `half`."""
        for name, layer in self.reference.named_children():
            layer.to(F16 if name in half else F32).casts = True
        computed = self.reference(self.x)
        assert torch.equal(self.output, computed)
        computed.float().square().sum().backward()
        of_ranks = self.world.gather({n: g.float() for n, g in named_gradients(self.reference).items()})
        means = {name: sum(of_rank[name] for of_rank in of_ranks) / len(of_ranks) for name in of_ranks[0]}
        assert_named_close(self.engine.full_gradients(self.model), means, F16)


@pytest.mark.ranks(1)
class TestFSDPMixedPrecisionIgnoredModules:
    def test_mixed_precision_with_ignored_module(self, world, engine, run_subtests):
        run_subtests(SETTINGS, self.check, world, engine)

    def check(self, world, engine, **settings):
        bare = nn.Sequential(Layer(casts=True), Layer(casts=False), Layer(casts=True))
        before = bare[1].weight
        run = Run(world, engine, bare, ignored=("1",), precision=HALF_WITHOUT_INPUTS, **settings)
        with MISMATCH:
            run.step()
        assert run.received() == {"": F16, "0": F16, "1": F16}
        assert (run.log.parameters("0"), run.log.parameters("1")) == ({F16}, {F32})
        assert bare[1].weight is before
        bare[1].casts = True
        run.step()
        assert run.received() == {"": F16, "0": F16, "1": F16, "2": F32}
        run.assert_values(half=("0", "2"))


@pytest.mark.ranks(2)
class TestFSDPDifferentSubmodulePrecision:
    def test_float16_on_one_submodule(self, world, engine, run_subtests):
        def check(**settings):
            run = Run(world, engine, TwoLayers(), precision=None, unit_precisions={"c2": HALF}, **settings)
            run.step()
            assert run.received() == {"": F32, "c1": F32, "c2": F16}
            assert (run.log.parameters("c1"), run.log.parameters("c2")) == ({F32}, {F16})
            assert_parameter_dtypes(run.model, F32)
            run.assert_values(half=("c2",))

        run_subtests(SETTINGS, check)

    def test_float16_on_one_submodule_skip_inputs(self, world, engine, run_subtests):
        def check(**settings):
            only_c2 = {"c2": HALF_WITHOUT_INPUTS}
            bare = TwoLayers(casts=True)
            run = Run(world, engine, bare, precision=None, unit_precisions=only_c2, **settings)
            run.step()
            assert run.received() == {"": F32, "c1": F32, "c2": F32}
            assert (run.log.parameters("c1"), run.log.parameters("c2")) == ({F32}, {F16})
            run.assert_values(half=("c2",))

        run_subtests(SETTINGS, check)

    def test_float16_on_one_submodule_skip_inputs_error(self, world, engine, run_subtests):
        def check(**settings):
            only_c2 = {"c2": HALF_WITHOUT_INPUTS}
            run = Run(world, engine, TwoLayers(), precision=None, unit_precisions=only_c2, **settings)
            with MISMATCH:
                run.step()
            assert run.received() == {"": F32, "c1": F32, "c2": F32}
            assert run.log.parameters("c2") == {F16}

        run_subtests(SETTINGS, check)

    def test_submodules_with_different_precisions(self, world, engine, run_subtests):
        def check(**settings):
            run = Run(world, engine, TwoLayers(), precision=FULL, unit_precisions={"c2": HALF}, **settings)
            run.step()
            assert run.received() == {"": F32, "c1": F32, "c2": F16}
            run.assert_values(half=("c2",))

        run_subtests(SETTINGS, check)

    def test_submodules_with_different_precisions_error(self, world, engine, run_subtests):
        """Results of a unit are not cast back: what the root runs next receives them as they are."""

        def check(**settings):
            run = Run(world, engine, TwoLayers(), precision=FULL, unit_precisions={"c1": HALF}, **settings)
            with MISMATCH:
                run.step()
            assert run.received() == {"": F32, "c1": F16, "c2": F16}
            assert (run.log.parameters("c1"), run.log.parameters("c2")) == ({F16}, {F32})

        run_subtests(SETTINGS, check)

    @pytest.mark.parametrize("cast", [False, True], ids=["", "cast_forward_inputs"])
    def test_submodules_with_external_inputs(self, world, engine, run_subtests, cast):
        """The root's arguments are cast; what the model makes between units only where the unit casts."""

        def check(**settings):
            precision = Precision(F16, cast_forward_inputs=cast)
            run = Run(world, engine, External(), precision=precision, units=("l2",), **settings)
            run.step()
            assert run.received() == {"": F16, "l1": F16, "l2": F16}
            (call,) = run.log.calls("l2")
            assert call.inputs == {"0": F16, "1": F16 if cast else F32}
            assert run.output.dtype == (F16 if cast else F32)

        run_subtests(SETTINGS, check)
