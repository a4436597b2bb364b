"""Weights that are read outside their unit, by its parent, a hook or the loss: as in DDP, or refused."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from harness.assertions import assert_named_close

pytestmark = pytest.mark.ranks(2)


class Reader(nn.Module):
    """A token embedding, whose weight `read` reads too; it is a unit below the root, as is a layer."""

    units = ("wte", "mlp")

    def __init__(self, read, frozen=False):
        super().__init__()
        self.wte, self.mlp, self.own = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.wte.requires_grad_(not frozen)
        self.read = read

    def body(self, tokens):
        return self.own(self.mlp(self.wte(tokens)))

    def forward(self, tokens):
        return self.read(self, tokens)


def tied_head(model, tokens):
    return F.linear(model.body(tokens), model.wte.weight)


def decay_term(model, tokens):
    return model.body(tokens).square() + model.wte.weight.square().sum()


def detached(model, tokens):
    return F.linear(model.body(tokens), model.wte.weight.detach())


def between_two_calls(model, tokens):
    hidden = F.linear(model.wte(tokens), model.wte.weight).sum(-1, keepdim=True)
    return model.own(model.mlp(hidden * model.wte(tokens)))


def checkpointed(model, tokens, use_reentrant=False):
    def head(hidden):
        return F.linear(hidden, model.wte.weight).square()

    return checkpoint(head, model.body(tokens), use_reentrant=use_reentrant)


def checkpointed_reentrant(model, tokens):
    return checkpointed(model, tokens, use_reentrant=True)


def checkpointed_with_the_unit(model, tokens):
    def both(start):
        return F.linear(model.mlp(model.wte(tokens) + start), model.wte.weight)

    return checkpoint(both, model.own.weight.sum(), use_reentrant=False)


def in_a_hook(model, tokens):
    handle = model.mlp.register_forward_hook(lambda mlp, args, output: output * model.wte.weight.mean())
    try:
        return model.body(tokens)
    finally:
        handle.remove()


def before_its_unit(model, tokens):
    factor = model.wte.weight.square().sum()
    return model.body(tokens) * factor


def detached_before_its_unit(model, tokens):
    head = F.linear(model.wte.weight.detach(), model.own.weight)
    return F.linear(model.body(tokens), head)


AFTER = [
    tied_head,
    decay_term,
    detached,
    between_two_calls,
    checkpointed,
    checkpointed_reentrant,
    checkpointed_with_the_unit,
    in_a_hook,
]
BEFORE = [before_its_unit, detached_before_its_unit]


def mean_loss(model, output):
    return output.square().mean()


def decay_in_the_loss(model, output):
    return output.square().mean() + 0.1 * whole(model.wte.weight).square().sum()


def head_in_the_loss(model, output):
    return F.linear(output, whole(model.wte.weight)).square().mean()


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.fixture
def check_training(world, fronts):
    """Train two steps of two microbatches, the first without sync, and compare with the bare model."""

    def check(front, read, loss=mean_loss, frozen=False, no_sync=False, **spec):
        torch.manual_seed(0)
        bare = Reader(read, frozen).to(world.device)
        model = fronts[front].shard(copy.deepcopy(bare), **spec)
        inner = next(module for module in model.modules() if isinstance(module, Reader))
        sgd = partial(torch.optim.SGD, lr=0.001)
        optimizers = [sgd(bare.parameters()), fronts[front].optimizer(model, sgd)]
        for step in range(2):
            for last in (False, True):
                generator = torch.Generator().manual_seed(10 * step + 2 * world.rank + last)
                tokens = torch.randint(5, (3,), generator=generator).to(world.device)
                loss(bare, bare(tokens)).backward()
                with fronts[front].no_sync(model) if no_sync and not last else nullcontext():
                    fronts[front].backward(model, loss(inner, model(tokens)))
            for parameter in bare.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world.size
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_named_close(fronts[front].full_parameters(model), dict(bare.named_parameters()))

    return check


KEPT = ["SHARD_GRAD_OP-flat", "SHARD_GRAD_OP-orig", "NO_SHARD-flat", "NO_SHARD-orig", "replicate"]
FREED = ["FULL_SHARD-flat", "FULL_SHARD-orig", "fully_shard"]
WHOLE = ["NO_SHARD-flat", "NO_SHARD-orig", "replicate"]
SHARDED = ["SHARD_GRAD_OP-flat", "SHARD_GRAD_OP-orig", *FREED]
LOSSES = [decay_in_the_loss, head_in_the_loss]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("read", AFTER)
def test_a_kept_weight_that_is_read_later_trains_as_in_ddp(check_training, run_subtests, read):
    run_subtests({"front": KEPT}, check_training, read=read)


@pytest.mark.parametrize("read", AFTER)
def test_what_fully_shard_keeps_is_read_later_as_in_ddp(check_training, run_subtests, read):
    settings = {"front": ["fully_shard"], "reshard_after_forward": [False], "no_sync": [False, True]}
    run_subtests(settings, check_training, read=read)


@pytest.mark.parametrize("read", AFTER)
def test_a_frozen_weight_that_is_read_later_trains_the_rest(check_training, run_subtests, read):
    run_subtests({"front": KEPT}, check_training, read=read, frozen=True)


@pytest.mark.parametrize("read", [tied_head, decay_term, checkpointed])
def test_reads_of_a_kept_weight_accumulate_in_no_sync(check_training, run_subtests, read):
    run_subtests({"front": KEPT}, check_training, read=read, no_sync=True)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("read", BEFORE)
def test_a_whole_weight_may_be_read_before_its_unit(check_training, run_subtests, read, frozen):
    run_subtests({"front": WHOLE}, check_training, read=read, frozen=frozen)


def is_refused(check_training, front, *args):
    """Check that the error names the parameter, its unit, the module that reads it, and a remedy."""
    with pytest.raises(RuntimeError) as caught:
        check_training(front, *args)
    text = str(caught.value)
    assert "parameter 'wte.weight' of " in text
    assert "Embedding) is read by " in text
    assert "Reader" in text or "'mlp' (" in text
    assert "into one unit" in text


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", AFTER + BEFORE)
def test_a_weight_that_is_freed_is_refused_by_its_name(check_training, run_subtests, read):
    run_subtests({"front": FREED}, lambda front: is_refused(check_training, front, read))


@pytest.mark.parametrize("read", BEFORE)
def test_a_sharded_weight_is_refused_before_its_unit(check_training, run_subtests, read):
    run_subtests({"front": SHARDED}, lambda front: is_refused(check_training, front, read))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_whole_weight_that_the_loss_reads_trains_as_in_ddp(check_training, run_subtests, loss):
    settings = {"front": WHOLE, "no_sync": [False, True]}
    run_subtests(settings, check_training, read=Reader.body, loss=loss)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_that_comes_to_a_shard_is_refused(world, fronts, check_training, run_subtests, loss):
    """Ranks have other parts of the weight, and other losses: no reduction makes one gradient of these."""

    def claim(front):
        # A part of the weight does not fit the head. Of a DTensor, the loss reads the whole.
        model = fronts[front].shard(Reader(Reader.body).to(world.device))
        fits = loss is decay_in_the_loss or isinstance(next(model.parameters()), DTensor)
        text = r"parameter 'weight' of .*Embedding" if fits else "mat1|size|shape|must match|dimension"
        with pytest.raises(RuntimeError, match=text):
            check_training(front, Reader.body, loss)

    run_subtests({"front": SHARDED}, claim)
