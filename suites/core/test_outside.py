"""Weights that are read outside their unit, by its parent, a hook or the loss: as in DDP, or refused."""

import copy
import gc
import io
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lockstep.assertions import assert_named_close, local_part, named_gradients
from lockstep.conformance import Capability, Precision, require
from lockstep.conformance.models import KnownGradient
from lockstep.conformance.models.readers import (
    AFTER,
    BEFORE,
    Reader,
    TiedHead,
    checkpointed,
    checkpointed_reentrant,
    decay_term,
    tied_head,
)

pytestmark = pytest.mark.ranks(2)

BF16, F32 = torch.bfloat16, torch.float32


def decay_in_the_loss(model, output):
    return output.square().mean() + 0.1 * whole(model.wte.weight).square().sum()


def head_in_the_loss(model, output):
    return F.linear(output, whole(model.wte.weight)).square().mean()


def whole(weight):
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


SOME = [tied_head, decay_term, checkpointed]
KEPT = ["SHARD_GRAD_OP-flat", "SHARD_GRAD_OP-orig", "NO_SHARD-flat", "NO_SHARD-orig", "replicate"]
FREED = ["FULL_SHARD-flat", "FULL_SHARD-orig", "fully_shard"]
WHOLE = ["NO_SHARD-flat", "NO_SHARD-orig", "replicate"]
SHARDED = ["SHARD_GRAD_OP-flat", "SHARD_GRAD_OP-orig", *FREED]
LOSSES = [decay_in_the_loss, head_in_the_loss]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("read", AFTER)
def test_a_kept_weight_that_is_read_later_trains_as_in_ddp(check_reads, run_subtests, read):
    run_subtests({"front": KEPT}, check_reads, read=read)


@pytest.mark.parametrize("read", AFTER)
def test_what_fully_shard_keeps_is_read_later_as_in_ddp(check_reads, run_subtests, read):
    settings = {"front": ["fully_shard"], "reshard_after_forward": [False], "no_sync": [False, True]}
    run_subtests(settings, check_reads, read=read)


@pytest.mark.parametrize("read", AFTER)
def test_a_frozen_weight_that_is_read_later_trains_the_rest(check_reads, run_subtests, read):
    run_subtests({"front": KEPT}, check_reads, read=read, frozen=True)


@pytest.mark.parametrize("read", SOME)
def test_reads_of_a_kept_weight_accumulate_in_no_sync(check_reads, run_subtests, read):
    run_subtests({"front": KEPT}, check_reads, read=read, no_sync=True)


@pytest.mark.parametrize("read", [tied_head, checkpointed])
def test_each_backward_of_two_forwards_has_the_weight_that_was_read(
    world, engine, fronts, run_subtests, read
):
    """Also the second one, after the first has freed it."""
    require(engine, Capability.OUTSIDE_READS)
    tokens = torch.tensor([0, 3, 4], device=world.device)

    def claim(front):
        bare = Reader(read).to(world.device)
        model = fronts[front].shard(copy.deepcopy(bare))
        for loss in [model(tokens).square().mean() for _ in range(2)]:
            fronts[front].backward(model, loss)
            bare(tokens).square().mean().backward()
        assert_named_close(fronts[front].full_gradients(model), named_gradients(bare))

    run_subtests({"front": KEPT}, claim)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_an_evaluation_may_read_a_kept_weight(world, engine, fronts, run_subtests, frozen):
    require(engine, Capability.OUTSIDE_READS)
    tokens = torch.tensor([0, 3, 4], device=world.device)

    def claim(front):
        bare = Reader(tied_head, frozen).to(world.device)
        model = fronts[front].shard(copy.deepcopy(bare))
        with torch.no_grad():
            assert_named_close({"output": model(tokens)}, {"output": bare(tokens)})

    run_subtests({"front": KEPT}, claim)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_a_whole_weight_may_be_recomputed_with_though_its_unit_does_not_run(
    check_reads, run_subtests, use_reentrant
):
    def read(model, tokens):
        hidden = model.own(model.mlp(F.one_hot(tokens % 4, 4).float()))
        return checkpoint(lambda x: F.linear(x, model.wte.weight), hidden, use_reentrant=use_reentrant)

    run_subtests({"front": WHOLE}, check_reads, read=read)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("read", BEFORE)
def test_a_whole_weight_may_be_read_before_its_unit(check_reads, run_subtests, read, frozen):
    run_subtests({"front": WHOLE}, check_reads, read=read, frozen=frozen)


def error_of(check_reads, *args, **spec):
    # Not by `pytest.raises`, which keeps the traceback: up to torch 2.12 the hooks of a checkpoint whose
    # function raised last as long as its frame, and disturb the next case.
    try:
        check_reads(*args, **spec)
    except RuntimeError as error:
        return str(error)
    pytest.fail("nothing was refused")


def is_refused(check_reads, *args, **spec):
    """Check that the error names the parameter, its unit, the module that reads it, and a remedy."""
    text = error_of(check_reads, *args, **spec)
    assert "parameter 'wte.weight' of " in text
    assert "Embedding) is read by " in text
    assert any(reader in text for reader in ("Reader", "'mlp' (", "'wte' (", "'head' ("))
    assert "into one unit" in text


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", AFTER + BEFORE)
def test_a_weight_that_is_freed_is_refused_by_its_name(check_reads, run_subtests, read):
    run_subtests({"front": FREED}, lambda front: is_refused(check_reads, front, read))


class Trainer(nn.Module):
    """A module whose method runs a model, which is one of its modules, or is not."""

    def __init__(self, model, registers):
        super().__init__()
        self.models = nn.ModuleList([model]) if registers else [model]

    def step(self, tokens):
        return self.models[0](tokens)


def by_a_method(model, tokens):
    return model.head.forward(model.body(tokens), model.wte.weight)


def by_a_module_outside(model, tokens):
    return TiedHead().forward(model.body(tokens), model.wte.weight)


def in_a_thread(model, tokens):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(F.linear, model.body(tokens), model.wte.weight).result()


HEAD = r"head' \(TiedHead\)"
READ_BY = r"parameter 'wte\.weight' of .* is read by "


@pytest.mark.parametrize(
    ("read", "registers", "text"),
    [
        (by_a_method, False, rf"{READ_BY}'{HEAD} \("),
        (by_a_method, True, rf"parameter 'models\.0\.wte\.weight' of .* is read by 'models\.0\.{HEAD} \("),
        (by_a_module_outside, False, rf"{READ_BY}TiedHead \("),
        (in_a_thread, False, r"parameter 'weight' of .* is read by what no module runs \("),
    ],
    ids=["in_the_model", "in_the_trainer", "outside", "in_a_thread"],
)
def test_what_reads_a_freed_weight_is_named_as_in_the_outermost_module(
    world, engine, fronts, run_subtests, read, registers, text
):
    require(engine, Capability.OUTSIDE_READS)

    def claim(front):
        trainer = Trainer(fronts[front].shard(Reader(read).to(world.device)), registers)
        with pytest.raises(RuntimeError, match=text):
            trainer.step(torch.tensor([0, 3], device=world.device))

    run_subtests({"front": FREED}, claim)


@pytest.mark.parametrize("read", BEFORE)
def test_a_sharded_weight_is_refused_before_its_unit(check_reads, run_subtests, read):
    run_subtests({"front": SHARDED}, lambda front: is_refused(check_reads, front, read))


def test_a_weight_of_another_unit_may_be_printed_in_a_forward(world, fronts, run_subtests):
    def claim(front):
        printed = []

        def read(model, tokens):
            printed.append(f"{model.wte.weight!r} {model.mlp.weight}")
            return model.body(tokens)

        model = fronts[front].shard(Reader(read).to(world.device))
        output = model(torch.tensor([0, 3], device=world.device))
        assert (output.shape, len(printed)) == ((2, 4), 1)

    run_subtests({"front": [*KEPT, *FREED]}, claim)


def test_a_tensor_may_be_made_like_a_weight_of_another_unit(world, fronts, run_subtests):
    def claim(front):
        made = []

        def read(model, tokens):
            like = model.wte.weight
            made.extend((torch.ones_like(like), torch.zeros_like(like, dtype=BF16)))
            made.extend((torch.empty_like(like), torch.full_like(like, 2), like.new_ones(5, 4)))
            return model.body(tokens)

        model = fronts[front].shard(Reader(read).to(world.device))
        model(torch.tensor([0, 3], device=world.device))
        assert [(each.shape, each.dtype) for each in made] == [
            ((5, 4), dtype) for dtype in (F32, BF16, F32, F32, F32)
        ]
        for number, value in {0: 1, 1: 0, 3: 2, 4: 1}.items():
            assert (whole(made[number]) == value).all()

    run_subtests({"front": [*KEPT, *FREED]}, claim)


def test_a_weight_of_another_unit_is_a_whole_parameter_in_a_forward(world, fronts, run_subtests):
    def claim(front, frozen):
        seen = []

        def read(model, tokens):
            like = model.wte.weight
            seen.extend((isinstance(like, nn.Parameter), like.requires_grad, like.shape, like.dtype))
            return model.body(tokens)

        model = fronts[front].shard(Reader(read, frozen).to(world.device))
        model(torch.tensor([0, 3], device=world.device))
        assert seen == [True, not frozen, (5, 4), F32]

    run_subtests({"front": [*KEPT, *FREED], "frozen": [False, True]}, claim)


def test_what_a_hook_would_see_too_early_is_refused(world, engine, fronts, run_subtests):
    """Of gradients that come to a whole weight from the loss: before they are reduced."""
    require(engine, Capability.OUTSIDE_READS, Capability.WRAPPER)

    def claim(front):
        model = fronts[front].shard(Reader(Reader.body).to(world.device))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        output = model(torch.tensor([0, 3], device=world.device))
        with pytest.raises(RuntimeError, match=r"weight.*hook"):
            fronts[front].backward(model, decay_in_the_loss(model, output))

    run_subtests({"front": WHOLE}, claim)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_whole_weight_that_the_loss_reads_trains_as_in_ddp(check_reads, run_subtests, loss):
    settings = {"front": WHOLE, "no_sync": [False, True]}
    run_subtests(settings, check_reads, read=Reader.body, loss=loss)


def without_its_unit(model, tokens):
    return model.own(model.mlp(F.one_hot(tokens % 4, 4).float()))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_whole_weight_that_the_loss_alone_reads_trains_as_in_ddp(check_reads, run_subtests, loss):
    settings = {"front": WHOLE, "no_sync": [False, True]}
    run_subtests(settings, check_reads, read=without_its_unit, loss=loss)


def lookup_in_the_loss(model, output):
    rows = F.embedding(torch.tensor([0, 3], device=output.device), model.wte.weight, sparse=True)
    return output.square().mean() + rows.square().sum()


@pytest.mark.parametrize("read", [Reader.body, without_its_unit])
def test_the_loss_may_have_a_sparse_gradient_of_a_whole_weight(
    world, engine, check_reads, run_subtests, read
):
    def loss(model, output):
        if isinstance(model.wte.weight, DTensor):  # it has no sparse gradients
            require(engine, Capability.PLAIN_PARAMETERS)
        return lookup_in_the_loss(model, output)

    if world.backend == "shm" and read is without_its_unit:
        pytest.skip("DDP reduces a sparse gradient, and shm is for dense tensors")
    settings = {"front": ["NO_SHARD-orig"], "no_sync": [False, True]}
    run_subtests(settings, check_reads, read=read, loss=loss)


def test_a_sparse_gradient_follows_unreduced_ones_that_were_dropped(world, engine, fronts):
    require(engine, Capability.OUTSIDE_READS, Capability.UNSYNCED_GRADIENTS)
    bare = Reader(Reader.body).to(world.device)
    front = fronts["NO_SHARD-orig"]
    model = front.shard(copy.deepcopy(bare))
    tokens = torch.tensor([0, 3, 4], device=world.device)
    front.backward(model, model(tokens).square().mean())
    with front.no_sync(model):
        front.backward(model, lookup_in_the_loss(front.unwrapped(model), model(tokens)))
    model.zero_grad(set_to_none=True)
    front.backward(model, lookup_in_the_loss(front.unwrapped(model), model(tokens)))
    lookup_in_the_loss(bare, bare(tokens)).backward()
    assert_named_close(front.full_gradients(model), named_gradients(bare))


def test_the_loss_trains_a_whole_weight_of_a_model_that_was_converted(check_reads, run_subtests):
    run_subtests(
        {"front": WHOLE}, check_reads, read=Reader.body, loss=head_in_the_loss, prepare=nn.Module.float
    )


def test_a_parameter_that_outlives_its_model_has_gradients_of_its_own(world, fronts, run_subtests):
    def claim(front):
        model = fronts[front].shard(Reader(Reader.body).to(world.device))
        parameters = list(model.parameters())
        del model
        gc.collect()
        for parameter in parameters:
            torch.autograd.backward((3 * parameter).sum())  # the model is gone: no engine has a part in it
            assert (local_part(parameter.grad) == 3).all()

    run_subtests({"front": [*WHOLE, *FREED]}, claim)


def test_a_parameter_that_is_saved_alone_belongs_to_no_model(world, fronts, run_subtests):
    def claim(front):
        model = fronts[front].shard(nn.Linear(4, 4, bias=False).to(world.device))
        for parameter in model.parameters():
            file = io.BytesIO()
            torch.save(parameter, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            assert torch.equal(local_part(loaded), local_part(parameter))
            if not isinstance(loaded, DTensor):
                other = KnownGradient(1)
                other.weight = loaded
                fronts[front].shard(other)

    run_subtests({"front": [*WHOLE, *FREED]}, claim)


def test_a_refused_gradient_of_a_flat_parameter_names_whose_it_is(world, engine, fronts):
    require(engine, Capability.OUTSIDE_READS, Capability.WRAPPER)
    model = fronts["FULL_SHARD-flat"].shard(nn.Linear(4, 4).to(world.device))
    model(torch.ones(4, device=world.device))
    (flat,) = model.parameters()
    held = "bias" if world.rank else "weight"
    with pytest.raises(RuntimeError, match=rf"parameter '{held}' of .*this rank's shard"):
        engine.backward(model, flat[-2:].sum())


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_that_comes_to_a_shard_is_refused(world, fronts, check_reads, run_subtests, loss):
    """Ranks have other parts of the weight, and other losses: no reduction makes one gradient of these."""

    def claim(front):
        # A part of the weight does not fit the head. Of a DTensor, the loss reads the whole.
        model = fronts[front].shard(Reader(Reader.body).to(world.device))
        fits = loss is decay_in_the_loss or isinstance(next(model.parameters()), DTensor)
        text = (
            r"parameter 'weight' of .*Embedding.*this rank's shard"
            if fits
            else "mat1|size|shape|must match|dimension"
        )
        with pytest.raises(RuntimeError, match=text):
            check_reads(front, Reader.body, loss)

    run_subtests({"front": SHARDED}, claim)


def test_a_gradient_that_comes_to_a_shard_before_any_forward_is_refused(world, engine, fronts, run_subtests):
    require(engine, Capability.OUTSIDE_READS)

    def claim(front):
        model = fronts[front].shard(nn.Linear(4, 4).to(world.device))
        with pytest.raises(RuntimeError, match="this rank's shard"):
            fronts[front].backward(model, sum(p.square().sum() for p in model.parameters()))

    run_subtests({"front": SHARDED}, claim)


# how the model is sharded


@pytest.mark.ranks(4)
@pytest.mark.parametrize("read", SOME)
def test_four_ranks_train_as_in_ddp_what_reads_a_kept_weight(check_reads, run_subtests, read):
    run_subtests({"front": KEPT, "no_sync": [False, True]}, check_reads, read=read)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", AFTER)
def test_an_offloaded_weight_that_is_kept_is_read_as_in_ddp(check_reads, run_subtests, read):
    run_subtests({"front": KEPT, "offload": [True]}, check_reads, read=read)


@pytest.mark.parametrize("read", AFTER + BEFORE)
def test_an_offloaded_weight_that_is_freed_is_refused(check_reads, run_subtests, read):
    run_subtests({"front": FREED}, lambda front: is_refused(check_reads, front, read, offload=True))


@pytest.fixture
def in_replicas(world, check_reads, hybrid_front):
    """`check_reads` of two replicas of half of the ranks each."""

    def check(read, **spec):
        # Made for each case, as the process groups of one that failed are gone.
        mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
        check_reads(hybrid_front, read, mesh=mesh, **spec)

    return check


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("hybrid_front", ["_HYBRID_SHARD_ZERO2", "fully_shard"], indirect=True)
@pytest.mark.parametrize("read", AFTER)
def test_replicas_that_keep_a_weight_read_it_as_in_ddp(in_replicas, run_subtests, hybrid_front, read):
    own = (
        {"reshard_after_forward": [False]}
        if hybrid_front.is_composable
        else {"use_orig_params": [False, True]}
    )
    settings = {"no_sync": [False, True], **own}
    run_subtests(settings, in_replicas, read=read)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("hybrid_front", ["HYBRID_SHARD", "fully_shard"], indirect=True)
@pytest.mark.parametrize("read", AFTER + BEFORE)
def test_replicas_that_free_a_weight_refuse_that_it_is_read(in_replicas, read):
    is_refused(in_replicas, read)


LOW = {
    "bf16": Precision(BF16),
    "bf16_reduced_in_fp32": Precision(BF16, F32),
    "reduced_in_bf16": Precision(reduce_dtype=BF16),
}


@pytest.fixture
def check_in_low_precision(world, engine, batches, fronts):
    """Train a reader in two steps; it learns what a bare one learns that computes in the same dtypes.

    Bare ones are trained once for all cases of a test.
    """
    require(engine, Capability.OUTSIDE_READS)
    make = batches(lambda generator: torch.randint(5, (3,), generator=generator))

    sgd = partial(torch.optim.SGD, lr=0.01)

    def reader(read):
        torch.manual_seed(0)
        return Reader(read).to(world.device)

    @cache
    def learned(read, precision):
        bare, wire = reader(read), precision.reduction_dtype
        optimizer = sgd(bare.parameters())
        for step in range(2):
            computed = copy.deepcopy(bare).to(precision.param_dtype or F32)
            computed(make(step)).float().square().mean().backward()
            found = [torch.zeros_like(p) if p.grad is None else p.grad for p in computed.parameters()]
            gradients = world.gather([gradient.to(wire) for gradient in found])
            for p, *of_ranks in zip(bare.parameters(), *gradients, strict=True):
                mean = sum(gradient.float() for gradient in of_ranks) / world.size
                p.grad = mean.to(world.device, wire).to(p.dtype)
            optimizer.step()
        return dict(bare.named_parameters())

    def check(front, read, precision):
        model = fronts[front].shard(reader(read), precision=precision)
        optimizer = fronts[front].optimizer(model, sgd)
        for step in range(2):
            fronts[front].backward(model, model(make(step)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert_named_close(fronts[front].full_parameters(model), learned(read, precision))

    return check


# The backward inside of a reentrant one has its own sum of gradients in low precision, rounded once more.
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", [read for read in AFTER if read is not checkpointed_reentrant])
@pytest.mark.parametrize("precision", LOW.values(), ids=LOW)
def test_a_kept_weight_is_read_in_the_dtype_of_computation(
    check_in_low_precision, run_subtests, read, precision
):
    run_subtests({"front": KEPT}, check_in_low_precision, read=read, precision=precision)


@pytest.mark.parametrize("read", BEFORE)
def test_a_whole_weight_that_is_cast_is_refused_before_its_unit(check_reads, run_subtests, read):
    """A copy in low precision would have to be made for this read alone."""
    run_subtests({"front": WHOLE}, lambda front: is_refused(check_reads, front, read, precision=LOW["bf16"]))


@pytest.mark.parametrize("read", BEFORE)
def test_a_whole_weight_may_be_read_early_if_only_gradients_are_cast(
    check_in_low_precision, run_subtests, read
):
    run_subtests({"front": WHOLE}, check_in_low_precision, read=read, precision=LOW["reduced_in_bf16"])


class Hidden(nn.Module):
    """Keeps what it computes with the weight of a unit whose forward it does not call."""

    units = ("inner",)

    def __init__(self):
        super().__init__()
        self.inner, self.own = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        self.loss = self.inner.weight.square().sum()


def test_a_loss_that_forward_does_not_return_may_read_a_weight_that_is_kept(world, engine, shard):
    bare = Hidden().to(world.device)
    reference = copy.deepcopy(bare)
    model = shard(bare, "NO_SHARD")
    for module in (model, reference):
        module(torch.ones(1, 4, device=world.device))
    engine.backward(model, bare.loss)
    reference.loss.backward()
    assert_named_close(engine.full_gradients(model), named_gradients(reference))
