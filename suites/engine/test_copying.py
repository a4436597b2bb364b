"""Copies of a sharded model: complete and independent, or refused."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.engine import (
    CPUOffload,
    CustomPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    always_wrap_policy,
    groups,
)

pytestmark = pytest.mark.ranks(2)

FULL, GRAD_OP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
F16, F32 = torch.float16, torch.float32
summon = FullyShardedDataParallel.summon_full_params


class Recurrent(nn.Module):
    """Tied weights, buffers, an ignored layer and a recurrent one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm, self.left = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x):
        return self.recurrent(self.left(self.norm(self.second(self.first(x)))))[0]


def recurrent(world, **arguments):
    torch.manual_seed(0)
    bare = Recurrent().to(world.device)
    policy = CustomPolicy(lambda m: isinstance(m, nn.LSTM | nn.BatchNorm1d))
    return FullyShardedDataParallel(bare, auto_wrap_policy=policy, ignored_modules=[bare.left], **arguments)


def train(model, optimizer, batch, steps=2):
    losses = []
    for _ in range(steps):
        loss = model(batch / 10).square().sum()
        loss.backward()
        model.clip_grad_norm_(10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_copy_trains_like_the_original_and_independently(world, batch, strategy, use_orig_params, offload):
    model = recurrent(
        world, sharding_strategy=strategy, use_orig_params=use_orig_params, cpu_offload=CPUOffload(offload)
    )
    optimizer = adam(model)
    train(model, optimizer, batch)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    before = {name: tensor.clone() for name, tensor in copied.state_dict().items()}
    losses = train(model, optimizer, batch)
    assert_named_close(copied.state_dict(), before, EXACT)
    assert train(copied, its_optimizer, batch) == losses
    assert_named_close(copied.state_dict(), model.state_dict(), EXACT)
    assert [g.parameters for g in groups(copied)] == [g.parameters for g in groups(model)]


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_copy_shares_no_memory_and_keeps_ties(world, batch, use_orig_params):
    model = recurrent(world, use_orig_params=use_orig_params)
    model(batch).sum().backward()
    copied = copy.deepcopy(model)
    originals = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    copies = {t.untyped_storage().data_ptr() for t in [*copied.parameters(), *copied.buffers()]}
    assert originals.isdisjoint(copies)
    assert [p.grad for p in copied.parameters()] == [None] * len(list(model.parameters()))
    with summon(copied):
        assert copied.first.weight is copied.second.weight


def test_a_copied_inner_unit_is_a_root(nested, batch):
    model = nested(auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    model(batch)
    copied = copy.deepcopy(model.module.module)
    with copied.no_sync():
        copied(batch).sum().backward()
    assert (copied.check_is_root(), model.module.module.check_is_root()) == (True, False)
    assert [group.name for group in groups(copied)] == ["", "1"]


def test_a_copy_saves_cast_buffers_in_their_original_dtype(world, batch):
    bare = nn.Linear(8, 8).to(world.device)
    bare.register_buffer("offset", torch.zeros(8, device=world.device))
    model = FullyShardedDataParallel(bare, mixed_precision=MixedPrecision(buffer_dtype=F16))
    model(batch)
    copied = copy.deepcopy(model)
    assert (copied.offset.dtype, copied.state_dict()["offset"].dtype) == (F16, F32)


def test_a_copy_switches_to_eval_alone_and_restores_its_buffers(world, batch):
    bare = nn.Linear(8, 8).to(world.device)
    bare.register_buffer("offset", torch.full((8,), 1 / 3, device=world.device))
    precision = MixedPrecision(F16, buffer_dtype=F16)
    model = FullyShardedDataParallel(bare, mixed_precision=precision, full_precision_in_eval=True)
    model(batch)
    copied = copy.deepcopy(model).eval()
    assert (copied(batch).dtype, model(batch).dtype) == (F32, F16)
    assert [groups(m)[0].reduce_dtype for m in (copied, model)] == [F32, F16]
    assert copied.offset.tolist() == torch.full((8,), 1 / 3).tolist()
    assert model.offset.dtype == F16


def test_summoned_parameters_can_be_copied_and_wrapped_again(nested):
    model = nested()
    with summon(model):
        bare = copy.deepcopy(model.module)
    again = FullyShardedDataParallel(bare, auto_wrap_policy=always_wrap_policy, sharding_strategy=NONE)
    assert_named_close(again.state_dict(), model.state_dict(), EXACT)


@pytest.mark.parametrize(
    "use",
    [pickle.dumps, lambda m: torch.save(m, io.BytesIO()), copy.copy, lambda m: pickle.dumps([m])],
    ids=["pickle", "save", "shallow", "inside"],
)
def test_pickles_and_shallow_copies_are_refused_with_a_remedy(nested, use):
    with pytest.raises(TypeError, match=r"\(NestedWrappedModule\).*save its state_dict.*copy\.deepcopy"):
        use(nested())
