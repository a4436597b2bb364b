"""The comparison with the unsharded run on a layout of one rank, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.layouts import Layout, ShardMap, assert_same_as_unsharded
from lockstep.layouts.oracle import _ShardedRun, trainer_of
from suites.selftest.layouts.model import OnPaper

GENERATOR = torch.Generator().manual_seed(3)
BATCHES = [
    {
        "x": torch.randn(24, 3, generator=GENERATOR).double(),
        "y": torch.randn(24, 1, generator=GENERATOR).double(),
    }
    for _ in range(3)
]
Batch = dict[str, torch.Tensor]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


class Trainer:
    """A trainer that is right, but for what is done with its results."""

    def __init__(
        self, model: nn.Module, change: Callable[[Any, torch.Tensor], object] = lambda _, of: of
    ) -> None:
        self.model, self.change, self.steps = model, change, 0

    def __call__(self, batch: Batch, microbatches: int) -> object:
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(batch["x"].chunk(microbatches), batch["y"].chunk(microbatches), strict=True):
            found = loss(self.model, dict(zip("xy", part, strict=True))) / microbatches
            found.backward()  # type: ignore[no-untyped-call]
            total = total + found.detach()
        self.steps += 1
        return self.change(self, total)


def run(parallelize: Callable[[nn.Module, Layout], Any], **changes: Any) -> list[str]:
    return assert_same_as_unsharded(Layout({}), build, parallelize, BATCHES, loss, **changes)


def failed(
    change: Callable[[Any, torch.Tensor], object], kind: type[Trainer] = Trainer, **changes: Any
) -> list[str]:
    """Return the lines of the report on a trainer."""
    with pytest.raises(AssertionError) as caught:
        run(lambda model, _: kind(model, change), **changes)
    return [line.strip() for line in str(caught.value).splitlines()]


def after(place: str, act: Callable[[Any], object]) -> Callable[[Any, torch.Tensor], object]:
    """Return a change of a trainer in its second step."""

    def change(trainer: Any, found: torch.Tensor) -> torch.Tensor:
        if trainer.steps == 2:
            with torch.no_grad():
                act(trainer.model.get_parameter(place))
        return found

    return change


def test_a_right_trainer_or_module_holds() -> None:
    made: list[Trainer] = []

    def parallelize(model: nn.Module, layout: Layout) -> Trainer:
        made.append(Trainer(model))
        assert layout.name == "one rank"
        return made[-1]

    assert run(parallelize) == []
    assert [each.steps for each in made] == [3]
    assert run(lambda model, _: model) == []
    assert run(lambda model, _: Trainer(model, lambda _, found: float(found))) == []


REPORTS: dict[str, tuple[Callable[[Any, torch.Tensor], object], str, str]] = {
    "shape": (lambda _, of: of.repeat(2), "step 0", "the loss has the shape [2]: return one number (rank 0)"),
    "word": (lambda _, of: "small", "step 0", "the loss is str: return one number (rank 0)"),
    "narrow": (lambda _, of: of.float(), "step 0", "the loss is float32: compute it in float64 (rank 0)"),
    "loss": (lambda _, of: of * 3, "step 0", "loss is"),
    "lost": (
        after("0.weight", lambda each: setattr(each, "grad", None)),
        "step 1",
        "gradient of `0.weight` is None, and that of the unsharded model is not (rank 0)",
    ),
    "gradient": (
        after("1.bias", lambda each: each.grad.mul_(3)),
        "step 1",
        "gradient of `1.bias` is 3 times the reference: multiplied by the number of microbatches (3)",
    ),
    "moved": (after("0.bias", lambda each: each.mul_(3)), "after step 1", "parameter of `0.bias` "),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_is_wrong_first_is_reported(name: str) -> None:
    change, moment, text = REPORTS[name]
    lines = failed(change)
    assert lines[0] == f"one rank is not the unsharded model ({moment}):"
    assert lines[1].startswith(text), lines


def test_a_wrong_gradient_is_looked_for_in_a_second_run() -> None:
    made: list[int] = []

    def change(trainer: Any, found: torch.Tensor) -> torch.Tensor:
        made.append(trainer.steps)
        return after("1.bias", lambda each: each.grad.mul_(3))(trainer, found)

    lines = failed(change)
    assert lines[-1] == "all outputs and their gradients agree: it goes wrong after backward"
    assert made == [1, 2, 3, 1, 2]


def test_a_run_that_fails_when_it_is_traced_is_reported_without() -> None:
    made: list[object] = []

    def change(trainer: Any, found: torch.Tensor) -> torch.Tensor:
        made.append(trainer)
        if len(made) > 3:
            raise RuntimeError("once only")
        return found * 3

    assert failed(change)[1].startswith("loss is")


def test_a_trainer_returns_its_loss_on_a_rank_at_least() -> None:
    assert failed(lambda *_: None) == [
        "one rank is not the unsharded model: the trainer returns the loss on no rank"
    ]


class WithNorm(Trainer):
    factor = 1.0

    def grad_norm(self) -> torch.Tensor:
        return torch.stack([each.grad.norm() for each in self.model.parameters()]).norm() * self.factor


class WithWrongNorm(WithNorm):
    factor = 5.0


class WithStep(Trainer):
    """A trainer that steps its parameters, as SGD with a learning rate of 0.5 does."""

    def step(self) -> None:
        with torch.no_grad():
            for each in self.model.parameters():
                each -= 0.5 * each.grad
        self.model.zero_grad()


def test_a_norm_is_compared_where_the_trainer_has_one() -> None:
    assert run(lambda model, _: WithNorm(model)) == []
    assert failed(lambda _, of: of, WithWrongNorm)[1].startswith("total norm ")


def test_a_trainer_that_steps_itself_has_no_other_optimizer() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.5)

    assert run(lambda model, _: WithStep(model), optimizer=optimizer) == []
    assert failed(lambda _, of: of, WithStep)[0] == "one rank is not the unsharded model (after step 0):"


class Hiding(nn.Module):
    """A module whose parameters are not its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hidden = [model]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](x)  # type: ignore[no-any-return]


def test_a_parameter_that_no_rank_has_is_named() -> None:
    def freeze(model: nn.Module, *names: str) -> Trainer:
        trainer = Trainer(model)
        for name in names:
            module, _, own = name.rpartition(".")
            value = model.get_parameter(name).detach()
            delattr(model.get_submodule(module), own)
            model.get_submodule(module).register_buffer(own, value)
        return trainer

    def hide(model: nn.Module, _: Layout) -> Trainer:
        trainer = Trainer(model)
        trainer.model = Hiding(model)
        return trainer

    title = "one rank is not the unsharded model: no rank has"
    for parallelize, text in (
        (lambda model, _: freeze(model, "0.weight"), "`0.weight`"),
        (lambda model, _: freeze(model, "0.weight", "0.bias", "1.bias"), "`0.weight`, `0.bias`, `1.bias`"),
        (hide, "`0.weight`, `0.bias`, `1.weight` and 1 more"),
    ):
        with pytest.raises(AssertionError) as caught:
            run(parallelize)
        assert str(caught.value) == f"{title} {text}"


def test_a_parameter_of_another_name_is_named() -> None:
    def with_extra(model: nn.Module, _: Layout) -> nn.Module:
        model.register_parameter("extra", nn.Parameter(torch.ones(1).double()))
        return model

    def rename(name: str, layout: Layout) -> str:
        return name.replace("extra", "more")

    text = "is no parameter of the unsharded model: rename it (rank 0)"
    for shards, name in ((None, "`extra`"), (ShardMap(rename=rename), "`extra` (`more` by the shard map)")):
        with pytest.raises(AssertionError) as caught:
            run(with_extra, shards=shards)
        assert str(caught.value).splitlines()[1].strip() == f"{name} {text}"


def test_gradients_may_be_given_by_a_function() -> None:
    def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
        return {name: each.grad * 3 for name, each in model.named_parameters() if each.grad is not None}

    text = "gradient of `1.weight` (and 2 more of 4) is 3 times the reference"
    assert failed(lambda _, of: of, shards=ShardMap(gradients=gradients))[1] == text


class InDouble(Trainer):
    """A trainer that leaves the dtype of what it is given."""

    def __call__(self, batch: Batch, microbatches: int) -> object:
        self.model.double()
        return super().__call__({name: each.double() for name, each in batch.items()}, microbatches)


def test_a_plan_in_another_dtype_holds_within_its_rounding() -> None:
    def trainer(model: nn.Module, _: Layout) -> nn.Module:
        return model

    assert run(trainer, dtype=torch.float32) == []
    with pytest.raises(AssertionError, match="no parameter is float32: the plan, or a constructor") as caught:
        run(lambda model, _: InDouble(model.double()), dtype=torch.float32)
    assert str(caught.value).startswith(
        "one rank holds in float64, and is not the unsharded model in float32:\n"
    )


def test_inputs_that_fit_no_reference_are_refused() -> None:
    with pytest.raises(TypeError, match=r"shards is dict: give a ShardMap\(...\) of it"):
        run(lambda model, _: model, shards={"a": 1})
    from lockstep.layouts import Sharded

    with pytest.raises(
        ValueError, match=r"entry 'a\.\*' matches no parameter: 0\.weight, 0\.bias, 1\.weight, 1"
    ):
        run(lambda model, _: model, shards=ShardMap({"0.*": Sharded("tp"), "a.*": Sharded("tp")}))
    numbers = iter(range(9))

    def unseeded() -> nn.Module:
        model = build()
        nn.init.constant_(model[1].bias, next(numbers))
        return model

    with pytest.raises(
        ValueError, match=r"build\(\) gives `1.bias` other values at its second call: seed it"
    ):
        assert_same_as_unsharded(Layout({}), unseeded, lambda model, _: model, BATCHES, loss)


def test_a_trainer_is_called_and_has_a_module() -> None:
    layout = Layout({})
    trainer = Trainer(build())
    assert trainer_of(trainer, loss, layout) is trainer
    for given in (None, build, "model"):
        with pytest.raises(
            TypeError, match=rf"parallelize\(\) returns {type(given).__name__}: return a module, or"
        ):
            trainer_of(given, loss, layout)


def test_modules_have_the_names_of_the_unsharded_model() -> None:
    def rename(name: str, layout: Layout) -> str:
        if name.startswith("odd"):
            raise KeyError(name)
        return f"layers.{name}"

    reference: Any = None
    for layout, whole in ((OnPaper(pp=1), ""), (OnPaper(pp=2), "a stage")):
        found = _ShardedRun(None, reference, ShardMap(rename=rename), layout)
        names = [found._name_of_module(name) for name in ("", "0.up", "odd")]
        assert names == [whole, "layers.0.up", "odd of a stage"]
