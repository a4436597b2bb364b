"""Parameters of awkward shape and order train as an unsharded model's do on all ranks' batches together."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from harness.assertions import assert_named_close, assert_same_across_ranks, assert_sharded_parity
from harness.conformance.models import AlwaysWrapNestedWrappedModule, NestedWrappedModule
from harness.recorders.tensors import named_tensors

pytestmark = pytest.mark.ranks(2)


class Odd(nn.Module):
    """Parameters of no, one and few elements, a tied weight, and a unit that is used twice.

    torch 2.13 reduces no gradient without elements: it raises.
    """

    units = ("twice", "tiny")

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(8, 5)
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.tiny = nn.Linear(1, 1, bias=False)
        self.last = nn.Linear(5, 7, bias=False)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.last.weight

    def forward(self, x):
        x = self.twice(self.twice(self.first(x)))
        outputs = [self.last(x), (self.tied(x) + self.one,)]
        return {"outputs": outputs, "tiny": self.tiny(x[:, :1]), "empty": self.empty.sum(), "count": 2}


class Thawing(nn.Sequential):
    """A unit that is frozen in every other step, beside a part of one that always is."""

    units = ("1",)

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self[2].bias.requires_grad_(False)

    def begin(self, step):
        self[1].requires_grad_(step % 2 == 1)


class Skipping(nn.Sequential):
    """Units of which each step leaves one out, and another's output never reaches the loss."""

    units = ("0", "1", "2")

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
        self.step = 0

    def begin(self, step):
        self.step = step

    def forward(self, x):
        used = [layer for index, layer in enumerate(self) if index != self.step % 3]
        return {"heard": used[0](x), "unheard": used[1](x).detach()}


class Checkpointed(nn.Module):
    """Layers with a tied weight that are computed a second time in backward."""

    def __init__(self, use_reentrant, units=("inner",)):
        super().__init__()
        self.units = units
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.inner[2].weight = self.inner[0].weight
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.before(x)
        return self.after(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))


MODELS = {
    "nested": NestedWrappedModule,
    "always_wrapped": AlwaysWrapNestedWrappedModule,
    "odd": Odd,
    "thawing": Thawing,
    "skipping": Skipping,
    "checkpointed": lambda: Checkpointed(use_reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(use_reentrant=True),
    "checkpointed_inside_a_group": lambda: Checkpointed(use_reentrant=False, units=()),
}


def names_of(bare):
    """Return the names of the units, outer before inner."""
    every = bare.units == (nn.Module,)
    return [name for name, _ in bare.named_modules() if name] if every else bare.units


def loss_of(output):
    return sum(t.square().mean() for t in named_tensors(output).values())


def check_two_accumulated_steps(world, front, bare, **settings):
    """Train both models two steps of two backwards each; compare gradients and parameters."""
    reference, model = copy.deepcopy(bare).to(world.device), copy.deepcopy(bare).to(world.device)
    front.apply(model, names_of(bare), **settings)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (reference, model)]
    generator = torch.Generator().manual_seed(world.seed)
    for step in range(2):
        for module in (reference, model):
            getattr(module, "begin", lambda step: None)(step)
        for batch in torch.randn(2, 2 * world.size, 8, generator=generator).to(world.device):
            loss_of(reference(batch)).backward()
            loss_of(model(batch.chunk(world.size)[world.rank])).backward()
        assert_sharded_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_sharded_parity(model, reference)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_parameters_equal_the_unsharded_ones(world, front, model):
    check_two_accumulated_steps(world, front, MODELS[model]())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", ["nested", "odd"])
def test_four_ranks_of_which_most_hold_no_part_of_a_parameter_train_the_same(world, front, model):
    check_two_accumulated_steps(world, front, MODELS[model]())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("reshard_after_forward", [True, False], ids=["freed", "kept"])
def test_models_train_the_same_when_groups_are_freed_or_kept(
    world, fully_shard, model, reshard_after_forward
):
    settings = {"reshard_after_forward": reshard_after_forward}
    check_two_accumulated_steps(world, fully_shard, MODELS[model](), **settings)


@pytest.mark.parametrize("model", MODELS)
def test_models_train_the_same_offloaded(world, front, engine, model):
    """torch 2.13 refuses the default on a host without an accelerator: it wants pinned memory."""
    offload = engine.composable.CPUOffloadPolicy()
    check_two_accumulated_steps(world, front, MODELS[model](), offload_policy=offload)


@pytest.mark.ranks(1, 2, 3, 4)
def test_each_rank_holds_the_chunk_that_torch_would_cut_along_dim_0(world, fully_shard):
    bare = Odd().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model = fully_shard.apply(bare, Odd.units)
    local = {name: p.to_local().detach() for name, p in model.named_parameters()}
    for name, whole in full.items():
        chunks = whole.chunk(world.size)
        mine = chunks[world.rank] if world.rank < len(chunks) else whole[:0]
        assert_named_close({name: local[name]}, {name: mine})
    assert {name: p.shape for name, p in model.named_parameters()} == {n: t.shape for n, t in full.items()}


def test_parameters_are_dtensors_on_the_mesh_whose_full_value_is_the_one_before(world, front):
    bare = Odd().to(world.device)
    full = {name: p.detach().clone() for name, p in bare.named_parameters()}
    model = front.apply(bare, Odd.units)
    found = dict(model.named_parameters())
    assert {(type(p.data), p.placements, p.device_mesh.shape) for p in found.values()} == {
        (DTensor, front.placements, (2,))
    }
    assert_named_close({name: p.full_tensor() for name, p in found.items()}, full)
    assert all(isinstance(p, nn.Parameter) for p in found.values())


def test_replicas_are_bit_equal_after_steps(world, replicate, step):
    model = replicate.apply(NestedWrappedModule().to(world.device), NestedWrappedModule.units)
    start = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number in range(3):
        step(model, number)
        optimizer.step()
        optimizer.zero_grad()
    assert not any(torch.equal(p.full_tensor(), start[name]) for name, p in model.named_parameters())
    assert_same_across_ranks(dict(model.named_parameters()))


def test_modules_in_one_list_train_as_one_group(world, front):
    reference = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(world.device)
    reference[2].weight = reference[0].weight  # tied: so they must be in one group
    model = copy.deepcopy(reference)
    front([model[0], model[2]])
    front(model)
    batch = torch.randn(2 * world.size, 8, generator=torch.Generator().manual_seed(1)).to(world.device)
    loss_of(reference(batch)).backward()
    loss_of(model(batch.chunk(world.size)[world.rank])).backward()
    assert_sharded_parity(model, reference)


class Tied(nn.Sequential):
    """A layer's weight under a second name in another."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.PReLU())
        self[1].kernel = self[0].weight


def test_a_parameter_visible_to_two_groups_is_an_error_that_names_it_in_both(world, front):
    """torch 2.13 names it in one of the two."""
    with pytest.raises((ValueError, RuntimeError), match=r"weight.*kernel|kernel.*weight"):
        front.apply(Tied().to(world.device), ("0", "1"))(torch.ones(2, 8, device=world.device))


def test_parameters_without_dimensions_cannot_be_cut(world, fully_shard):
    model = nn.Linear(2, 2).to(world.device)
    model.scalar = nn.Parameter(torch.tensor(1.0, device=world.device))
    with pytest.raises(ValueError, match=r"scalar|0-dim"):
        fully_shard(model)


def test_ignored_parameters_are_left_alone(world, front, collectives, step):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(world.device)
    ignored = set(model[0].parameters())
    before = {p: p.detach().clone() for p in ignored}
    front(model, ignored_params=ignored)
    step(model)
    assert set(model[0].parameters()) == ignored
    assert all(torch.equal(p, before[p]) for p in ignored)
    assert not any(isinstance(p, DTensor) for p in ignored)
    numel = 8 * 8 + 8
    assert [e.nbytes for e in front.engine.traffic(collectives).reductions] == [4 * numel], collectives
    gradients = world.gather([p.grad.cpu() for p in model[0].parameters()])
    assert not any(torch.equal(*pair) for pair in zip(*gradients, strict=True))
