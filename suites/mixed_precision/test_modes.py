"""Training in low precision and eval in full precision by turns, of one sharded model or of parts of it."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from harness.assertions import Tolerance, assert_buffer_dtypes, assert_named_close, per_rank_batches
from harness.conformance import Precision, ShardSpec
from harness.recorders import CollectivesLog, ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
EXACT = Tolerance(0, 0)
LOW = Precision(BF16, buffer_dtype=BF16)
EVERY_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
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


def shard(world, engine, bare, strategy="FULL_SHARD", precision=LOW, **more):
    spec = ShardSpec(strategy, precision, units=bare.units, full_precision_in_eval=True, **more)
    return engine.shard(bare.to(world.device), spec)


def layers(world, engine, *arguments, **settings):
    """Return the sharded layers, and a copy from before."""
    torch.manual_seed(world.seed)
    bare = Layers().to(world.device)
    before = copy.deepcopy(bare)
    return shard(world, engine, bare, *arguments, **settings), before


def batch(world, step=0):
    make = per_rank_batches(lambda g: torch.randn(4, 8, generator=g), world.seed, world.rank)
    return make(step).to(world.device)


def run(bare, x, dtype):
    """Return what the unsharded ``bare`` gives when parameters, buffers and input are in ``dtype``."""
    state = {**dict(bare.named_parameters()), **dict(bare.named_buffers())}
    return functional_call(bare, {name: tensor.to(dtype) for name, tensor in state.items()}, x.to(dtype))


def loss(output):
    return output.float().square().sum()


def mean_gradients(world, bare, output, reduced):
    """Return the mean over ranks of the gradients of ``output``, in fp32 but rounded to ``reduced``."""
    names, parameters = zip(*bare.named_parameters(), strict=True)
    own = torch.autograd.grad(loss(output), parameters, retain_graph=True)
    first, second = world.gather([gradient.cpu() for gradient in own])
    mean = [((a + b) / 2).to(reduced).float() for a, b in zip(first, second, strict=True)]
    return dict(zip(names, (gradient.to(world.device) for gradient in mean), strict=True))


def expected_gradients(world, bare, x, dtype):
    """Return the mean over ranks of the gradients of `run`, when they have its dtype on the wire."""
    return mean_gradients(world, bare, run(bare, x, dtype), dtype)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("cast_forward_inputs", [False, True])
def test_nothing_is_cast_in_eval_and_outputs_have_every_bit_of_the_unsharded_models(
    world, engine, strategy, use_orig_params, cast_forward_inputs
):
    """pytorch#103862: inputs were cast in eval although parameters were not."""
    precision = Precision(BF16, buffer_dtype=BF16, cast_forward_inputs=cast_forward_inputs)
    settings = {"precision": precision, "use_orig_params": use_orig_params}
    bare = Layers().to(world.device)
    reference, log = copy.deepcopy(bare), ForwardDtypes(bare)
    model = shard(world, engine, bare, strategy, sync_module_states=True, **settings)
    reference.load_state_dict(engine.full_parameters(model), strict=False)
    loss(model(batch(world))).backward()  # now buffers are cast
    with log, CollectivesLog() as sent:
        output = model.eval()(batch(world, 1))
    for name in ("0", "1", "2"):
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {F32}
    assert {entry.dtype for entry in engine.traffic(sent).gathers} <= {F32}
    assert torch.equal(output, reference(batch(world, 1)))


@EVERY_STRATEGY
@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("in_one", [False, True], ids=["two", "one"])
def test_backwards_of_both_modes_find_what_their_forwards_used(world, engine, strategy, first, in_one):
    model, bare = layers(world, engine, strategy)
    losses = {}
    for step, train in enumerate([first == "train", first == "eval"]):
        losses[train] = loss(model.train(train)(batch(world, step)))
    if in_one:
        sum(losses.values()).backward()
    else:
        losses[True].backward()
        losses[False].backward()
    steps = (0, 1) if first == "train" else (1, 0)
    low = expected_gradients(world, bare, batch(world, steps[0]), BF16)
    full = expected_gradients(world, bare, batch(world, steps[1]), F32)
    assert_named_close(engine.full_gradients(model), {n: low[n] + full[n] for n in low}, EXACT)
    assert {(g.state.name, g.gathered_bytes) for g in engine.groups(model)} == {("SHARDED", 0)}


@EVERY_STRATEGY
@pytest.mark.parametrize("backward_prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
def test_an_evaluation_may_come_between_a_forward_and_its_backward(
    world, engine, strategy, backward_prefetch
):
    model, bare = layers(world, engine, strategy, backward_prefetch=backward_prefetch)
    trained = loss(model(batch(world)))
    with torch.no_grad():
        evaluated = model.eval()(batch(world, 1))
        assert torch.equal(evaluated, bare(batch(world, 1)))
    with CollectivesLog() as log:
        trained.backward()  # in eval still
    traffic = engine.traffic(log)
    assert {entry.dtype for entry in (*traffic.gathers, *traffic.reductions)} == {BF16}
    assert len(traffic.gathers) == (0 if strategy == "NO_SHARD" else 3)
    expected = expected_gradients(world, bare, batch(world), BF16)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@pytest.mark.parametrize("backward_prefetch", [None, "BACKWARD_PRE", "BACKWARD_POST"])
def test_what_is_gathered_ahead_has_the_dtype_that_is_needed_also_when_modes_change(
    world, engine, backward_prefetch
):
    model, _ = layers(world, engine, forward_prefetch=True, backward_prefetch=backward_prefetch)
    loss(model(batch(world))).backward()
    trained = loss(model(batch(world)))
    with CollectivesLog() as log:
        model.eval()
        trained.backward()
        model(batch(world))
    assert [entry.dtype for entry in engine.traffic(log).gathers] == [BF16] * 3 + [F32] * 3


@EVERY_STRATEGY
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_training_goes_on_with_the_same_values_after_an_evaluation(world, engine, strategy, forward_prefetch):
    model, bare = layers(world, engine, strategy, forward_prefetch=forward_prefetch)
    for _ in range(2):
        output = model.train()(batch(world))
        assert torch.equal(output, run(bare, batch(world), BF16))
        loss(output).backward()
        expected = expected_gradients(world, bare, batch(world), BF16)
        assert_named_close(engine.full_gradients(model), expected, EXACT)
        assert_buffer_dtypes(model, BF16)
        model.zero_grad()
        model.eval()(batch(world, 1))


def test_a_buffer_that_was_changed_keeps_the_change_through_both_modes(world, engine):
    model, _ = layers(world, engine)
    shift = torch.full((8,), THIRD)
    model(batch(world))
    engine.unwrapped(model)[1].shift.add_(1)
    shift = shift.to(BF16) + 1
    model.eval()(batch(world))
    assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), shift.float())
    engine.unwrapped(model)[1].shift.mul_(THIRD)
    shift = shift.float() * THIRD
    for train, dtype in ((True, BF16), (False, F32)):
        model.train(train)(batch(world))
        assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), shift.to(dtype))


def test_buffers_go_up_to_what_the_model_was_converted_to_meanwhile(world, engine):
    model, _ = layers(world, engine)
    model(batch(world))
    model.to(world.device).eval()(batch(world))
    assert torch.equal(engine.unwrapped(model)[1].shift.cpu(), torch.full((8,), THIRD))
    engine.unwrapped(model)[1].shift.fill_(0.5)  # which bf16 can hold
    model.train()(batch(world))
    assert model.double().eval()(batch(world).double()).dtype == F64
    assert_buffer_dtypes(model, F64)


@EVERY_STRATEGY
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_without_autograd_leaves_a_model_that_trains(world, engine, strategy, mode):
    model, bare = layers(world, engine, strategy)
    with mode():
        assert torch.equal(model.eval()(batch(world)), bare(batch(world)))
        model.train()(batch(world))  # casts the buffers
    for layer in engine.unwrapped(model):
        layer.shift.mul_(1)  # as the running statistics of a batch norm are
    for train, dtype in ((False, F32), (True, BF16)):
        loss(model.train(train)(batch(world))).backward()
        assert_named_close(
            engine.full_gradients(model), expected_gradients(world, bare, batch(world), dtype), EXACT
        )
        model.zero_grad()


def recomputed(world, engine, strategy, use_reentrant):
    """Return the sharded model, a log of its dtypes, and a copy that recomputes nothing."""
    torch.manual_seed(world.seed)
    bare = Recomputed(use_reentrant).to(world.device)
    reference, log = copy.deepcopy(bare), ForwardDtypes(bare)
    reference.again = False
    return shard(world, engine, bare, strategy), log, reference


@EVERY_STRATEGY
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_eval_is_in_full_precision(world, engine, strategy, use_reentrant):
    model, log, reference = recomputed(world, engine, strategy, use_reentrant)
    model(batch(world))
    with log:
        loss(model.eval()(batch(world, 1))).backward()
    for name in ("inner.0", "inner.1", "inner.2"):
        assert [call.in_backward for call in log.calls(name)] == [False, True]
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {F32}
    expected = expected_gradients(world, reference, batch(world, 1), F32)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_in_train_after_an_evaluation_is_in_low_precision(
    world, engine, strategy, use_reentrant
):
    model, log, reference = recomputed(world, engine, strategy, use_reentrant)
    trained = loss(model(batch(world)))
    model.eval()(batch(world, 1))
    model.train()
    with log:
        trained.backward()
    for name in ("inner.0", "inner.1", "inner.2"):
        assert log.inputs(name) == log.parameters(name) == log.buffers(name) == {BF16}
    expected = expected_gradients(world, reference, batch(world), BF16)
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_child_in_eval_has_full_precision_amid_a_model_in_training(
    world, engine, strategy, use_orig_params
):
    model, bare = layers(world, engine, strategy, use_orig_params=use_orig_params)
    engine.unwrapped(model)[2].eval()
    dtypes = [(group.compute_dtype, group.reduce_dtype) for group in engine.groups(model)]
    assert dtypes == [(BF16, BF16), (BF16, BF16), (F32, F32)]
    with ForwardDtypes(engine.unwrapped(model)) as log, CollectivesLog() as sent:
        output = model(batch(world))
        loss(output).backward()
    half = run(bare[1], run(bare[0], batch(world), BF16), BF16)
    reference = bare[2](half.float()).to(BF16)
    assert torch.equal(output, reference)
    assert [log.inputs(name) for name in "012"] == [{BF16}, {BF16}, {F32}]
    assert [log.buffers(name) for name in "012"] == [{BF16}, {BF16}, {F32}]
    reductions = engine.traffic(sent).reductions
    assert Counter(entry.dtype for entry in reductions) == Counter({BF16: 2, F32: 1})
    low, full = (mean_gradients(world, bare, reference, dtype) for dtype in (BF16, F32))
    expected = {name: (full if name.startswith("2.") else low)[name] for name in low}
    assert_named_close(engine.full_gradients(model), expected, EXACT)


@EVERY_STRATEGY
def test_gradients_are_kept_in_the_dtype_of_their_forwards_mode(world, engine, strategy):
    precision = Precision(BF16, F16, BF16, keep_low_precision_grads=True)
    model, _ = layers(world, engine, strategy, precision)
    for train, dtype in ((True, F16), (False, F32)):
        output = model.train(train)(batch(world))
        model.train(not train)
        loss(output).backward()
        assert {group.gradient_dtype for group in engine.groups(model)} == {dtype}
        model.zero_grad()


@EVERY_STRATEGY
@pytest.mark.parametrize("last", ["train", "eval"])
def test_gradients_of_both_modes_add_up_over_no_sync(world, engine, strategy, last):
    model, bare = layers(world, engine, strategy, Precision(BF16, F32, BF16))
    with engine.no_sync(model):
        loss(model.train(last == "eval")(batch(world))).backward()
    loss(model.train(last == "train")(batch(world))).backward()
    low, full = (mean_gradients(world, bare, run(bare, batch(world), dtype), F32) for dtype in (BF16, F32))
    expected = {name: low[name] + full[name] for name in low}
    assert_named_close(engine.full_gradients(model), expected)  # here the sum is made before the mean


def test_a_group_that_was_prefetched_for_training_is_gathered_anew_for_eval(world, engine):
    bare = Layers()
    last, log, seen = bare[2], ForwardDtypes(bare), []
    model = shard(world, engine, bare, forward_prefetch=True)

    def switch(*_):
        seen.append((engine.groups(model)[2].state.name, last.training))
        last.train(not last.training)

    bare[1].register_forward_hook(switch)
    for _ in range(3):
        with log:
            model(batch(world))
    assert seen == [("SHARDED", True), ("PREFETCHED", False), ("PREFETCHED", True)]
    assert [call.parameters["weight"] for call in log.calls("2")] == [F32, BF16, F32]
    assert [call.buffers["shift"] for call in log.calls("2")] == [F32, BF16, F32]
