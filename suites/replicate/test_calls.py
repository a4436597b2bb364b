"""Calls of modules: casts of arguments and outputs, buffers, transforms, eval, optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import KnownGradient, NestedWrappedModule
from lockstep.recorders import ForwardDtypes, named_tensors

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Generating(nn.Sequential):
    """Two layers, and a second way to call them."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))

    def generate(self, x):
        return 2 * self(x)

    def skip(self, x):
        return nn.functional.linear(x, self[1].weight)


class Echo(nn.Linear):
    """A layer that returns its arguments after its own output."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("offset", torch.full((8,), 1 + 2**-12))
        self.register_buffer("precise", torch.ones(8, dtype=F64))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x, *args, **kwargs):
        return super().forward(x), args, kwargs


def arguments(world):
    ones = torch.ones(2, 8, device=world.device)
    nested = {"half": ones.to(F16), "ids": [torch.arange(2, device=world.device), (ones.double(),)]}
    return (ones, nested), {"mask": ones.bool(), "name": "x", "more": [ones]}


@pytest.mark.parametrize("cast", [True, False], ids=["cast", "not_cast"])
def test_floating_arguments_are_cast_inside_containers(world, front, cast):
    model = Echo().to(world.device, BF16 if not cast else F32)
    front(model, **front.precision(BF16, cast_forward_inputs=cast))
    args, kwargs = arguments(world)
    if not cast:
        args = (args[0].to(BF16), args[1])
    output, (nested,), more = model(*args, **kwargs)
    given, seen = named_tensors([args[1], kwargs]), named_tensors([nested, more])
    for name, tensor in given.items():
        dtype = BF16 if cast and tensor.is_floating_point() else tensor.dtype
        assert_named_close({name: seen[name]}, {name: tensor.to(dtype)}, EXACT)
    assert (output.dtype, more["name"], nested["ids"][1].__class__) == (BF16, "x", tuple)


def test_floating_outputs_are_cast_to_the_output_dtype(world, front):
    model = Echo().to(world.device)
    front(model, **front.precision(BF16, output_dtype=F32))
    args, kwargs = arguments(world)
    found = named_tensors(list(model(*args, **kwargs)))
    assert {name: t.dtype for name, t in found.items() if t.is_floating_point()} == dict.fromkeys(
        ("0", "1.0.half", "1.0.ids.1.0", "2.more.0"), F32
    )
    assert found["1.0.ids.0"].dtype == torch.int64
    assert found["2.mask"].dtype == torch.bool


def test_buffers_are_not_touched(world, front):
    model = Echo().to(world.device)
    before = {name: (b, b.clone()) for name, b in model.named_buffers()}
    front(model, **front.precision(F16, F32))
    dtypes = ForwardDtypes(model)
    with dtypes:
        model(torch.ones(2, 8, device=world.device))[0].sum().backward()
    assert dtypes.buffers("") == {F32, F64}
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert_named_close({name: buffer}, {name: before[name][1]}, EXACT)


def test_an_inputs_gradient_has_the_inputs_dtype(world, front):
    model = nn.Linear(8, 8, bias=False).to(world.device)
    with torch.no_grad():
        model.weight.fill_(0.5)
    front(model, **front.precision(BF16))
    x = torch.ones(2, 8, device=world.device, requires_grad=True)
    model(x).sum().backward()
    assert_named_close({"x": x.grad}, {"x": torch.full((2, 8), 4.0)}, EXACT)


def test_a_sharded_module_keeps_its_own_class(world, engine, front):
    model = front(NestedWrappedModule().to(world.device))
    assert isinstance(model, engine.composable.FSDPModule)
    assert isinstance(model, NestedWrappedModule)
    assert type(model).__name__.endswith("NestedWrappedModule")
    assert list(model.state_dict()) == list(NestedWrappedModule().state_dict())


@pytest.mark.parametrize("policy", [(), (BF16,)], ids=["fp32", "bf16"])
def test_eval_gives_what_training_gave_and_sees_the_last_step(world, front, step, policy):
    model = front.shard(NestedWrappedModule(), **front.precision(*policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8, device=world.device)
    outputs = []
    for number in range(2):
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            outputs += [model.eval()(x), model(x)]
        outputs.append(model.train()(x).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    assert torch.equal(outputs[3], outputs[5])
    assert not torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_an_optimizer_built_after_a_forward_moves_the_weights(world, front, step, grad):
    """pytorch#149205: it was given what forward had gathered, and moved nothing."""
    model = front.shard(NestedWrappedModule())
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    with torch.set_grad_enabled(grad):
        model(torch.ones(2, 8, device=world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step(model)
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    optimizer.step()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert_named_close(found, {name: before[name] - gradients[name] for name in before})
    assert all(gradient.any() for gradient in gradients.values())


# DTensor has no fused SGD.
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        (torch.optim.SGD, "foreach"),
        *((kind, way) for kind in (torch.optim.Adam, torch.optim.AdamW) for way in ("foreach", "fused")),
    ],
)
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_each_optimizer_steps_as_on_an_unsharded_model(world, front, kind, way, on):
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    optimizers = [kind(m.parameters(), lr=0.01, **{way: on}) for m in (reference, model)]
    for number in range(2):
        x = torch.ones(2, 8, device=world.device) * (number + 1)
        for module, optimizer in zip((reference, model), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    assert_sharded_parity(model, reference)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not_reentrant"])
def test_recomputation_under_checkpointing_sees_the_same_dtypes(world, front, use_reentrant):
    """pytorch#148831: casts were lost in the second forward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())).to(world.device)
    dtypes = ForwardDtypes(model)
    front(model[1], **front.precision(F16, F32))
    front(model, **front.precision(BF16, F32))
    x = torch.ones(2, 8, device=world.device, requires_grad=True)
    with dtypes:
        checkpoint(model, x, use_reentrant=use_reentrant).float().sum().backward()
    for name, dtype in {"0": BF16, "1": F16, "1.0": F16}.items():
        first, second = dtypes.calls(name)
        assert (first.in_backward, second.in_backward) == (False, True)
        assert first.inputs == second.inputs == {"0": dtype}
        assert first.parameters == second.parameters
    assert {p.grad.dtype for p in model.parameters()} == {F32}


def test_an_average_of_a_model_follows_its_steps(world, front, step):
    model = front.shard(NestedWrappedModule())
    reference = copy.deepcopy(NestedWrappedModule()).to(world.device)
    with torch.no_grad():
        for p, q in zip(reference.parameters(), model.parameters(), strict=True):
            p.copy_(q.full_tensor())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    x = torch.ones(2, 8, device=world.device)
    assert torch.equal(average(x), model(x))
    expected = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                p.copy_(q.full_tensor())
        average.update_parameters(model)
        expected.update_parameters(reference)
    assert_sharded_parity(average.module, expected.module)
    torch.testing.assert_close(average(x), expected(x))
    assert not any(p.grad is not None for p in average.parameters())


def test_a_module_can_be_mapped_over_a_batch(world, front):
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    x = torch.arange(16.0, device=world.device).view(2, 8) + world.rank
    torch.testing.assert_close(torch.vmap(model)(x), reference(x))


# torch makes its forward-mode formulas with torch.jit.script, which it deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_module_has_a_directional_derivative(world, front):
    reference = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(world.device)
    model = front.shard(copy.deepcopy(reference), ("0",))
    x, direction = (
        torch.arange(16.0, device=world.device).view(2, 8) / 16,
        torch.ones(2, 8, device=world.device),
    )
    found, expected = (torch.func.jvp(m, (x,), (direction,)) for m in (model, reference))
    torch.testing.assert_close(found, expected)


def test_parameters_are_plain_tensors_inside_forward(world, front):
    model = front.shard(NestedWrappedModule())
    seen = []

    def note(module, *_):
        weight, own = module.weight, [name for name, _ in module.named_parameters()]
        seen.append((isinstance(weight, DTensor), weight.requires_grad, weight.shape, own))

    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        layer.register_forward_pre_hook(note)
    model(torch.ones(2, 8, device=world.device)).sum().backward()
    shapes = [(4, 8), (16, 4), (16, 16), (4, 16), (8, 4)]
    assert seen == [(False, True, torch.Size(shape), ["weight", "bias"]) for shape in shapes]


@pytest.mark.parametrize("name", ["generate", "skip"])
def test_a_registered_method_gathers_as_forward_does(world, engine, front, name):
    reference = Generating().to(world.device)
    model = front.shard(copy.deepcopy(reference), ("0",))
    engine.composable.register_fsdp_forward_method(model, name)
    x = torch.ones(2, 8, device=world.device)
    outputs = [getattr(module, name)(x) for module in (model, reference)]
    assert_named_close({"output": outputs[0]}, {"output": outputs[1]})
    for output in outputs:
        output.square().sum().backward()
    for n, p in reference.named_parameters():
        found = model.get_parameter(n).grad
        if p.grad is not None:
            assert_named_close({n: found.full_tensor()}, {n: p.grad})
        else:  # of a parameter that was not used, a group with others that were may show zeros
            assert found is None or not found.full_tensor().any()
    assert (reference[1].bias.grad is None) == (name == "skip")


def test_steps_too_small_for_bf16_add_up_in_the_parameters(world, front):
    """huggingface/accelerate#3979: what the optimizer stepped was in low precision after all."""
    bare = KnownGradient(4).to(world.device)
    torch.nn.init.ones_(bare.weight)
    model = front(bare, **front.precision(BF16))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)  # bf16 has no number between 1 and 1 - 2^-8
    for _ in range(64):
        optimizer.zero_grad()
        model(torch.tensor(0.5 + world.rank, device=world.device)).backward()
        optimizer.step()
    assert model.weight.full_tensor().tolist() == [1 - 2.0**-6] * 4
