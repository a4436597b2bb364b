"""Training in low precision and eval in full precision by turns, of one sharded model or of parts of it."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import Tolerance, assert_buffer_dtypes, assert_named_close
from lockstep.conformance import Capability, Precision, offers
from lockstep.recorders import CollectivesLog, ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EXACT = Tolerance(0, 0)
LOW = Precision(BF16, buffer_dtype=BF16)
THIRD = 1 / 3


class Shifted(nn.Linear):
    """A linear layer and a tanh of what it gives, with a buffer that is added."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("shift", torch.full((8,), THIRD))

    def forward(self, x):
        return torch.tanh(super().forward(x) + self.shift)


class Layers(nn.Sequential):
    """A unit, a layer of the root, and a unit again."""

    units = ("0", "2")

    def __init__(self):
        super().__init__(Shifted(), Shifted(), Shifted())


class Recomputed(nn.Module):
    """Layers that backward computes a second time, unless that is turned off."""

    units = ("inner.0", "inner.2")

    def __init__(self, use_reentrant):
        super().__init__()
        self.before, self.inner = nn.Linear(8, 8), Layers()
        self.use_reentrant, self.again = use_reentrant, True

    def forward(self, x):
        x = self.before(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant) if self.again else self.inner(x)


@pytest.fixture
def shard(shard):
    """Shard a bare model that trains in low precision, with eval in full precision."""

    def in_low_precision(bare, strategy="FULL_SHARD", precision=LOW, **spec):
        return shard(bare, strategy, precision=precision, full_precision_in_eval=True, **spec)

    return in_low_precision


@pytest.fixture
def layers(world, shard):
    """Return the sharded layers, and a copy from before."""

    def layers(*arguments, **settings):
        torch.manual_seed(world.seed)
        bare = Layers().to(world.device)
        before = copy.deepcopy(bare)
        return shard(bare, *arguments, **settings), before

    return layers


@pytest.fixture
def batch(batches):
    """Return the batch of a step, 0 if none is given."""
    return batches(lambda generator: torch.randn(4, 8, generator=generator))


def run(bare, x, dtype):
    """Return what the unsharded `bare` gives when parameters, buffers and input are in `dtype`."""
    state = {**dict(bare.named_parameters()), **dict(bare.named_buffers())}
    return functional_call(bare, {name: tensor.to(dtype) for name, tensor in state.items()}, x.to(dtype))


def loss(output):
    return output.float().square().sum()


def mean_gradients(world, bare, output, reduced):
    """Return the mean over ranks of the gradients of `output`, in fp32 but rounded to `reduced`."""
    names, parameters = zip(*bare.named_parameters(), strict=True)
    own = torch.autograd.grad(loss(output), parameters, retain_graph=True)
    first, second = world.gather([gradient.cpu() for gradient in own])
    mean = [((a + b) / 2).to(reduced).float() for a, b in zip(first, second, strict=True)]
    return dict(zip(names, (gradient.to(world.device) for gradient in mean), strict=True))


def expected_gradients(world, bare, x, dtype):
    """Return the mean over ranks of the gradients of `run`, when they have its dtype on the wire."""
    return mean_gradients(world, bare, run(bare, x, dtype), dtype)


@pytest.mark.parametrize("cast_forward_inputs", [False, True])
def test_nothing_is_cast_in_eval_and_outputs_have_every_bit(
    world, engine, shard, batch, strategy, use_orig_params, cast_forward_inputs
):
    """pytorch#103862: inputs were cast in eval although parameters were not."""
    precision = Precision(BF16, buffer_dtype=BF16, cast_forward_inputs=cast_forward_inputs)
    settings = {"precision": precision, "use_orig_params": use_orig_params}
    bare = Layers().to(world.device)
    reference, log = copy.deepcopy(bare), ForwardDtypes(bare)
    model = shard(bare, strategy, sync_module_states=True, **settings)
    reference.load_state_dict(engine.full_parameters(model), strict=False)
    engine.backward(model, loss(model(batch())))  # now buffers are cast
    with log, CollectivesLog() as sent:
        output = model.eval()(batch(1))
    for name in ("0", "1", "2"):
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {F32}
    assert torch.equal(output, reference(batch(1)))
    if offers(engine, Capability.TRAFFIC):
        assert {entry.dtype for entry in engine.traffic(sent).gathers} <= {F32}


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("in_one", [False, True], ids=["two", "one"])
def test_backwards_of_both_modes_find_what_their_forwards_used(
    world, engine, batch, layers, strategy, first, in_one
):
    model, bare = layers(strategy)
    losses = {}
    for step, train in enumerate([first == "train", first == "eval"]):
        losses[train] = loss(model.train(train)(batch(step)))
    if in_one:
        engine.backward(model, sum(losses.values()))
    else:
        engine.backward(model, losses[True])
        engine.backward(model, losses[False])
    steps = (0, 1) if first == "train" else (1, 0)
    low = expected_gradients(world, bare, batch(steps[0]), BF16)
    full = expected_gradients(world, bare, batch(steps[1]), F32)
    assert_named_close(engine.full_gradients(model), {n: low[n] + full[n] for n in low}, EXACT)
    if offers(engine, Capability.GROUPS):
        assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}


@pytest.mark.parametrize("backward_prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.inside
def test_an_evaluation_between_a_forward_and_its_backward(
    world, engine, batch, layers, strategy, backward_prefetch
):
    model, bare = layers(strategy, backward_prefetch=backward_prefetch)
    trained = loss(model(batch()))
    with torch.no_grad():
        evaluated = model.eval()(batch(1))
        assert torch.equal(evaluated, bare(batch(1)))
    with CollectivesLog() as log:
        engine.backward(model, trained)  # in eval still
    traffic = engine.traffic(log)
    assert {entry.dtype for entry in (*traffic.gathers, *traffic.reductions)} == {BF16}
    assert len(traffic.gathers) == (0 if strategy == "NO_SHARD" else 3)
    expected = expected_gradients(world, bare, batch(), BF16)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@pytest.mark.parametrize("backward_prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
@pytest.mark.inside
def test_prefetch_gathers_in_the_dtype_of_the_mode(engine, batch, layers, backward_prefetch):
    model, _ = layers(forward_prefetch=True, backward_prefetch=backward_prefetch)
    engine.backward(model, loss(model(batch())))
    trained = loss(model(batch()))
    with CollectivesLog() as log:
        model.eval()
        engine.backward(model, trained)
        model(batch())
    assert [entry.dtype for entry in engine.traffic(log).gathers] == [BF16] * 3 + [F32] * 3


class Normed(nn.Module):
    """A norm that looks whether it has its own parameters after its forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.found = nn.BatchNorm1d(8), []

    def forward(self, x):
        before = self.norm.weight
        x = self.norm(x)
        self.found.append(self.norm.weight is before)
        return x


@pytest.mark.filterwarnings("ignore:(?s).*BatchNorm1d:UserWarning")
def test_a_norm_has_the_parameters_of_each_mode(shard, batch):
    bare = Normed()
    model = shard(bare, precision=Precision(BF16))
    for train in (True, False):
        model.train(train)(batch())
    assert bare.found == [True, True]


@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_training_continues_with_the_same_values_after_eval(
    world, engine, batch, layers, strategy, forward_prefetch
):
    model, bare = layers(strategy, forward_prefetch=forward_prefetch)
    for _ in range(2):
        output = model.train()(batch())
        assert torch.equal(output, run(bare, batch(), BF16))
        engine.backward(model, loss(output))
        expected = expected_gradients(world, bare, batch(), BF16)
        assert_named_close(engine.full_gradients(model), expected, EXACT)
        assert_buffer_dtypes(model, BF16)
        model.zero_grad()
        model.eval()(batch(1))


def test_a_changed_buffer_keeps_the_change_through_both_modes(engine, batch, layers):
    model, _ = layers()
    shift = torch.full((8,), THIRD)
    model(batch())
    engine.unwrapped(model)[1].shift.add_(1)
    shift = shift.to(BF16) + 1
    model.eval()(batch())
    assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), shift.float())
    engine.unwrapped(model)[1].shift.mul_(THIRD)
    shift = shift.float() * THIRD
    for train, dtype in ((True, BF16), (False, F32)):
        model.train(train)(batch())
        assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), shift.to(dtype))


def test_buffers_return_to_the_dtype_the_model_was_converted_to(world, engine, batch, layers):
    model, _ = layers()
    model(batch())
    model.to(world.device).eval()(batch())
    assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), torch.full((8,), THIRD))
    engine.unwrapped(model)[1].shift.fill_(0.5)  # which bf16 can hold
    model.train()(batch())
    assert model.double().eval()(batch().double()).dtype == F64
    assert_buffer_dtypes(model, F64)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_without_autograd_leaves_a_model_that_trains(world, engine, batch, layers, strategy, mode):
    model, bare = layers(strategy)
    with mode():
        assert torch.equal(model.eval()(batch()), bare(batch()))
        model.train()(batch())  # casts the buffers
    for layer in engine.unwrapped(model):
        layer.shift.mul_(1)  # as the running statistics of a batch norm are
    for train, dtype in ((False, F32), (True, BF16)):
        engine.backward(model, loss(model.train(train)(batch())))
        assert_named_close(
            engine.full_gradients(model), expected_gradients(world, bare, batch(), dtype), EXACT
        )
        model.zero_grad()


@pytest.fixture(params=[False, True], ids=["", "reentrant"])
def recomputed(world, shard, strategy, request):
    """Return the sharded model, a log of its dtypes, and a copy that recomputes nothing."""
    torch.manual_seed(world.seed)
    bare = Recomputed(use_reentrant=request.param).to(world.device)
    reference, log = copy.deepcopy(bare), ForwardDtypes(bare)
    reference.again = False
    return shard(bare, strategy), log, reference


def test_recomputation_in_eval_is_in_full_precision(world, engine, batch, recomputed):
    model, log, reference = recomputed
    model(batch())
    with log:
        engine.backward(model, loss(model.eval()(batch(1))))
    for name in ("inner.0", "inner.1", "inner.2"):
        assert [call.in_backward for call in log.calls(name)] == [False, True]
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {F32}
    expected = expected_gradients(world, reference, batch(1), F32)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


def test_recomputation_after_an_evaluation_is_in_low_precision(world, engine, batch, recomputed):
    model, log, reference = recomputed
    trained = loss(model(batch()))
    model.eval()(batch(1))
    model.train()
    with log:
        engine.backward(model, trained)
    for name in ("inner.0", "inner.1", "inner.2"):
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {BF16}
    expected = expected_gradients(world, reference, batch(), BF16)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@pytest.mark.inside
def test_a_child_in_eval_has_full_precision_in_a_training_model(
    world, engine, batch, layers, strategy, use_orig_params
):
    model, bare = layers(strategy, use_orig_params=use_orig_params)
    engine.unwrapped(model)[2].eval()
    dtypes = [(group.compute_dtype, group.reduce_dtype) for group in engine.groups(model)]
    assert dtypes == [(BF16, BF16), (BF16, BF16), (F32, F32)]
    with ForwardDtypes(engine.unwrapped(model)) as log, CollectivesLog() as sent:
        output = model(batch())
        engine.backward(model, loss(output))
    half = run(bare[1], run(bare[0], batch(), BF16), BF16)
    reference = bare[2](half.float()).to(BF16)
    assert torch.equal(output, reference)
    assert [log.inputs(name) for name in "012"] == [{BF16}, {BF16}, {F32}]
    assert [log.buffers(name) for name in "012"] == [{BF16}, {BF16}, {F32}]
    reductions = engine.traffic(sent).reductions
    assert Counter(entry.dtype for entry in reductions) == Counter({BF16: 2, F32: 1})
    low, full = (mean_gradients(world, bare, reference, dtype) for dtype in (BF16, F32))
    expected = {name: (full if name.startswith("2.") else low)[name] for name in low}
    assert_named_close(engine.full_gradients(model), expected, EXACT)


def test_a_child_that_is_back_in_training_gives_low_precision_again(world, shard, batch):
    """In eval it gives what it was given, which is fp32 where the root casts nothing."""
    precision = Precision(BF16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    bare = nn.Sequential(nn.Linear(8, 8).to(world.device))
    model = shard(bare, units=("0",), precision=precision)
    outputs = []
    for training in (True, False, True):
        bare[0].train(training)
        outputs.append(model(batch()).dtype)
    assert outputs == [BF16, F32, BF16]


@pytest.mark.inside
def test_gradients_are_kept_in_the_dtype_of_their_forwards_mode(engine, batch, layers, strategy):
    precision = Precision(BF16, F16, BF16, keep_low_precision_grads=True)
    model, _ = layers(strategy, precision)
    for train, dtype in ((True, F16), (False, F32)):
        output = model.train(train)(batch())
        model.train(not train)
        engine.backward(model, loss(output))
        assert {group.gradient_dtype for group in engine.groups(model)} == {dtype}
        model.zero_grad()


@pytest.mark.parametrize("last", ["train", "eval"])
def test_gradients_of_both_modes_add_up_over_no_sync(world, engine, batch, layers, strategy, last):
    model, bare = layers(strategy, Precision(BF16, F32, BF16))
    with engine.no_sync(model):
        engine.backward(model, loss(model.train(last == "eval")(batch())))
    engine.backward(model, loss(model.train(last == "train")(batch())))
    low, full = (mean_gradients(world, bare, run(bare, batch(), dtype), F32) for dtype in (BF16, F32))
    expected = {name: low[name] + full[name] for name in low}
    assert_named_close(engine.full_gradients(model), expected)  # here the sum is made before the mean


@pytest.mark.inside
def test_a_group_prefetched_for_training_is_regathered_for_eval(engine, shard, batch):
    bare = Layers()
    last, log, seen = bare[2], ForwardDtypes(bare), []
    model = shard(bare, forward_prefetch=True)

    def switch(*_):
        seen.append((engine.groups(model)[2].state.name, last.training))
        last.train(not last.training)

    bare[1].register_forward_hook(switch)
    for _ in range(3):
        with log:
            model(batch())
    assert seen == [("SHARDED", True), ("PREFETCHED", False), ("PREFETCHED", True)]
    assert [call.parameters["weight"] for call in log.calls("2")] == [F32, BF16, F32]
    assert [call.buffers["shift"] for call in log.calls("2")] == [F32, BF16, F32]
