"""Assertions: values that they accept and refuse, and refusals that say where and by how much."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import (
    Tolerance,
    Trainee,
    Training,
    assert_buffer_dtypes,
    assert_gradient_dtypes,
    assert_named_close,
    assert_parameter_dtypes,
    assert_parity,
    assert_same_across_ranks,
    assert_sharded_parity,
    fail_together,
    named_gradients,
    per_rank_batches,
    train,
)
from lockstep.assertions.agreement import gathered, largest
from lockstep.assertions.closeness import differences

F16, F32 = torch.float16, torch.float32


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


# dtypes


def test_dtypes_that_are_as_expected_pass():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).half())
    assert_parameter_dtypes(model, {"1.*": F16, "*": F32})
    assert_buffer_dtypes(model, F16)


def test_each_wrong_dtype_is_listed_with_the_expected_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(AssertionError) as failure:
        assert_parameter_dtypes(model, F32)
    assert str(failure.value).splitlines() == [
        "parameter dtypes:",
        "1.weight is torch.float16, expected torch.float32",
        "1.bias is torch.float16, expected torch.float32",
    ]


def test_gradient_dtype_is_seen():
    model = nn.Linear(2, 2).half()
    model.weight.grad = torch.ones(2, 2, dtype=F16)
    assert_gradient_dtypes(model, F16)
    with pytest.raises(AssertionError, match=r"weight is torch.float16, expected torch.float32"):
        assert_gradient_dtypes(model, F32)


def test_pattern_that_fits_nothing_fails():
    with pytest.raises(AssertionError, match=r"no parameter is named like 'typo\.\*'"):
        assert_parameter_dtypes(nn.Linear(2, 2), {"typo.*": F16, "*": F32})


def test_patterns_count_in_order_and_wrong_ones_come_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(AssertionError) as failure:
        assert_parameter_dtypes(model, {"?.bias": F16, "0.*": F32, "1.bias": F32, "typo": F16})
    assert str(failure.value).splitlines() == [
        "parameter dtypes:",
        "no parameter is named like '1.bias'",
        "no parameter is named like 'typo'",
        "0.bias is torch.float32, expected torch.float16",
        "1.weight is torch.float32, and no pattern matches it",
        "1.bias is torch.float32, expected torch.float16",
    ]
    with pytest.raises(AssertionError, match=r"\Abuffer dtypes:\n1\.running_mean is torch.float32, expected"):
        assert_buffer_dtypes(model, F16)


def test_name_without_a_pattern_fails():
    with pytest.raises(AssertionError, match=r"bias is torch.float32, and no pattern"):
        assert_parameter_dtypes(nn.Linear(2, 2), {"weight": F32})


@pytest.mark.parametrize(
    ("check", "module"),
    [
        (assert_parameter_dtypes, nn.ReLU()),
        (assert_gradient_dtypes, nn.Linear(2, 2)),
        (assert_buffer_dtypes, nn.Linear(2, 2)),
    ],
)
def test_dtype_check_that_looked_at_nothing_fails(check, module):
    with pytest.raises(AssertionError, match="there is no floating-point"):
        check(module, F32)


# closeness


def test_tensors_on_meta_agree_in_shape():
    assert_named_close({"w": torch.ones(3, device="meta")}, {"w": torch.ones(3, device="meta")})
    with pytest.raises(AssertionError, match="shape"):
        assert_named_close({"w": torch.ones(3, device="meta")}, {"w": torch.ones(4, device="meta")})


def test_default_tolerance_is_the_row_of_the_looser_dtype():
    close, far = torch.tensor([1.0005], dtype=F16), torch.tensor([1.01], dtype=F16)
    one = torch.ones(1)
    assert_named_close({"w": close}, {"w": one}, same_dtype=False)
    with pytest.raises(AssertionError, match=r"w: .*absolute difference"):
        assert_named_close({"w": far}, {"w": one}, same_dtype=False)


def test_another_dtype_is_a_difference_unless_that_is_allowed():
    one, same = {"w": torch.ones(1)}, {"w": torch.ones(1, dtype=F16)}
    assert differences(same, one, same_dtype=False) == []
    assert len(differences(same, one)) == 1
    with pytest.raises(AssertionError, match=r"w: .*float16"):
        assert_named_close(same, one)


def test_integers_are_compared_exactly():
    with pytest.raises(AssertionError, match="n: "):
        assert_named_close({"n": torch.tensor([10**6])}, {"n": torch.tensor([10**6 + 1])})


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-7), (F32, 1.3e-6), (F16, 1e-3), (torch.bfloat16, 1.6e-2), (torch.complex128, 1e-7)],
)
def test_a_dtype_has_its_row_of_tolerances(dtype, rtol):
    expected = {"w": torch.full((1,), 1000.0, dtype=torch.complex128 if dtype.is_complex else torch.float64)}
    for of_rtol, count in (0.9, 0), (1.1, 1):
        actual = {"w": expected["w"] * (1 + of_rtol * rtol)}
        assert len(differences(actual, expected, dtype)) == count


def test_the_looser_row_is_taken_whichever_tensor_has_it():
    one, close = torch.ones(1), torch.tensor([1.0005], dtype=F16)
    assert differences({"w": one}, {"w": close}, same_dtype=False) == []


def test_a_dtype_without_a_row_needs_a_tolerance():
    one, four = ({"w": torch.tensor([value]).to(torch.float8_e8m0fnu)} for value in (1.0, 4.0))
    with pytest.raises(
        ValueError, match=r"\ATOLERANCES has no row for torch\.float8_e8m0fnu: pass a Tolerance\Z"
    ):
        differences(one, one)
    assert differences(one, one, Tolerance(0.0, 0.0)) == []
    assert differences(one, four, Tolerance(0.0, 0.0)) != []
    assert differences(one, four, Tolerance(3.0, 0.0)) == []


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float8_e4m3fn, 0.125),
        (torch.float8_e4m3fnuz, 0.125),
        (torch.float8_e5m2, 0.25),
        (torch.float8_e5m2fnuz, 0.25),
    ],
)
def test_eight_bit_floats_may_differ_by_a_unit(dtype, unit):
    one, next_one, beyond = ({"w": torch.tensor([1 + n * unit]).to(dtype)} for n in range(3))
    assert differences(next_one, one) == []
    assert differences(next_one, one, Tolerance(0.0, 0.0)) != []
    [difference] = differences(beyond, one)
    assert f"Greatest absolute difference: {2 * unit} at index (0,)" in difference
    smallest = {"w": torch.tensor([1], dtype=torch.uint8).view(dtype)}
    assert differences(smallest, {"w": torch.zeros(1).to(dtype)}) == []
    [difference] = differences(one, {"w": torch.ones(1)})
    assert difference.startswith("w: The values for attribute 'dtype' do not match")
    assert differences(one, {"w": torch.ones(1)}, same_dtype=False) == []


def test_packed_floats_are_compared_by_their_bits():
    one, other = (
        {"w": torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)} for bits in ([1, 2], [1, 3])
    )
    assert differences(one, one, Tolerance(0.0, 0.0)) == []
    assert differences(one, other, Tolerance(0.0, 0.0)) != []


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (assert_named_close, ({"w": torch.ones(1)}, {"w": torch.zeros(1)})),
        (assert_parameter_dtypes, (nn.Linear(1, 1), F16)),
        (assert_gradient_dtypes, (nn.Linear(1, 1), F16)),
        (assert_buffer_dtypes, (nn.BatchNorm1d(1), F16)),
    ],
)
def test_a_failed_assertion_points_to_its_call(check, given):
    with pytest.raises(AssertionError) as failed:
        check(*given)
    assert [entry.path for entry in failed.traceback.filter(failed)] == [Path(__file__)]


def test_tensors_that_are_not_plain_are_compared():
    sparse = {"w": torch.tensor([1.0, 0.0]).to_sparse()}
    assert differences(sparse, sparse) == []
    assert differences({"w": nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)}) == []
    assert differences({"w": nn.Parameter(torch.ones(2))}, {"w": torch.zeros(2)}) != []
    assert differences({"w": torch.tensor([1, 0])}, {"w": torch.tensor([1.0, 0.0])}) == [
        "w: The values for attribute 'dtype' do not match: torch.int64 != torch.float32"
    ]


def test_differences_are_in_order_a_line_for_each_name():
    expected = {"a": torch.ones(2), "b": None, "c": torch.ones(1), "d": torch.ones(()), "e": None}
    actual = {
        "f": None,
        "e": None,
        "d": torch.zeros(()),
        "b": torch.ones(2, 3),
        "a": torch.tensor([1.0, 2.0]),
    }
    assert differences(actual, expected) == [
        "c: missing",
        "f: not expected",
        "a: Mismatched elements: 1 / 2 (50.0%);"
        " Greatest absolute difference: 1.0 at index (1,) (up to 1e-05 allowed);"
        " Greatest relative difference: 1.0 at index (1,) (up to 1.3e-06 allowed)",
        "b: a tensor [2, 3], expected None",
        "d: Expected 1.0 but got 0.0;"
        " Absolute difference: 1.0 (up to 1e-05 allowed);"
        " Relative difference: 1.0 (up to 1.3e-06 allowed)",
    ]


def test_given_tolerance_rules():
    two, three = {"w": torch.full((1,), 2.0)}, {"w": torch.full((1,), 3.0)}
    assert_named_close(two, three, Tolerance(atol=1.0, rtol=0.0))
    with pytest.raises(AssertionError, match="w: "):
        assert_named_close(two, three, Tolerance(atol=0.9, rtol=0.0))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({}, {"w": torch.ones(1)}, "w: missing"),
        ({"w": torch.ones(1), "v": torch.ones(1)}, {"w": torch.ones(1)}, "v: not expected"),
        (
            {"w": None, "v": torch.ones(1)},
            {"w": torch.ones(1), "v": torch.ones(1)},
            "w: None, expected a tensor",
        ),
        ({"w": torch.full((1,), torch.nan)}, {"w": torch.full((1,), torch.nan)}, "w: "),
        ({}, {}, "no tensor to compare"),
        ({"w": None}, {"w": None}, "no tensor to compare"),
    ],
)
def test_missing_tensors_and_nan_differ(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_named_close(actual, expected)
