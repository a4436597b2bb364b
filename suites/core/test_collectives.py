"""Traffic between ranks, exactly: how often, in which order and dtype, and how many bytes."""

import pytest
import torch
from torch import nn

from lockstep.conformance import Capability, Precision, offers
from lockstep.conformance.models import KnownGradient, NestedWrappedModule

# On three ranks every group of the model has some padding.
pytestmark = pytest.mark.ranks(2, 3, needs=())

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

NUMEL = {"": 76, "module.1": 272, "module.1.0": 80, "module.2": 68}
FORWARD = ("", "module.1", "module.1.0", "module.2")
BACKWARD = ("", "module.2", "module.1", "module.1.0")
REDUCED = ("module.2", "module.1", "module.1.0", "")  # the root last: it holds the first layer
# Which groups are gathered, in order: in forward, in backward.
GATHERED = {
    "FULL_SHARD": (FORWARD, BACKWARD),
    "SHARD_GRAD_OP": (FORWARD, ()),
    "NO_SHARD": ((), ()),
    "fully_shard": (FORWARD, BACKWARD[1:]),
    "replicate": ((), ()),
}
STRATEGIES = ["FULL_SHARD-flat", "SHARD_GRAD_OP-flat", "NO_SHARD-flat"]
OF_STRATEGIES = pytest.mark.parametrize("front", STRATEGIES, indirect=True)
OF_ALL = pytest.mark.parametrize("front", [*STRATEGIES, "fully_shard", "replicate"], indirect=True)

# precision -> dtype of gathers, dtype of reductions
DTYPES = {
    Precision(): (F32, F32),
    Precision(param_dtype=F16): (F16, F16),
    Precision(param_dtype=BF16, reduce_dtype=F32): (BF16, F32),
    Precision(reduce_dtype=BF16): (F32, BF16),
}
EVERY_DTYPE = pytest.mark.parametrize(
    "precision", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"]
)


def kind(front):
    return front.settings.get("strategy", front.name)


def full_numel(world, front, model):
    """Return how many elements each group has with its padding, by name."""
    found = {group.name: group.full_numel for group in front.engine.groups(model)}
    if front.is_composable:
        assert found == {name: padded_along_dim_0(world, front, name) for name in NUMEL}
    elif offers(front, Capability.ONE_PADDING):
        assert all(found[name] in (numel, padded(world, numel)) for name, numel in NUMEL.items())
    return found


def padded_along_dim_0(world, front, group):
    """Return the elements of a group whose parameters are each sharded along dim 0 in equal parts."""
    bare, inner = NestedWrappedModule(), [name for name in NUMEL if name.startswith(group) and name != group]
    own = {n: p for n, p in bare.named_parameters() if n.startswith(group) and not n.startswith(tuple(inner))}
    num_shards = world.size if front.shards else 1
    return sum(-(-p.shape[0] // num_shards) * num_shards * p.shape[1:].numel() for p in own.values())


def padded(world, numel):
    return -(-numel // world.size) * world.size


def shard_bytes(world, front, model, dtype, names):
    """Return the dtype and size of one rank's shard of each group, padding included."""
    numel = full_numel(world, front, model)
    return [(dtype, padded(world, numel[name]) // world.size * dtype.itemsize) for name in names]


def full_bytes(world, front, model, dtype, names, whole):
    """Return the dtype and size of each group: `whole`, or padded so that every rank has as much."""
    numel = full_numel(world, front, model)
    sizes = (numel[name] if whole else padded(world, numel[name]) for name in names)
    return [(dtype, size * dtype.itemsize) for size in sizes]


def gathers(engine, log, *, in_backward):
    """Return dtype and bytes of the gathers of parameters, in order."""
    found = engine.traffic(log).gathers
    return [(entry.dtype, entry.nbytes) for entry in found if entry.in_backward == in_backward]


def reductions(engine, log):
    """Return dtype and bytes of the reductions, in order; all of them are in backward."""
    found = engine.traffic(log).reductions
    assert all(entry.in_backward for entry in found), log
    return [(entry.dtype, entry.nbytes) for entry in found]


@pytest.fixture
def check_gathers(world, front, collectives):
    """Hold the gathers of so many steps to those of the front."""

    def check(model, dtype, steps=1):
        for in_backward, names in enumerate(GATHERED[kind(front)]):
            found = gathers(front.engine, collectives, in_backward=bool(in_backward))
            assert found == shard_bytes(world, front, model, dtype, names) * steps, collectives
        assert {entry.group_size for entry in front.engine.traffic(collectives).gathers} <= {world.size}

    return check


@pytest.fixture
def check_reductions(world, front, collectives):
    """Hold the reductions of so many steps to one for each of these groups, with nothing else sent."""

    def check(model, dtype, steps=1, names=REDUCED):
        ops = {entry.op for entry in front.engine.traffic(collectives).reductions}
        whole = kind(front) in ("NO_SHARD", "replicate") and "all_reduce" in ops
        found = reductions(front.engine, collectives)
        expected = full_bytes(world, front, model, dtype, names, whole) * steps
        if not offers(front, Capability.EARLY_REDUCTION):  # a group waits for all that is inside its modules
            found, expected = sorted(found, key=str), sorted(expected, key=str)
        assert found == expected, collectives
        assert {entry.group_size for entry in front.engine.traffic(collectives).reductions} <= {world.size}
        assert front.engine.traffic(collectives).others == (), collectives

    return check


@EVERY_DTYPE
@OF_ALL
@pytest.mark.inside
def test_a_step_gathers_and_reduces_by_strategy(
    front, batch, check_gathers, check_reductions, offload, precision
):
    """Tensors are cast before they are sent, not after (pytorch#154975)."""
    model = front.shard(NestedWrappedModule(), precision=precision, offload=offload)
    for _ in range(2):
        front.backward(model, model(batch()).float().sum())
    gathered, reduced = DTYPES[precision]
    check_gathers(model, gathered, steps=2)
    check_reductions(model, reduced, steps=2)


@pytest.mark.parametrize("precision", list(DTYPES)[::2], ids=["fp32", "bf16_reduced_in_fp32"])
@pytest.mark.inside
def test_no_sync_reduces_nothing_and_the_next_backward_all(
    front, batch, check_gathers, check_reductions, collectives, offload, precision
):
    """huggingface/accelerate#3762: gradients were communicated all the same."""
    model = front.shard(NestedWrappedModule(), precision=precision, offload=offload)
    with front.no_sync(model):
        for _ in range(2):
            front.backward(model, model(batch()).float().sum())
    assert reductions(front.engine, collectives) == []
    front.backward(model, model(batch()).float().sum())
    gathered, reduced = DTYPES[precision]
    check_gathers(model, gathered, steps=3)
    check_reductions(model, reduced)


@OF_STRATEGIES
@pytest.mark.inside
def test_every_synced_backward_of_an_accumulation_reduces(
    world, engine, front, batch, check_reductions, collectives
):
    model = front.shard(NestedWrappedModule())
    loss = model(batch()).float().sum()
    front.backward(model, loss, retain_graph=True)
    front.backward(model, loss)
    check_reductions(model, F32, steps=2)
    # What was kept for the first backward is freed by it.
    again = {"FULL_SHARD": BACKWARD * 2, "SHARD_GRAD_OP": BACKWARD, "NO_SHARD": ()}[kind(front)]
    found = gathers(engine, collectives, in_backward=True)
    assert found == shard_bytes(world, front, model, F32, again)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@OF_STRATEGIES
@pytest.mark.inside
def test_evaluation_gathers_each_group_once_and_keeps_none(
    world, engine, front, batch, collectives, dtype, mode
):
    model = front.shard(NestedWrappedModule(), precision=Precision(param_dtype=dtype)).eval()
    with mode():
        model(batch()).float().sum()
        assert {group.state.name for group in engine.groups(model)} == {"SHARDED"}
        model(batch()).float().sum()
    expected = shard_bytes(world, front, model, dtype, GATHERED[kind(front)][0]) * 2
    assert gathers(engine, collectives, in_backward=False) == expected
    assert reductions(engine, collectives) == []


@OF_STRATEGIES
@pytest.mark.inside
def test_a_forward_without_backward_is_forgotten_by_the_next(
    world, engine, front, batch, check_reductions, collectives
):
    model = front.shard(NestedWrappedModule())
    model(batch()).float().sum()
    front.backward(model, model(batch()).float().sum())
    first, second = GATHERED[kind(front)]
    assert gathers(engine, collectives, in_backward=False) == shard_bytes(world, front, model, F32, first) * 2
    assert gathers(engine, collectives, in_backward=True) == shard_bytes(world, front, model, F32, second)
    check_reductions(model, F32)


@pytest.mark.parametrize("frozen_first", [True, False], ids=["frozen_first", "sharded_first"])
@pytest.mark.inside
def test_a_frozen_group_is_gathered_in_backward_but_not_reduced(
    front, batch, check_gathers, check_reductions, frozen_first
):
    bare = NestedWrappedModule()
    bare.module[2].requires_grad_(not frozen_first)
    model = front.shard(bare)
    bare.module[2].requires_grad_(False)
    front.backward(model, model(batch()).float().sum())
    check_gathers(model, F32)
    check_reductions(model, F32, names=REDUCED[1:])


@pytest.mark.inside
def test_a_frozen_group_out_of_backward_is_gathered_once(world, engine, shard, collectives, strategy):
    bare = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    model = shard(bare, strategy, units=(nn.Linear,))
    engine.backward(model, model(torch.ones(2, 4, device=world.device)).sum())
    num = {"FULL_SHARD": (2, 1), "SHARD_GRAD_OP": (2, 0), "NO_SHARD": (0, 0)}[strategy]
    found = [len(gathers(engine, collectives, in_backward=where)) for where in (False, True)]
    assert (tuple(found), len(reductions(engine, collectives))) == (num, 1)
    assert [group.gathered_bytes for group in engine.groups(model)] == [0, 0]


@pytest.mark.ranks(2, 3)
def test_a_module_used_twice_in_one_forward_is_reduced_once(world, engine, shard, collectives, strategy):
    """facebookresearch/fairscale#513."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = KnownGradient(3)

        def forward(self, x):
            return self.inner(x) + self.inner(10 * x)

    model = shard(Twice(), strategy, units=("inner",))
    engine.backward(model, model(torch.tensor(2.0 * world.rank, device=world.device)))
    assert engine.full_gradients(model)["inner.weight"].tolist() == [11.0 * (world.size - 1)] * 3
    if offers(engine, Capability.TRAFFIC):
        assert len(reductions(engine, collectives)) == 1


@pytest.mark.ranks(2)
@pytest.mark.inside
def test_a_module_that_all_ranks_skip_sends_nothing(world, engine, shard, collectives, strategy):
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.skipped = KnownGradient(2), KnownGradient(6)

        def forward(self, x):
            return self.used(x)

    model = shard(Skipping(), strategy, units=(KnownGradient,))
    engine.backward(model, model(torch.ones((), device=world.device)))
    assert reductions(engine, collectives) == [(F32, 8)]
    assert {nbytes for _, nbytes in gathers(engine, collectives, in_backward=False)} <= {4}


@pytest.mark.ranks(1)
@EVERY_DTYPE
@OF_ALL
@pytest.mark.inside
def test_one_rank_communicates_nothing(front, batch, collectives, precision):
    model = front.shard(NestedWrappedModule(), precision=precision)
    front.backward(model, model(batch()).float().sum())
    assert all(gradient.any() for gradient in front.full_gradients(model).values())
    front.clip_grad_norm_(model, 1.0)
    assert list(collectives) == []


class Between(nn.Module):
    """Two units; it counts gathers as backward goes through the last one, and from that to the first."""

    units = ("first", "last")

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.count, self.counts = None, []
        self.last[0].register_forward_hook(self.watch)

    def watch(self, _module, _arguments, output):
        output.register_hook(lambda _: self.counts.append(self.count()))

    def forward(self, x):
        x = self.first(x).tanh()
        self.watch(None, None, x)
        return self.last(x * 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("backward_prefetch", "counts"),
    [(None, [1, 1]), ("BACKWARD_POST", [1, 2]), ("BACKWARD_PRE", [2, 2])],
    ids=["none", "post", "pre"],
)
@pytest.mark.inside
def test_the_next_group_is_gathered_before_or_after_gradients(
    engine, shard, batch, collectives, backward_prefetch, counts
):
    bare = Between()
    model = shard(bare, backward_prefetch=backward_prefetch)
    bare.count = lambda: len(gathers(engine, collectives, in_backward=True))
    engine.backward(model, model(batch()).sum())
    assert bare.counts == counts, collectives
    assert bare.count() == 2


class Layers(nn.Sequential):
    """Linear layers, of which `order` lists those that run; each counts gathers as it begins."""

    units = ("0", "1", "2", "3")

    def __init__(self):
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self.order, self.count, self.counts = range(4), None, []
        for layer in self:
            layer.register_forward_pre_hook(lambda *_: self.counts.append(self.count()))

    def forward(self, x):
        for index in self.order:
            x = self[index](x)
        return x


@pytest.fixture
def ahead(engine, shard, batch, collectives):
    """Return the gathers by the beginning of each layer, for each of some orders: `ahead(*orders)`."""

    def ahead(*orders):
        bare, found = Layers(), []
        model = shard(bare, forward_prefetch=True)
        bare.count = lambda: len(gathers(engine, collectives, in_backward=False))
        for bare.order in orders:
            before, bare.counts = bare.count(), []
            engine.backward(model, model(batch()).sum())
            found.append([count - before for count in (*bare.counts, bare.count())])
        return found

    return ahead


@pytest.mark.ranks(2)
@pytest.mark.inside
def test_one_group_is_gathered_ahead_in_forward_once_the_order_is_known(ahead):
    assert ahead(range(4), range(4), range(4)) == [[1, 2, 3, 4, 4], *[[2, 3, 4, 4, 4]] * 2]


@pytest.mark.ranks(2)
@pytest.mark.inside
def test_what_is_gathered_ahead_follows_the_order_of_the_forward_before(ahead):
    orders = [range(4), (3, 0, 2), (3, 0, 2), (1, 2)]
    assert ahead(*orders) == [[1, 2, 3, 4, 4], [1, 2, 3, 3], [2, 3, 3, 3], [1, 2, 2]]


@pytest.mark.ranks(2)
@pytest.mark.inside
@OF_ALL
def test_a_conversion_leaves_no_hooks_behind(front, batch):
    def hooks():
        front.backward(model, model(batch()).sum())
        return [len(parameter._backward_hooks or ()) for parameter in model.parameters()]

    model = front.shard(nn.Linear(8, 8))
    before = hooks()
    model.double().float()
    assert hooks() == before
