"""`fully_shard` and `replicate`: refusals, copies, and groups of several modules."""

import copy
import gc
import re

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep import engine
from lockstep.engine import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, replicate

pytestmark = pytest.mark.ranks(2)

FRONTS = pytest.mark.parametrize("front", [fully_shard, replicate])
POLICY = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}


def layers(world, number=2):
    torch.manual_seed(world.seed)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number))).to(world.device)


def integers():
    module = nn.Identity()
    module.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return module


@FRONTS
@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ("a name", TypeError, "expected an nn.Module or a list of them, got str"),
        ([], ValueError, "an empty list has nothing to shard"),
        (nn.ModuleList(), ValueError, "ModuleList has no forward of its own; pass the modules in it"),
        (integers(), ValueError, "'counts' has dtype torch.int64"),
    ],
    ids=["no_module", "empty", "container", "integers"],
)
def test_what_cannot_be_sharded_is_refused(world, front, module, error, message):
    with pytest.raises(error, match=re.escape(message)):
        front(module)


@FRONTS
def test_a_module_that_is_in_the_list_twice_is_refused(world, front):
    model = layers(world)
    with pytest.raises(ValueError, match="a Linear is in the list twice; name it once"):
        front([model[0], model[1], model[0]])


@FRONTS
@pytest.mark.parametrize(
    ("ignored", "message"),
    [
        (nn.Linear(4, 4), "got one Linear; put it into a list"),
        (nn.Linear(4, 4).weight, "got one Parameter; put it into a list"),
        (["0.weight"], "but number 0 is a str"),
    ],
    ids=["module", "parameter", "name"],
)
def test_ignored_params_takes_parameters_only(world, front, ignored, message):
    expected = rf"{front.__name__}: ignored_params: expected a set of parameters, {message}"
    with pytest.raises(TypeError, match=expected):
        front(layers(world), ignored_params=ignored)


@FRONTS
def test_an_optimizer_made_before_sharding_refuses_to_step(world, front):
    model = layers(world)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    front(model)
    model(torch.ones(2, 4, device=world.device)).sum().backward()
    with pytest.raises(RuntimeError, match=r"holds parameters of .*\(Sequential\) as they were.* Make it"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@FRONTS
def test_an_optimizer_of_unsharded_parameters_refuses_to_step(world, front):
    model = front(layers(world))
    model.unshard()
    misled = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device=world.device)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"holds unsharded parameters of .*\(Sequential\), .* between unshard and"
    ):
        misled.step()


@FRONTS
def test_a_model_can_be_collected_while_an_optimizer_steps(world, front):
    dying = [front(layers(world))]
    hook = register_optimizer_step_post_hook(lambda *_: (dying.clear(), gc.collect()))
    model = front(layers(world))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, device=world.device)).sum().backward()
    before = model[1].bias.full_tensor().clone()
    optimizer.step()
    hook.remove()
    torch.testing.assert_close(model[1].bias.full_tensor(), before - 0.2)


@FRONTS
def test_a_slice_is_a_plain_module_of_the_same_layers(world, front):
    model = layers(world, number=3)
    for layer in model:
        front(layer)
    x = torch.ones(2, 4, device=world.device)
    part = front(model)[:2]
    assert type(part) is nn.Sequential
    assert torch.equal(part(x), model[1](model[0](x)))


@FRONTS
def test_a_module_is_sharded_once_and_inner_modules_first(world, front):
    model = layers(world)
    front(model)
    with pytest.raises(ValueError, match=r"FSDPSequential|ReplicateSequential"):
        front(model)
    with pytest.raises(
        ValueError, match=r"Linear is inside \w+\(Sequential\) already.* inner modules before"
    ):
        front(model[0])


@FRONTS
def test_wrapper_and_composable_units_do_not_mix(world, front):
    inner = layers(world)
    front(inner)
    with pytest.raises(ValueError, match=r"'0' \(Linear\) is inside \w+\(Sequential\) already"):
        FullyShardedDataParallel(inner)
    wrapped = nn.Sequential(FullyShardedDataParallel(layers(world), use_orig_params=True))
    with pytest.raises(ValueError, match="already"):
        front(wrapped)


@FRONTS
@pytest.mark.parametrize(
    "setting",
    [
        {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy()},
        {"offload_policy": torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["mp_policy", "offload_policy"],
)
def test_torchs_own_policies_are_refused_by_name(world, front, setting):
    with pytest.raises(
        TypeError, match=f"{next(iter(setting))} must be .* of lockstep.engine, got .* of torch"
    ):
        front(layers(world), **setting)


@FRONTS
def test_a_mesh_of_another_type_or_too_many_axes_is_refused(world, front):
    ranks = torch.arange(2).view(1, 2, 1)
    with pytest.raises(ValueError, match=r"mesh must have one axis.*, got 3"):
        front(layers(world), mesh=world.mesh(1, 2, 1))
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got Tensor"):
        front(layers(world), mesh=ranks)


@pytest.mark.parametrize("number", [0, 3, -1, "half"])
def test_resharding_to_a_wrong_number_of_ranks_is_refused(world, number):
    with pytest.raises(ValueError, match=f"reshard_after_forward: {number!r} is no number of ranks"):
        fully_shard(layers(world), reshard_after_forward=number)


def test_a_placement_that_a_parameter_cannot_have_is_refused(world):
    with pytest.raises(ValueError, match=r"'0\.bias' has 1 dims, but shard_placement_fn wants Shard"):
        fully_shard(layers(world), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(TypeError, match=r"must return None or Shard\(dim\), got 1"):
        fully_shard(layers(world), shard_placement_fn=lambda _: 1)


def test_ranks_that_shard_along_different_dims_are_refused(world):
    with pytest.raises(ValueError, match=r"wrap different things: '0\.weight' \[4, 4\] torch.float32 S"):
        fully_shard(layers(world), shard_placement_fn=lambda p: Shard(world.rank % p.dim()))


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_policies_refuse_other_than_floating_point_dtypes(world, field):
    with pytest.raises(ValueError, match=f"MixedPrecisionPolicy: {field} must be a floating-point"):
        MixedPrecisionPolicy(**{field: torch.int32})


@FRONTS
def test_ranks_that_shard_different_modules_are_refused(world, front):
    module = nn.Linear(4, 4 + world.rank).to(world.device)
    with pytest.raises(ValueError, match=r"ranks wrap different things: 'weight' \[\d, 4\]"):
        front(module)


@FRONTS
def test_ranks_that_freeze_different_parameters_are_refused(world, front):
    """Only gradients of trainable parameters travel: the reduction would abort a rank."""
    module = nn.Linear(4, 4).to(world.device)
    module.bias.requires_grad_(world.rank == 0)
    own = "" if world.rank == 0 else "frozen "
    with pytest.raises(ValueError, match=rf"wrap different things: 'bias' \[4\] torch.float32 {own}here"):
        front(module)


@FRONTS
def test_setters_refuse_invalid_values(world, front):
    model = layers(world)
    front(model)
    with pytest.raises(ValueError, match="expected a positive number, got 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="expected a bool, got 2"):
        model.set_reshard_after_forward(2)
    with pytest.raises(ValueError, match="are prefetched, not Linear"):
        model.set_modules_to_forward_prefetch([model[0]])
    with pytest.raises(ValueError, match=r"(FSDP|Replicate)Sequential has no method 'encode'"):
        engine.register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match=r"share_comm_ctx: expected modules of .*, got Linear"):
        engine.share_comm_ctx([model, model[0]])
    assert engine.share_comm_ctx([model, model]) is None


@FRONTS
def test_the_next_forward_waits_for_the_event_of_the_optimizer_once(world, front):
    class Event:
        """Stands for an event of an accelerator."""

        waits = 0

        def wait(self):
            self.waits += 1

    model, event = layers(world), Event()
    front(model[0])
    front(model)
    model.set_post_optim_event(event)
    for _ in range(2):
        model(torch.ones(2, 4, device=world.device)).sum().backward()
        assert event.waits == 1


@FRONTS
def test_a_model_on_meta_asks_for_to_empty(world, front):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    front(model)
    with pytest.raises(RuntimeError, match=r"on the meta device; call to_empty"):
        model(torch.ones(2, 4, device=world.device))


@FRONTS
def test_pickling_a_sharded_module_is_refused_with_a_remedy(world, front, tmp_path):
    model = layers(world)
    front(model)
    with pytest.raises(TypeError, match=r"can be neither pickled .* save its state_dict\(\)"):
        torch.save(model, tmp_path / "model.pt")


@FRONTS
def test_state_dict_inside_forward_is_refused(world, front):
    class Reader(nn.Linear):
        def forward(self, x):
            self.state_dict()
            return super().forward(x)

    model = front(Reader(4, 4).to(world.device))
    with pytest.raises(RuntimeError, match="state_dict is illegal inside forward and backward"):
        model(torch.ones(2, 4, device=world.device))


@FRONTS
def test_a_copy_computes_and_trains_independently(world, front):
    model = layers(world, number=3)
    front([model[0], model[2]])  # one group of two modules
    front(model)
    copied = copy.deepcopy(model)
    x = torch.randn(2, 4, device=world.device)
    before = model(x)
    assert torch.equal(copied(x), before)
    copied(x).sum().backward()
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert torch.equal(model(x), before)
    assert not torch.equal(copied(x), before)
    assert all(p.grad is None for p in model.parameters())
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in copied.parameters())
    assert {p.device_mesh for p in copied.parameters()} == {p.device_mesh for p in model.parameters()}


@FRONTS
def test_a_copy_keeps_the_gradient_divide_factor(world, front):
    model = front(layers(world, number=1))
    model.set_gradient_divide_factor(8.0)
    copied = copy.deepcopy(model)
    copied(torch.ones(2, 4, device=world.device)).sum().backward()
    assert copied[0].bias.grad.full_tensor().tolist() == [2 * 2 / 8] * 4


@FRONTS
def test_a_module_and_its_child_can_share_a_group_and_be_copied(world, front):
    model = layers(world)
    front([model, model[1]])
    copied = copy.deepcopy(model)
    x = torch.full((2, 4), float(world.rank), device=world.device)
    for one in (model, copied):
        one(x).sum().backward()
    for found, expected in zip(copied.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad.full_tensor(), expected.grad.full_tensor())


@FRONTS
def test_a_partly_used_group_is_freed_under_no_grad(world, front):
    model = layers(world, number=3)
    for modules in ([model[0], model[2]], model[1]):
        front(modules, **POLICY)
    with torch.no_grad():
        model[1](model[0](torch.ones(2, 4, device=world.device)))
    assert [group.gathered_bytes for group in engine.groups(model)] == [0, 0]


@FRONTS
def test_a_leaf_returned_by_a_module_collects_no_hooks(world, front):
    class Through(nn.Linear):
        def forward(self, x):
            return super().forward(x), x

    model = front(Through(4, 4).to(world.device))
    leaf = torch.ones(2, 4, device=world.device, requires_grad=True)
    for _ in range(2):
        sum(output.sum() for output in model(leaf)).backward()
    assert not leaf._backward_hooks


@FRONTS
def test_modules_of_one_group_can_be_called_one_by_one(world, front):
    """Call the last layers for each chunk of a batch, each with its own backward."""
    model, reference = layers(world, number=3), layers(world, number=3)
    for modules in ([model[0], model[2]], model[1], model):
        front(modules)
    x = torch.randn(4, 4, device=world.device, generator=torch.Generator(world.device).manual_seed(1))
    for one in (model, reference):
        hidden = one[1](one[0](x)).detach()
        for chunk in hidden.split(2):
            one[2](chunk).square().sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if name.startswith("2.")}
    for name, gradient in expected.items():
        found = dict(model.named_parameters())[name].grad.full_tensor()
        torch.testing.assert_close(found, gradient)


def test_a_mesh_of_one_rank_shards_nothing_and_trains(world):
    alone = DeviceMesh(world.device.type, torch.tensor([[0], [1]]), mesh_dim_names=("other", "mine"))["mine"]
    model = fully_shard(layers(world), mesh=alone)
    x = torch.full((2, 4), float(world.rank + 1), device=world.device)
    model(x).sum().backward()
    assert model[1].bias.grad.to_local().tolist() == [2.0] * 4


@FRONTS
def test_groups_have_names_of_the_unsharded_model(world, front):
    model = layers(world, number=4)
    front([model[0], model[2]])
    front(model)
    seen = {
        group.name: (group.parameters, group.state.name, group.full_numel) for group in engine.groups(model)
    }
    assert seen == {
        "": (("1.weight", "1.bias", "3.weight", "3.bias"), "SHARDED", 40),
        "0": (("0.weight", "0.bias", "2.weight", "2.bias"), "SHARDED", 40),
    }


@FRONTS
def test_second_derivatives_are_refused(world, front):
    loss = front(layers(world))(torch.ones(2, 4, device=world.device)).sum()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        loss.backward(create_graph=True)


def test_zero_dim_parameters_can_be_replicated(world):
    model = nn.PReLU().to(world.device)
    model.weight = nn.Parameter(torch.tensor(0.5, device=world.device))
    replicate(model)
    model(torch.tensor([-2.0 - world.rank], device=world.device)).backward()
    assert model.weight.grad.full_tensor().item() == -2.5


@pytest.mark.ranks(4)
# The engine makes a process group of the few ranks, and never ends it.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
def test_a_model_can_be_cast_while_it_is_resharded_to_two_ranks(world):
    model = fully_shard(layers(world), reshard_after_forward=2)
    x = torch.ones(2, 4, device=world.device)
    before = model(x)
    assert [group.state.name for group in engine.groups(model)] == ["SHARDED_POST_FORWARD"]
    # fp32 against fp64: off by roundings of fp32, 6e-8 of sums near 1.
    torch.testing.assert_close(model.double()(x.double()), before.double(), rtol=1e-6, atol=1e-6)


def test_a_forward_method_keeps_the_rest_of_its_group_unsharded(world):
    class Two(nn.Linear):
        def also(self, x):
            return self(x)

    first, second = Two(4, 4).to(world.device), nn.Linear(4, 4).to(world.device)
    model = nn.Sequential(fully_shard([first, second])[0], second)
    engine.register_fsdp_forward_method(first, "also")

    def forward(x):
        hidden = first.also(x)
        assert [group.state.name for group in engine.groups(model) if group.name == "0"] == ["UNSHARDED"]
        return second(hidden)

    outer = nn.Module()
    outer.model, outer.forward = model, forward
    fully_shard(outer)(torch.ones(2, 4, device=world.device))
