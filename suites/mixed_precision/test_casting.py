"""Dtypes of parameters, buffers and arguments: inside forward, between steps, and in saved state."""

import copy
import dataclasses
import weakref
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.assertions import assert_buffer_dtypes, assert_gradient_dtypes, assert_parameter_dtypes
from lockstep.conformance import Capability, Precision, offers, require
from lockstep.conformance.models import KnownGradient
from lockstep.recorders import ForwardDtypes
from lockstep.recorders.tensors import named_tensors

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MIXED = Precision(BF16, buffer_dtype=F16)
PRECISIONS = {"precision": [MIXED, Precision(BF16)]}


class Shifted(nn.Linear):
    """A linear layer with a buffer that is added, one of integers, and one that is not saved."""

    def __init__(self, shift=F32):
        super().__init__(8, 8)
        self.register_buffer("shift", torch.full((8,), 1 / 3, dtype=shift))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)

    def forward(self, x):
        return super().forward(x) + self.shift.to(x.dtype)


class Layers(nn.Sequential):
    """A unit, a layer of the root between, and a unit again; they start with buffers of different dtypes."""

    units = ("0", "2")

    def __init__(self):
        super().__init__(Shifted(F32), Shifted(F64), Shifted(F32))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.basic(6)
def test_every_module_computes_in_the_configured_dtypes(
    engine, shard, batch, run_subtests, strategy, use_orig_params, train
):
    """pytorch#143900: buffer_dtype had no effect."""

    def check(precision):
        bare, gradients = Layers(), []
        log = ForwardDtypes(bare)

        def watch(layer, *_):
            layer.weight.register_hook(lambda gradient: gradients.append(gradient.dtype))

        bare[1].register_forward_hook(watch)
        model = shard(bare, strategy, precision=precision, use_orig_params=use_orig_params)
        with log:
            engine.backward(model, model.train(train)(batch()).sum())
        assert gradients == [BF16]
        for layer in ("0", "1", "2"):
            assert (log.inputs(layer), log.parameters(layer)) == ({BF16}, {BF16})
        assert_parameter_dtypes(model, F32)
        assert_gradient_dtypes(model, F32)
        if precision.buffer_dtype:
            assert log.buffers("0") == log.buffers("1") == log.buffers("2") == {F16}
            assert_buffer_dtypes(model, F16)

    run_subtests(PRECISIONS, check)


@dataclasses.dataclass
class Request:
    value: object


@dataclasses.dataclass(frozen=True)
class Fixed:
    value: object


class Pair(NamedTuple):
    """A tuple that is no PackedSequence, although it has one of its names."""

    batch_sizes: object
    second: object = "second"


@dataclasses.dataclass
class Late:
    value: object
    more: object = dataclasses.field(init=False)


class Single(Pair):
    """A named tuple with a constructor of its own."""

    def __new__(cls, first):
        return super().__new__(cls, first, "second")


class Row(tuple):
    """A tuple of another class."""

    __slots__ = ()


class Rows(list):
    """A list of another class."""


class Table(dict):
    """A dict of another class."""


class Passing(nn.Module):
    """A module that passes what it is given to `below`, and keeps it."""

    def __init__(self, below):
        super().__init__()
        self.below = below

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.below(*args, **kwargs)


class Reading(Passing):
    """A layer that looks for its input in what it is given."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8))

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.below(next(iter(named_tensors(args).values())))


NESTED = {
    "tuple": lambda x: (x,),
    "list": lambda x: [x],
    "dict": lambda x: {"x": x},
    "namedtuple": Pair,
    "dataclass": Request,
    "frozen dataclass": Fixed,
}
OF_ANOTHER_CLASS = {
    "row": lambda x: Row((x,)),
    "rows": lambda x: Rows([x]),
    "table": lambda x: Table(x=x),
    "single": Single,
}


def check_nested(world, engine, shard, batch, outer, inner, units):
    bare = Passing(Reading())
    log = ForwardDtypes(bare)
    precision = Precision(BF16, cast_forward_inputs=bool(units), cast_root_forward_inputs=not units)
    model = shard(bare, units=units, precision=precision)
    deep = outer([NESTED[inner](batch()), torch.arange(2, device=world.device)])
    with log:
        engine.backward(model, model(deep, mask=(batch().double(),)).sum())
    (call,) = log.calls("below")
    assert list(call.inputs.values()) == [BF16, torch.int64, BF16]
    assert type(bare.below.args[0]) is type(deep)
    assert next(iter(named_tensors(deep).values())).dtype == F32  # the caller's


UNITS = [(), ("below",)]
"""The casting one is the root, or below it."""


@pytest.mark.parametrize("outer", NESTED)
def test_floating_point_arguments_are_cast_wherever_they_lie(
    world, engine, shard, batch, run_subtests, outer
):
    check = partial(check_nested, world, engine, shard, batch, NESTED[outer])
    run_subtests({"inner": list(NESTED), "units": UNITS}, check)


@pytest.mark.parametrize("outer", OF_ANOTHER_CLASS)
def test_floating_point_arguments_are_cast_in_containers_of_another_class(
    world, engine, shard, batch, run_subtests, outer
):
    check = partial(check_nested, world, engine, shard, batch, OF_ANOTHER_CLASS[outer])
    run_subtests({"inner": list(NESTED), "units": UNITS}, check)


class Picking(Passing):
    """A layer whose input is an attribute of what it is given."""

    def __init__(self, name):
        super().__init__(nn.Linear(8, 8))
        self.name = name

    def forward(self, given):
        self.given = given
        return self.below(getattr(given, self.name))


def test_a_packed_sequence_is_cast(shard, batch):
    packed = pack_sequence([batch(), batch()[:2]])
    bare = Picking("data")
    model = shard(bare, precision=Precision(BF16, cast_root_forward_inputs=True))
    assert model(packed).dtype == BF16
    assert isinstance(bare.given, PackedSequence)
    assert torch.equal(bare.given.data, packed.data.to(BF16))
    assert bare.given.batch_sizes.tolist() == [2, 2, 1, 1]
    assert packed.data.dtype == F32


def test_a_field_that_is_not_set_stays_so(shard, batch):
    bare, late = Picking("value"), Late(batch())
    model = shard(bare, precision=Precision(BF16, cast_root_forward_inputs=True))
    assert model(late).dtype == BF16
    assert (type(bare.given), hasattr(bare.given, "more")) == (Late, False)
    assert late.value.dtype == F32


@pytest.mark.parametrize("units", [(), ("below",)], ids=["root", "below"])
def test_arguments_without_floating_point_stay_the_same_objects(world, shard, batch, units):
    bare = Passing(Reading())
    precision = Precision(BF16, cast_forward_inputs=True)
    model = shard(bare, units=units, precision=precision)
    ones = torch.ones(2, device=world.device)
    kept = [ones.to(dtype) for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, BF16)]
    kept += ["text", None, 1.5, object(), [1, 2], {"key": ones.int()}, Request("text"), Pair(3), nn.ReLU()]
    model(batch(), kept, named=kept, more=(*kept, ones))
    _, first = bare.below.args
    assert first is kept
    assert bare.below.kwargs["named"] is kept
    assert all(found is one for found, one in zip(bare.below.kwargs["more"], kept, strict=False))
    assert bare.below.kwargs["more"][-1].dtype == BF16


@pytest.mark.parametrize("root", [False, True], ids=["", "cast_root"])
@pytest.mark.parametrize("below", [False, True], ids=["", "cast_below"])
def test_the_root_and_units_below_it_cast_as_configured(shard, batch, root, below):
    bare = Passing(Passing(Reading()))
    log = ForwardDtypes(bare)
    precision = Precision(BF16, cast_forward_inputs=below, cast_root_forward_inputs=root)
    model = shard(bare, units=("below",), precision=precision)
    with log, nullcontext() if root or below else pytest.raises(RuntimeError, match="dtype"):
        model(batch())
    assert log.inputs("") == {BF16 if root else F32}
    assert log.inputs("below") == log.inputs("below.below") == {BF16 if root or below else F32}


def test_without_param_dtype_no_argument_is_cast(engine, shard, batch, strategy):
    bare = Layers()
    log = ForwardDtypes(bare)
    precision = Precision(None, BF16, F16, cast_forward_inputs=True)
    model = shard(bare, strategy, precision=precision)
    with log, pytest.raises(RuntimeError, match="dtype"):
        model(batch().double())
    assert log.inputs("0") == {F64}
    with log:
        engine.backward(model, model(batch()).sum())
    assert log.inputs("2") == log.parameters("2") == {F32}


def test_only_floating_point_buffers_are_cast_and_on_request(shard, batch, strategy):
    bare = Layers()
    log = ForwardDtypes(bare)
    model = shard(bare, strategy, precision=Precision(BF16))
    with log:
        model(batch())
    assert [log.buffers(layer) for layer in ("0", "1", "2")] == [{F32}, {F32, F64}, {F32}]
    assert {call.buffers["steps"] for layer in ("0", "1", "2") for call in log.calls(layer)} == {torch.int64}


class Reads(nn.Module):
    """Two layers, of which the second one's buffer is read before any."""

    units = ("first", "second")

    def __init__(self):
        super().__init__()
        self.first, self.second, self.seen = nn.Linear(8, 8), Shifted(F32), []

    def forward(self, x):
        self.seen.append((self.second.shift.dtype, self.second.shift.device))
        return self.second(self.first(x + self.second.shift.to(x.dtype)))


def test_a_buffer_is_cast_before_another_module_reads_it(world, shard, batch, strategy):
    """In the first forward, too."""
    bare = Reads()
    model = shard(bare, strategy, precision=Precision(BF16, buffer_dtype=BF16))
    for _ in range(2):
        model(batch())
    assert [dtype for dtype, _ in bare.seen] == [BF16, BF16]
    assert {device.type for _, device in bare.seen} == {world.device.type}


def test_a_buffer_may_be_given_up(world, engine, shard, batch, strategy):
    """One that is None by then is neither cast nor saved."""

    class Optional(Shifted):
        def forward(self, x):
            return nn.functional.linear(x, self.weight) + (0 if self.shift is None else self.shift)

    bare = Optional(F32)
    model = shard(bare, strategy, precision=Precision(BF16, buffer_dtype=BF16))
    outputs = [model(batch())]
    bare.shift = None
    outputs.append(model(batch()))
    assert [output.dtype for output in outputs] == [BF16] * 2
    engine.backward(model, outputs[1].sum())
    assert not any("shift" in name for name in engine.full_state(model))


def test_a_cast_of_a_buffer_is_in_no_graph(engine, shard, batch):
    """A second backward would find what the first one has freed."""
    bare = Shifted()
    bare.shift.requires_grad_()
    model = shard(bare, precision=MIXED)
    for _ in range(2):
        engine.backward(model, model(batch()).sum())
    assert (bare.shift.dtype, bare.shift.grad_fn) == (F16, None)


def test_ignored_modules_keep_parameters_and_buffers_as_they_are(
    world, engine, shard, batch, run_subtests, strategy, use_orig_params
):
    """pytorch#77439: the buffers of ignored modules were cast."""

    def check(**settings):
        bare = Layers()
        ignored = bare[1]
        log = ForwardDtypes(bare)
        ignored.shift.fill_(world.rank)
        model = shard(
            bare, strategy, ignored=("1",), units=("0",), use_orig_params=use_orig_params, **settings
        )
        with log, pytest.raises(RuntimeError, match="dtype"):
            model(batch())
        assert (log.parameters("1"), log.buffers("1")) == ({F32}, {F32, F64})
        assert (ignored.weight.shape, ignored.shift[0].item()) == ((8, 8), world.rank)
        if offers(engine, Capability.GROUPS):
            inside = [name for group in engine.groups(model) for name in group.parameters]
            assert not any(name.startswith("1.") for name in inside)

    run_subtests({**PRECISIONS, "sync_module_states": [True, False]}, check)


def test_what_an_ignored_module_is_given_is_not_cast(world, engine, shard, batch, run_subtests, strategy):
    class Root(Passing):
        def forward(self, x):
            return self.below(x) + self.alone(x.new_ones(8, dtype=F64))

    def check(buffer_dtype):
        bare = Root(nn.Linear(8, 8))
        bare.alone = Shifted(F64).double()
        log, alone = ForwardDtypes(bare), copy.deepcopy(bare.alone).to(world.device)
        precision = Precision(BF16, buffer_dtype=buffer_dtype, cast_forward_inputs=True)
        outputs = []
        bare.alone.register_forward_hook(lambda *call: outputs.append(call[-1]))
        model = shard(bare, strategy, ignored=("alone",), units=("below",), precision=precision)
        with log:
            engine.backward(model, model(batch()).sum())
        assert log.inputs("alone") == log.parameters("alone") == log.buffers("alone") == {F64}
        assert torch.equal(outputs[0], alone(torch.ones(8, dtype=F64, device=world.device)))
        assert (log.inputs("below"), bare.alone.weight.grad.dtype) == ({BF16}, F64)

    run_subtests({"buffer_dtype": [F16, None]}, check)


def test_saved_state_has_original_dtypes_and_every_parameter_bit(
    engine, shard, batch, run_subtests, strategy, use_orig_params, offload
):
    """fairscale#704: buffers were saved in half precision."""

    def check(precision):
        bare = Layers()
        expected = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
        model = shard(bare, strategy, precision=precision, use_orig_params=use_orig_params, offload=offload)
        engine.backward(model, model(batch()).sum())
        saved = engine.full_state(model)
        assert {n: t.dtype for n, t in saved.items()} == {n: t.dtype for n, t in expected.items()}
        for name in expected:
            if name.endswith(("weight", "bias")):
                assert torch.equal(saved[name].cpu(), expected[name]), name
        if precision.buffer_dtype:
            assert_buffer_dtypes(model, F16)

    run_subtests(PRECISIONS, check)


def test_saved_buffers_are_what_was_computed_with(world, engine, shard, batch, strategy):
    """A cast cannot be undone: the dtype is the original one, the value the rounded one."""
    bare = Layers()
    original = weakref.ref(bare[0].shift)
    model = shard(bare, strategy, precision=MIXED)
    model(batch())
    assert original() is None or original() is bare[0].shift  # nothing keeps both
    saved, third = engine.full_state(model), torch.full((8,), 1 / 3, dtype=F16, device=world.device)
    assert torch.equal(saved["0.shift"], third.float())
    assert torch.equal(saved["1.shift"], third.double())


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "raised_late"),
    [("FULL_SHARD", False, False), ("SHARD_GRAD_OP", True, True)],
    ids=["fp32", "raised_late"],
)
def test_steps_below_the_resolution_of_the_compute_dtype_add_up(
    world, engine, shard, strategy, use_orig_params, raised_late
):
    """accelerate#3979: the optimizer worked on bf16, as the model was loaded, although fp32 was requested."""
    bare = KnownGradient(3).to(BF16 if raised_late else F32)
    bare.weight.data.fill_(1)
    model = shard(bare, strategy, precision=Precision(BF16), use_orig_params=use_orig_params)
    model = model.float()
    optimizer = engine.optimizer(model, partial(torch.optim.SGD, lr=2**-14))  # bf16 has steps of 2^-8 below 1
    for _ in range(100):
        engine.backward(model, model(torch.tensor(2.0 * world.rank, device=world.device)))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.full_parameters(model)["weight"].tolist() == [1 - 100 * 2**-14] * 3


def test_the_optimizers_state_is_in_full_precision(
    engine, shard, batch, run_subtests, strategy, use_orig_params
):
    require(engine, Capability.OPTIMIZER_STATE)

    def check(precision):
        model = shard(Layers(), strategy, precision=precision, use_orig_params=use_orig_params)
        optimizer = engine.optimizer(model, partial(torch.optim.Adam, lr=0.1))
        engine.backward(model, model(batch()).sum())
        optimizer.step()
        held = [t for state in optimizer.state.values() for t in state.values()]
        assert {t.dtype for t in held} == {F32}

    run_subtests(PRECISIONS, check)
