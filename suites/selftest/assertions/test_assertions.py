"""Assertions on ranks: parity of trainings and of shards, and agreement."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import (
    Trainee,
    Training,
    assert_parity,
    assert_same_across_ranks,
    assert_sharded_parity,
    fail_together,
    named_gradients,
    per_rank_batches,
    train,
)
from lockstep.assertions.agreement import gathered, largest


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))


def squared_output(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture
def training(world) -> Callable[..., Training]:
    def make(**changes: Any) -> Training:
        batches = per_rank_batches(lambda g: torch.randn(5, 4, generator=g).to(world.device), 0, world.rank)
        return Training(**({"batches": batches, "loss": squared_output} | changes))

    return make


@pytest.fixture
def ddp(world) -> Callable[..., Trainee]:
    def make(**changes: Any) -> Trainee:
        return Trainee(DistributedDataParallel(make_model().to(world.device)), **changes)

    return make


# parity of trainings


@pytest.mark.ranks(2)
def test_fsdp2_has_parity_with_ddp(world, training, ddp):
    model = make_model().to(world.device)
    fully_shard(model, mesh=world.mesh(2))
    candidate = Trainee(model, full_gradients=named_gradients)
    assert_parity(ddp(full_gradients=named_gradients), candidate, training())


@pytest.mark.ranks(2)
def test_a_model_that_does_not_reduce_fails_with_rank_and_step(world, training, ddp):
    lonely = Trainee(make_model().to(world.device))
    with pytest.raises(AssertionError) as failure:
        assert_parity(ddp(), lonely, training())
    message = str(failure.value)
    for rank in range(2):
        assert re.search(rf"rank {rank}: step 1, loss: .*Absolute difference: [\d.e-]+", message)
        assert re.search(
            rf"rank {rank}: after step 2, parameter 0.weight: .*"
            r"Greatest absolute difference: [\d.e-]+ at index \(\d, \d\).*"
            r"Greatest relative difference: [\d.e-]+ at index \(\d, \d\)",
            message,
        )
    assert "step 0, loss" not in message


@pytest.mark.ranks(2)
def test_difference_on_one_rank_fails_on_every_rank(world, training, ddp):
    candidate = ddp()

    def loss_off_on_rank_1(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squared_output(model, batch) + 0.5 * (world.rank == 1 and model is candidate.model)

    with pytest.raises(AssertionError, match=r"\Arank 1: step 0, loss: .*Absolute difference: 0\.5"):
        assert_parity(ddp(), candidate, training(loss=loss_off_on_rank_1))


@pytest.mark.ranks(2)
def test_gradients_are_compared_at_each_step(training, ddp):
    def doubled(model: nn.Module) -> Mapping[str, torch.Tensor | None]:
        return {name: grad * 2 for name, grad in named_gradients(model).items()}

    with pytest.raises(AssertionError, match=r"rank 0: step 0, gradient 0\.weight: Mismatched elements"):
        assert_parity(ddp(full_gradients=named_gradients), ddp(full_gradients=doubled), training())
    assert_parity(ddp(full_gradients=named_gradients), ddp(full_gradients=named_gradients), training())


@pytest.mark.ranks(2)
def test_gradients_of_one_trainee_only_are_refused(training, ddp):
    with pytest.raises(ValueError, match="both trainees"):
        assert_parity(ddp(full_gradients=named_gradients), ddp(), training())


@pytest.mark.ranks(2)
def test_other_initial_weights_fail_before_training(training, ddp):
    candidate = ddp()
    with torch.no_grad():
        candidate.model.module[2].bias += 1
    with pytest.raises(AssertionError, match=r"rank 0: before step 0, parameter 2\.bias: "):
        assert_parity(ddp(), candidate, training())


@pytest.mark.ranks(2)
def test_parameters_that_never_move_fail(training, ddp):
    still = training(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    with pytest.raises(AssertionError, match="no parameter of the reference moved in 3 steps"):
        assert_parity(ddp(), ddp(), still)


@pytest.mark.ranks(2)
def test_same_data_on_all_ranks_fails_unless_it_is_said(training, ddp):
    same = per_rank_batches(lambda g: torch.randn(5, 4, generator=g), 0, rank=0)
    with pytest.raises(AssertionError, match="the losses are the same on all ranks"):
        assert_parity(ddp(), ddp(), training(batches=same))
    assert_parity(ddp(), ddp(), training(batches=same, same_data=True))


@pytest.mark.ranks(2)
def test_same_data_fails_where_the_reference_is_a_copied_run(training, ddp):
    same = training(batches=per_rank_batches(lambda g: torch.randn(5, 4, generator=g), 0, rank=0))
    with pytest.raises(AssertionError, match="the losses are the same on all ranks"):
        assert_parity(dataclasses.replace(train(ddp(), same)), ddp(), same)


@pytest.mark.ranks(2)
def test_other_dtype_fails_unless_it_is_allowed(world, training, ddp):
    wide = Trainee(DistributedDataParallel(make_model().to(world.device, torch.float64)))

    def loss_in_own_dtype(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squared_output(model, batch.to(next(model.parameters()).dtype))

    with pytest.raises(AssertionError, match=r"'dtype' do not match: torch.float64 != torch.float32"):
        assert_parity(ddp(), wide, training(loss=loss_in_own_dtype))
    assert_parity(ddp(), wide, training(loss=loss_in_own_dtype, same_dtype=False))


@pytest.mark.ranks(2)
def test_dropout_is_the_same_in_both_trainings(world, training):
    def with_dropout() -> Trainee:
        model = nn.Sequential(*make_model(), nn.Dropout(0.5)).to(world.device)
        return Trainee(DistributedDataParallel(model))

    assert_parity(with_dropout(), with_dropout(), training())


@pytest.mark.ranks(2)
def test_training_steps_through_the_scaler(training, ddp):
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert_parity(ddp(), ddp(scaler=grad_scaler), training())
    assert grad_scaler.get_scale() == 1024.0


@pytest.mark.ranks(2)
def test_gradients_are_compared_unscaled(training, ddp):
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = ddp(full_gradients=named_gradients)
    assert_parity(plain, ddp(full_gradients=named_gradients, scaler=grad_scaler), training())


@pytest.mark.ranks(2)
def test_after_step_runs_once_per_step(training, ddp):
    seen = []
    assert_parity(ddp(), ddp(after_step=seen.append), training(steps=4))
    assert len(seen) == 4


@pytest.mark.ranks(2)
def test_a_trained_reference_serves_many_candidates(training, ddp):
    reference = train(ddp(full_gradients=named_gradients), training())
    for _ in range(2):
        assert_parity(reference, ddp(full_gradients=named_gradients), training())
    with pytest.raises(AssertionError, match=r"rank 0: step 1, loss: "):
        assert_parity(reference, ddp(full_gradients=named_gradients, after_step=nudge), training())
    with pytest.raises(ValueError, match="both trainees give full_gradients"):
        assert_parity(reference, ddp(), training())


def nudge(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).add_(0.5)


def test_training_of_no_steps_fails():
    nothing = Training(batches=lambda step: None, loss=lambda model, batch: torch.ones(()), steps=0)
    with pytest.raises(AssertionError, match="no step"):
        assert_parity(Trainee(make_model()), Trainee(make_model()), nothing)


def test_batches_differ_by_seed_rank_and_step_and_repeat():
    keys = [(seed, rank, step) for seed in range(2) for rank in range(2) for step in range(2)]
    draw = {k: per_rank_batches(lambda g: torch.randn((), generator=g).item(), *k[:2])(k[2]) for k in keys}
    assert len(set(draw.values())) == len(keys)
    assert draw[1, 0, 1] == per_rank_batches(lambda g: torch.randn((), generator=g).item(), 1, 0)(1)


# parity of shards


def backward_both(world) -> tuple[nn.Module, nn.Module]:
    reference, sharded = make_model().to(world.device), make_model().to(world.device)
    fully_shard(sharded, mesh=world.mesh(2))
    for model in (reference, sharded):
        squared_output(model, torch.ones(5, 4, device=world.device)).backward()
    return sharded, reference


@pytest.mark.ranks(2)
def test_shards_agree_with_the_reference(world):
    assert_sharded_parity(*backward_both(world))


@pytest.mark.ranks(2)
def test_a_gradient_that_differs_in_one_shard_fails_everywhere(world):
    sharded, reference = backward_both(world)
    if world.rank == 1:
        sharded[0].weight.grad.to_local()[0, 2] += 1
    with pytest.raises(
        AssertionError, match=r"\Arank 1: 0\.weight\.grad: .*absolute difference: 1\.\d* at index \(0, 2\)"
    ):
        assert_sharded_parity(sharded, reference)


@pytest.mark.ranks(2)
def test_parameter_that_is_not_sharded_fails(world):
    with pytest.raises(AssertionError, match=r"0\.weight: not a DTensor"):
        assert_sharded_parity(make_model(), make_model())


@pytest.mark.ranks(2)
def test_a_parameter_that_the_sharded_model_lacks_fails(world):
    sharded, reference = backward_both(world)
    reference.register_parameter("more", nn.Parameter(torch.ones(2)))
    with pytest.raises(AssertionError, match=r"rank 0: more: missing"):
        assert_sharded_parity(sharded, reference)


# agreement of ranks


@pytest.mark.ranks(2)
def test_equal_replicas_agree(world):
    assert_same_across_ranks({"w": torch.arange(4.0, device=world.device), "empty": torch.empty(0)})


@pytest.mark.ranks(2)
def test_a_disagreement_names_rank_tensor_and_difference(world):
    w = torch.ones(2, 2, device=world.device)
    w[1, 0] += world.rank * 0.5
    with pytest.raises(
        AssertionError,
        match=r"rank 1 differs from rank 0 in w: Mismatched elements: 1 / 4 .*"
        r"absolute difference: 0\.5 at index \(1, 0\).*relative difference: 0\.5 at index \(1, 0\)",
    ):
        assert_same_across_ranks({"same": torch.ones(1), "w": w})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (([0.0], [-0.0]), "the sign of a zero"),
        (([1.0], [1.0, 1.0]), "shape"),
        (([1.0], [1]), "dtype"),
        (([1.0], None), r"w: missing on ranks \[1\]"),
    ],
)
def test_any_other_difference_in_bits_is_a_disagreement(world, values, reason):
    mine = values[world.rank]
    tensors = {"other": torch.ones(1)} | ({} if mine is None else {"w": torch.tensor(mine)})
    with pytest.raises(AssertionError, match=reason):
        assert_same_across_ranks(tensors)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", [5, 6])
def test_five_names_that_differ_are_listed(world, count):
    tensors = {f"w{n}": torch.full((1,), float(world.rank)) for n in range(count)}
    with pytest.raises(AssertionError) as failure:
        assert_same_across_ranks(tensors)
    lines = str(failure.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:5]] == [
        f"rank 1 differs from rank 0 in w{n}" for n in range(5)
    ]
    assert lines[5:] == ["and more names"] * (count - 5)


@pytest.mark.ranks(2)
def test_agreement_about_nothing_fails(world):
    with pytest.raises(AssertionError, match=r"no tensors to compare on ranks \[1\]"):
        assert_same_across_ranks({} if world.rank else {"w": torch.ones(1)})


def test_agreement_of_one_rank_fails():
    with pytest.raises(AssertionError, match="one rank has nothing to agree with"):
        assert_same_across_ranks({"w": torch.ones(1)})


@pytest.mark.ranks(2)
def test_ranks_fail_together(world):
    with pytest.raises(AssertionError, match=r"\Arank 1: bad\Z"):
        fail_together(["bad"] if world.rank == 1 else [])
    fail_together([])
    dist.barrier()  # no rank was left in a collective


def test_one_process_is_rank_0_of_1():
    with pytest.raises(AssertionError, match=r"\Arank 0: one\nrank 0: two\Z"):
        fail_together(["one", "two"])
    fail_together([])
    assert gathered("value") == {0: "value"}
    assert largest(torch.tensor([2, 1]), None).tolist() == [2, 1]
