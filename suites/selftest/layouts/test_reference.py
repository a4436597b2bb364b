"""The unsharded run: what it keeps of each step, and of what nothing could be concluded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.layouts import Sharded, ShardMap
from lockstep.layouts.reference import Batches, Reference, Task, fit, is_narrow, of_parts, reference_of

GENERATOR = torch.Generator().manual_seed(5)
Batch = dict[str, torch.Tensor]


def batches() -> list[Batch]:
    return [
        {
            "x": torch.randn(8, 3, generator=GENERATOR).double(),
            "y": torch.randn(8, 1, generator=GENERATOR).double(),
        }
        for _ in range(2)
    ]


BATCHES = batches()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 6), nn.Linear(6, 1)
        self.again = self.up
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) + self.again(x).tanh())  # type: ignore[no-any-return]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


TASK = Task(build, loss, sgd, Batches(BATCHES))


def test_batches_are_equal_where_their_tensors_are() -> None:
    found = Batches(BATCHES)
    same = Batches([{name: each.clone() for name, each in batch.items()} for batch in BATCHES])
    assert found == same
    assert hash(found) == hash(same)
    assert found != BATCHES
    (first, second) = BATCHES
    for other in (
        [first],
        [second, first],
        [first, {**second, "z": second["x"]}],
        [first, {**second, "x": second["x"].float()}],
        [first, {**second, "x": second["x"].view(4, 6)}],
        [first, {**second, "x": second["x"] + 1e-15}],
        [first, {"z": second["x"], "y": second["y"]}],
    ):
        assert Batches(other) != found
    assert reference_of(TASK) is reference_of(replace(TASK, batches=same))


def test_a_run_keeps_its_steps() -> None:
    found = Reference(TASK)
    assert found.names == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert found.tied == {"again.weight": "up.weight", "again.bias": "up.bias"}
    model = build()
    first, second = found.steps
    assert torch.equal(found.start["up.weight"], model.get_parameter("up.weight"))
    value = loss(model, BATCHES[0])
    value.backward()  # type: ignore[no-untyped-call]
    assert first.loss == float(value.detach())
    for name, each in model.named_parameters():
        assert each.grad is not None
        assert torch.equal(first.gradients[name], each.grad)
        assert torch.allclose(first.after[name], each - 0.1 * each.grad)
        assert torch.equal(first.after[name], second.before[name])
    squares = sum(float(each.square().sum()) for each in first.gradients.values())
    assert first.norm == pytest.approx(math.sqrt(squares))
    assert (found.has_parts, Reference(replace(TASK, parts=lambda batch, *_: batch)).has_parts) == (
        False,
        True,
    )
    outputs, gradients = found.trace(1).joined()
    model.load_state_dict(
        {
            **model.state_dict(),
            **second.before,
            **{name: second.before[of] for name, of in found.tied.items()},
        }
    )
    assert torch.equal(outputs["down"], model(BATCHES[1]["x"]))
    assert list(gradients) == list(outputs)


def test_blocks_of_a_batch_add_up_to_its_gradients() -> None:
    terms = (("z", lambda model, batch: model(batch["x"]).square().sum()),)
    found = Reference(
        replace(TASK, terms=terms, loss=lambda model, batch: loss(model, batch) + terms[0][1](model, batch))
    )
    of = found.blocks(1, 4)
    assert found.blocks(1, 4) is of
    assert found.blocks(0, 4) is not of
    assert (of.rows, of.sequence, of.terms, len(of.losses)) == (4, 1, ("z",), 5)
    assert of.weights is not None
    assert of.weights.tolist() == pytest.approx([0.25] * 4 + [1.0])
    assert sum(of.losses[:4]) / 4 + of.losses[4] == pytest.approx(found.steps[1].loss)
    alone = found.blocks(1, 4, term="z")
    assert (alone.terms, len(alone.losses)) == ((), 4)
    assert sum(alone.losses) == pytest.approx(of.losses[4])
    assert alone.weights is not None
    assert alone.weights.tolist() == pytest.approx([1.0] * 4)


def test_a_part_that_moves_the_loss_in_no_step_is_refused() -> None:
    def of_half(model: nn.Module, batch: Batch) -> torch.Tensor:
        return loss(model, batch) if "all" in batch else (model(batch["x"]) * batch["y"]).sum()

    dead = [{**batch, "y": batch["y"].clone().index_fill(0, torch.arange(4, 8), 0.0)} for batch in BATCHES]
    found = Reference(replace(TASK, loss=of_half, batches=Batches(dead)))
    found.refuse_dead_parts(1, 1)
    with pytest.raises(
        ValueError, match="part 1 of 2 of the rows moves the loss in no step: a rank that loses"
    ):
        found.refuse_dead_parts(2, 1)
    alive = Reference(replace(TASK, loss=of_half, batches=Batches([dead[0], BATCHES[1]])))
    alive.refuse_dead_parts(2, 1)
    alive.refuse_dead_parts(4, 1)

    def keep(batch: Batch, index: int, count: int) -> Batch:
        return batch if index else {**batch, "y": batch["y"] * 0}

    of_sequence = Reference(replace(TASK, loss=of_half, parts=keep))
    with pytest.raises(ValueError, match="part 0 of 2 of the sequence moves the loss in no step"):
        of_sequence.refuse_dead_parts(1, 2)


def test_an_expert_that_no_token_reaches_is_refused() -> None:
    def of_some(model: nn.Module, batch: Batch) -> torch.Tensor:
        first, second = model.get_parameter("up.weight"), model.get_parameter("up.bias")
        return (
            (first[:, :2] * 2).square().sum()
            + second[[0, 1, 2, 3, 5]].square().sum()
            + loss(model.down, batch)
        )

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 6), nn.Linear(3, 1)

    def half() -> nn.Module:
        torch.manual_seed(0)
        return Half().double()

    found = Reference(replace(TASK, build=half, loss=of_some))
    for rules in (
        {"up.*": Sharded("tp")},
        {"up.weight": Sharded("ep")},
        {"up.bias": Sharded("ep", parts=(3, 3))},
        {"up.bias": Sharded("ep", rows=lambda length, count, index: range(length))},
    ):
        found.refuse_dead_experts(ShardMap(rules))
    with pytest.raises(
        ValueError, match=r"`up\.bias` has no gradient at index 4 of dim 0: no token reaches that"
    ):
        found.refuse_dead_experts(ShardMap({"up.bias": Sharded(("tp", "ep"))}))
    with pytest.raises(ValueError, match=r"`up\.weight` has no gradient at index 2 of dim 1"):
        found.refuse_dead_experts(ShardMap({"up.weight": Sharded("ep", dim=1)}))


def frozen() -> nn.Module:
    return build().requires_grad_(False)


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"build": frozen}, ValueError, r"build\(\) returns a model without a parameter to train"),
        (
            {"build": lambda: build().float()},
            ValueError,
            "`up.weight` of the reference is float32: build it in",
        ),
        ({"optimizer": still}, ValueError, "`up.weight` of the reference does not move in 2 steps: give an"),
        ({"loss": lambda model, batch: loss(model, batch) * math.nan}, ValueError, "is not finite in step 0"),
        (
            {"loss": lambda model, batch: model.up(batch["x"]).square().mean()},
            ValueError,
            "`down.weight` of the reference has no gradient, or zeros, in all steps",
        ),
        (
            {"loss": lambda model, batch: model(batch["x"])},
            TypeError,
            r"returns the shape \[8, 1\]: return a",
        ),
        (
            {"loss": lambda model, batch: 3.5},
            TypeError,
            r"loss\(model, batch\) returns 3.5: return a tensor of",
        ),
    ],
    ids=["frozen", "float32", "still", "nan", "dead", "shape", "number"],
)
def test_a_run_of_which_nothing_follows_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Reference(replace(TASK, **changes))


def test_a_loss_by_parts_has_those_of_all_ranks() -> None:
    def sizes(model: nn.Module, batch: Batch, parts: tuple[Batch, ...]) -> Any:
        return [each["x"].tolist() for each in parts]

    given: Callable[..., Any] = sizes
    x = torch.arange(8.0)
    found: Any = of_parts(given, nn.Identity(), {"x": x}, 2, 2)
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert of_parts(given, nn.Identity(), {"x": x}) == [x.tolist()]
    counted = replace(
        TASK, loss=lambda model, batch, parts: loss(model, batch) * len(parts), cuts=((2, 2), (2, 1))
    )
    assert [
        counted.run(counted.loss, build(), step, BATCHES[0]) / loss(build(), BATCHES[0]) for step in (0, 1)
    ] == [4, 2]


def test_weights_are_fitted_where_they_are_the_only_ones() -> None:
    basis = torch.randn(3, 10, generator=GENERATOR).double()
    weights = torch.tensor([1.0, -2.0, 0.5]).double()
    found = fit({"a": basis, "b": basis}, {"a": weights @ basis})
    assert found is not None
    assert found.tolist() == pytest.approx(weights.tolist())
    with_zero = torch.cat([basis, torch.zeros(1, 10).double()])
    found = fit({"a": with_zero}, {"a": weights @ basis})
    assert found is not None
    assert found[:3].tolist() == pytest.approx(weights.tolist())
    assert math.isnan(float(found[3]))
    assert fit({"a": basis}, {"a": (weights @ basis) * 1e-200}) is not None
    assert fit({"a": basis}, {"a": weights @ basis + torch.eye(10)[0] * 1e-6}) is None
    assert fit({"a": basis[:, :5]}, {"a": weights @ basis[:, :5]}) is None
    assert fit({"a": basis[:, :6]}, {"a": weights @ basis[:, :6]}) is not None
    assert fit({"a": basis * 0}, {"a": weights @ basis}) is None
    assert fit({"a": basis[[0, 0, 1]]}, {"a": basis[0]}) is None
    assert fit({"a": basis}, {"a": weights @ basis * math.inf}) is None


def test_few_digits_are_those_below_float64() -> None:
    dtypes = (torch.float32, torch.float64, torch.int64, torch.complex64, torch.complex128, torch.bfloat16)
    assert [is_narrow(torch.ones(1, dtype=dtype)) for dtype in dtypes] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
