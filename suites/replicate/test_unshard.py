"""Parameters unsharded and resharded by hand, and prefetched for groups that are named."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep.assertions import assert_named_close, assert_sharded_parity
from lockstep.assertions.closeness import EXACT
from lockstep.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(2, 3)

BF16, F32 = torch.bfloat16, torch.float32


def nested(world, front, **settings):
    bare = NestedWrappedModule().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    return front.shard(bare, **settings), full


def kinds(model):
    """Return which parameters are seen as they are sharded, by name."""
    return {name: isinstance(p, DTensor) for name, p in model.named_parameters()}


@pytest.mark.parametrize("policy", [(), (BF16, F32)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_unshard_shows_full_parameters_until_reshard(world, front, policy, async_op):
    model, full = nested(world, front, **front.precision(*policy))
    before = list(model.parameters())
    handle = model.module[1].unshard(async_op=async_op)
    if async_op:
        assert all(kinds(model).values())
        handle.wait()
    else:
        assert handle is None
    weight = "module.1.1.weight"
    assert [name for name, is_sharded in kinds(model).items() if not is_sharded] == [
        weight,
        "module.1.1.bias",
    ]
    seen = model.get_parameter(weight).detach()
    assert_named_close({weight: seen}, {weight: full[weight].to(BF16 if policy else F32)}, EXACT)
    model.module[1].reshard()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))


def test_state_dicts_are_of_shards_while_parameters_are_unsharded(world, front):
    """A state dict that is taken then, and one that is loaded, have the same names, kinds and values."""
    model, full = nested(world, front)
    sharded = model.state_dict()
    model.unshard()
    state = model.state_dict()
    assert {name: (type(value), value.shape) for name, value in state.items()} == {
        name: (type(value), value.shape) for name, value in sharded.items()
    }
    doubled = {name: value.detach() * 2 for name, value in state.items()}
    model.unshard()
    model.load_state_dict(doubled)
    expected = {name: tensor * 2 for name, tensor in full.items()}
    assert_named_close(front.full_parameters(model), expected, EXACT)


def test_what_was_unsharded_by_hand_stays_so_where_a_forward_skips_it(world, front):
    class Skipping(NestedWrappedModule):
        def forward(self, x):
            return self.module[3](self.module[0](x))

    model = front.shard(Skipping())
    model.module[1].unshard()
    model.module[2].unshard(async_op=True)
    with torch.no_grad():
        model(torch.ones(2, 8, device=world.device))
    model.module[2].unshard()
    seen = kinds(model)
    assert not any(seen[name] for name in ("module.1.1.weight", "module.2.weight"))
    assert seen["module.1.0.weight"]


def test_a_step_leaves_what_was_unsharded_by_hand(world, front):
    model, _ = nested(world, front)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.module[2].unshard()
    optimizer.step()
    assert kinds(model.module[2]) == {"weight": False, "bias": False}


def test_what_was_unsharded_by_hand_trains_where_the_loss_alone_reads_it(world, front):
    class Skipping(NestedWrappedModule):
        def forward(self, x):
            return self.module[3](self.module[0](x))

    reference = Skipping().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    model.module[1].unshard()
    x = torch.ones(2, 8, device=world.device)
    for module in (reference, model):
        output = module(x).sum()
        (output + module.get_parameter("module.1.1.weight").square().sum()).backward()
    assert_sharded_parity(model, reference)


def test_what_was_gathered_by_hand_is_not_gathered_again(world, fully_shard, step, collectives):
    model, _ = nested(world, fully_shard)
    handles = [model.get_submodule(name).unshard(async_op=True) for name in ("", *NestedWrappedModule.units)]
    assert len(fully_shard.engine.traffic(collectives).gathers) == 4, collectives
    for handle in handles:
        handle.wait()
    step(model)
    gathers = fully_shard.engine.traffic(collectives).gathers
    assert [e.in_backward for e in gathers] == [False] * 4 + [True] * 3, collectives


def test_a_handle_need_not_be_waited_for(world, front):
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    for name in ("", *NestedWrappedModule.units):
        model.get_submodule(name).unshard(async_op=True)
    x = torch.ones(4, 8, device=world.device)
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)


def test_by_hand_a_step_between_is_seen(world, front):
    """Parameters unsharded before the optimizer's step must not be computed with after it."""
    model, full = nested(world, front)
    model.unshard()
    model.reshard()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model.unshard()
    own = {name: p.detach() for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert sorted(own) == ["module.0.bias", "module.0.weight", "module.3.bias", "module.3.weight"]
    assert_named_close(own, {name: full[name] + 1 for name in own}, EXACT)


@pytest.mark.parametrize("names", ["", "weight"], ids=["all", "some"])
def test_by_hand_a_step_is_seen_where_backward_has_kept_parameters(world, front, step, names):
    model, _ = nested(world, front)
    model.set_reshard_after_backward(False)
    stepped = [p for name, p in model.named_parameters() if name.endswith(names)]
    optimizer = torch.optim.SGD(stepped, lr=0.5)
    step(model)
    optimizer.step()
    expected = front.full_parameters(model)
    for name in ("", *NestedWrappedModule.units):
        model.get_submodule(name).unshard()
    assert not any(kinds(model).values())
    assert_named_close({name: p.detach() for name, p in model.named_parameters()}, expected, EXACT)


@pytest.mark.parametrize(
    "local", [(False,), (True,), (False, True)], ids=["by_dtensor", "by_local_tensor", "by_both"]
)
@pytest.mark.parametrize("policy", [(), (BF16,)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "way", [pytest.param("on_its_way", marks=pytest.mark.skew(seeds=[])), "kept_by_forward"]
)
def test_parameters_gathered_before_a_change_are_not_used(world, front, policy, local, way):
    """torch 2.13 computes with what was sent before the change; on its way, that is a race on purpose."""
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference), **front.precision(*policy))
    x = torch.ones(4, 8, device=world.device)
    output = model(x)
    if way == "on_its_way":
        output.sum().backward()
        for name in ("", *NestedWrappedModule.units):
            model.get_submodule(name).unshard(async_op=True)
    with torch.no_grad():
        for p in (*model.parameters(), *reference.parameters()):
            for each in local:
                (p.to_local() if each and isinstance(p, DTensor) else p).add_(1.0 / len(local))
    # Five layers in bf16 are off by some units in its last place.
    tolerance = {"atol": 0.0, "rtol": 0.05} if policy else {"atol": 1e-5, "rtol": 1.3e-6}
    torch.testing.assert_close(model(x).float(), reference(x), **tolerance)


class Reads(nn.Module):
    """An embedding, of which backward reads nothing, and two layers."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(5, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, rows):
        return self.second(self.first(self.table(rows)).relu())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_backward_does_not_read_need_not_be_gathered(world, fully_shard, collectives, microbatches):
    reference = Reads().to(world.device)
    model = fully_shard.shard(copy.deepcopy(reference), ("table", "first", "second"))
    model.table.set_unshard_in_backward(False)
    for _ in range(microbatches):
        for module in (reference, model):
            module(torch.tensor([0, 3, 3], device=world.device)).square().sum().backward()
    gathers = fully_shard.engine.traffic(collectives).gathers
    found = [[e.in_backward for e in gathers].count(backward) for backward in (False, True)]
    assert found == [3 * microbatches, 2 * microbatches]
    assert_sharded_parity(model, reference)
    model.table.set_unshard_in_backward(True)
    model(torch.tensor([0], device=world.device)).sum().backward()
    assert len(fully_shard.engine.traffic(collectives).gathers) == len(gathers) + 6


class Watch:
    """Four layers, each a group, that note how many gathers there were when they began and ended."""

    def __init__(self, world, fully_shard, log):
        self.engine, self.log = fully_shard.engine, log
        self.model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4))).to(world.device)
        self.reference = copy.deepcopy(self.model)
        self.forward, self.backward = {}, {}
        for index, layer in enumerate(self.model):
            layer.register_forward_hook(
                lambda _module, _inputs, output, index=index: self.note(index, output)
            )
        fully_shard.shard(self.model, ("0", "1", "2", "3"))

    def note(self, index, output):
        self.forward[index] = self.gathers(False)
        # The gradient of an output is there when the layers after it are done.
        output.register_hook(lambda _gradient: self.backward.update({index: self.gathers(True)}))

    def gathers(self, in_backward):
        return sum(e.in_backward == in_backward for e in self.engine.traffic(self.log).gathers)

    def run(self, world):
        x = torch.arange(24.0, device=world.device).view(4, 6)
        for module in (self.model, self.reference):
            module(x).square().sum().backward()
        assert_sharded_parity(self.model, self.reference)
        assert (self.gathers(False), self.gathers(True)) == (4, 4)


def test_named_groups_are_gathered_ahead_in_forward(world, fully_shard, collectives):
    watch = Watch(world, fully_shard, collectives)
    watch.model[0].set_modules_to_forward_prefetch([watch.model[1], watch.model[2]])
    watch.run(world)
    assert watch.forward[0] >= 3
    assert watch.forward[3] == 4


def test_named_groups_are_gathered_ahead_in_backward(world, fully_shard, collectives):
    watch = Watch(world, fully_shard, collectives)
    watch.model[3].set_modules_to_backward_prefetch([watch.model[2], watch.model[1]])
    watch.run(world)
    assert watch.backward[2] >= 3  # the last layer is done
    assert watch.backward[0] == 4


def test_a_wrong_guess_costs_no_correctness(world, fully_shard, collectives):
    watch = Watch(world, fully_shard, collectives)
    for index, layer in enumerate(watch.model):
        layer.set_modules_to_forward_prefetch([watch.model[index - 1]])
        layer.set_modules_to_backward_prefetch([watch.model[(index + 1) % 4]])
    x = torch.arange(24.0, device=world.device).view(4, 6)
    for module in (watch.model, watch.reference):
        module(x).square().sum().backward()
    assert_sharded_parity(watch.model, watch.reference)


def test_modules_without_parameters_may_be_named_for_prefetching(world, fully_shard):
    reference = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).to(world.device)
    model = fully_shard.shard(copy.deepcopy(reference), ("0", "1", "2"))
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    x = torch.arange(24.0, device=world.device).view(4, 6)
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)
