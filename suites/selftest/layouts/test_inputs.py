"""Inputs under which a wrong plan could pass, each refused by its name; and marks that ask for no layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.bounds import MOST_PROCESSES, MOST_RANKS
from lockstep.features.layouts.mark import MarkError, contains, parse_mark
from lockstep.layouts import Layout, Sharded, ShardMap, assert_same_as_unsharded, witness_batches
from lockstep.layouts.batches import refuse
from lockstep.layouts.reference import Batches, Task
from suites.selftest.layouts.model import SHARDS, VOCAB, Block, Plan, build, loss, plan_with

BATCHES = witness_batches(VOCAB)


def changed(step: int, change: Callable[[dict[str, torch.Tensor]], object]) -> list[dict[str, torch.Tensor]]:
    """Return the batches, one of them changed."""
    batches = [{name: each.clone() for name, each in batch.items()} for batch in BATCHES]
    change(batches[step])
    return batches


def repeat(batch: dict[str, torch.Tensor]) -> None:
    for each in batch.values():
        each[12:] = each[:12]


def without_half() -> list[dict[str, torch.Tensor]]:
    return [
        {**batch, "labels": batch["labels"].index_fill(0, torch.arange(12, 24), -100)} for batch in BATCHES
    ]


def unseeded() -> nn.Module:
    return Block()


def with_dead_parameter() -> nn.Module:
    model = build()
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    return model


class Shifted(Block):
    """A model with a parameter that the loss does not depend on: all logits grow alike."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.shift


def with_shift() -> nn.Module:
    torch.manual_seed(1)
    return Shifted()


def in_float32() -> nn.Module:
    return build().float()


def with_float32_buffer(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build()
    model.register_buffer("scale", torch.ones(1, dtype=dtype))
    return model


def with_complex64_buffer() -> nn.Module:
    return with_float32_buffer(torch.complex64)


def frozen() -> nn.Module:
    return build().requires_grad_(False)


def stuck(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[1:], 0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one batch": (
        {"batches": BATCHES[:1]},
        "one batch: a gradient left in from the step before would go unseen",
    ),
    "microbatches": (
        {"microbatches": (1, 3)},
        r"microbatches=\(1, 3\) for 3 batches: give one number for each",
    ),
    "no tensor": ({"batches": ["a", *BATCHES[1:]]}, "batch 0 is str: give a tensor, or a mapping of tensors"),
    "few rows": ({"microbatches": (1, 20, 1)}, "batch 1 has 24 rows: too few for 2 parts of 20 microbatches"),
    "alike parts": (
        {"batches": changed(1, repeat)},
        "parts 0 and 3 of 6 of batch 1 are alike: a rank that reads",
    ),
    "alike steps": (
        {"batches": [*BATCHES[:2], BATCHES[0]]},
        "batches 0 and 2 are alike: give each step its own data",
    ),
    "dead part": ({"batches": without_half()}, "part 1 of 2 of the rows moves the loss in no step"),
    "dead parameter": (
        {"build": with_dead_parameter},
        "`unused` of the reference has no gradient, or zeros, in all",
    ),
    "rounding": (
        {"build": with_shift},
        "the gradient of `shift` of the reference is rounding, .* beside a norm of ",
    ),
    "float32": ({"build": in_float32}, r"`embed.weight` of the reference is float32: build it in float64"),
    "float32 buffer": (
        {"build": with_float32_buffer},
        "`scale` of the reference is float32: build it in float64",
    ),
    "complex64 buffer": (
        {"build": with_complex64_buffer},
        "`scale` of the reference is complex64: build it in float64",
    ),
    "frozen": ({"build": frozen}, "build.. returns a model without a parameter to train"),
    "not finite": (
        {"batches": BATCHES, "loss": lambda model, batch: loss(model, batch) / 0},
        "the reference's loss or gradient is not finite in step 0",
    ),
    "stuck": ({"optimizer": stuck}, "`embed.weight` of the reference does not move in 3 steps"),
    "unseeded": (
        {"build": unseeded},
        "build.. gives `embed.weight` other values at its second call: seed it",
    ),
    "no match": (
        {"shards": ShardMap({"*.wo": Sharded("tp")})},
        r"entry '\*.wo' matches no parameter: embed.weight, ",
    ),
    "expert": (
        {"shards": ShardMap({"embed.weight": Sharded("ep")}), "batches": witness_batches(VOCAB - 1)},
        "`embed.weight` has no gradient at index 16 of dim 0: no token reaches that expert",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.layouts(dp=(1, 2))
def test_an_input_under_which_bugs_pass_is_refused(layout: Layout, name: str) -> None:
    given, message = REFUSED[name]
    arguments: dict[str, Any] = {"build": build, "batches": BATCHES, "loss": loss, "shards": SHARDS, **given}
    with pytest.raises(ValueError, match=message):
        assert_same_as_unsharded(layout, parallelize=Plan, **arguments)


@pytest.mark.layouts(dp=(1, 2))
def test_what_is_no_trainer_is_refused(layout: Layout) -> None:
    with pytest.raises(
        TypeError, match=r"parallelize\(\) returns tuple: return a module, or a trainer with a mod"
    ):
        assert_same_as_unsharded(layout, build, lambda model, layout: (model, layout), BATCHES, loss)


@pytest.mark.layouts(ddp=(1, 2))
def test_an_axis_that_the_plan_does_not_use_is_refused(layout: Layout) -> None:
    with pytest.raises(
        ValueError, match="axis `ddp` of ddp2: the plan does not ask for it, and sends nothing"
    ):
        assert_same_as_unsharded(layout, build, Plan, BATCHES, loss)


@pytest.mark.layouts(replicas=(1, 2))
def test_an_axis_of_groups_of_the_plans_own_is_used(layout: Layout) -> None:
    class Reduced(Plan):
        def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> Any:
            total = super().__call__(batch, microbatches)
            dist.all_reduce(total)
            return total / 2

    assert assert_same_as_unsharded(layout, build, Reduced, BATCHES, loss) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": {"up.*": Sharded("tp")}}, r"shards is dict: give a ShardMap\(...\) of it"),
        (
            {"loss": lambda model, batch: None},
            r"loss\(model, batch\) returns None: return a tensor of one number",
        ),
        (
            {"loss": lambda model, batch: model(batch["tokens"])},
            r"returns the shape \[24, 16, 17\]: return a",
        ),
    ],
    ids=["shards", "none", "logits"],
)
@pytest.mark.layouts(dp=(1, 2))
def test_arguments_of_other_types_are_refused(layout: Layout, arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        assert_same_as_unsharded(layout, build, Plan, BATCHES, **{"loss": loss, **arguments})


def test_an_entry_of_a_shard_map_is_a_cut() -> None:
    with pytest.raises(
        TypeError, match=r"the shard map's entry 'up.\*' is 'tp': write Sharded\('tp', dim=0\)"
    ):
        ShardMap({"up.*": "tp"})  # type: ignore[dict-item]


class WithoutLoss(Plan):
    """A plan that returns something else than a loss."""

    def __call__(self, batch: dict[str, torch.Tensor], microbatches: int) -> Any:
        total = super().__call__(batch, microbatches)
        returned = {"two": total.expand(2), "named": {"loss": total}, "short": total.float()}
        return returned.get(self.bug)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        ("none", "dp2 is not the unsharded model: the trainer returns the loss on no rank"),
        ("two", r"the loss has the shape \[2\]: return one number \(ranks 0, 1\)"),
        ("named", r"the loss is dict: return one number \(ranks 0, 1\)"),
        ("short", r"the loss is float32: compute it in float64 \(ranks 0, 1\)"),
    ],
)
@pytest.mark.layouts(dp=(1, 2))
def test_a_trainer_without_a_loss_is_refused(layout: Layout, bug: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_as_unsharded(layout, build, plan_with(bug, WithoutLoss), BATCHES, loss, shards=SHARDS)


@pytest.mark.layouts(dp=(1, 2))
def test_a_plan_with_a_float32_parameter_is_refused(layout: Layout) -> None:
    class Lowered(Plan):
        def mutate(self) -> None:
            self.model.head.float().register_forward_pre_hook(lambda _, args: args[0].float())

    with pytest.raises(AssertionError) as caught:
        assert_same_as_unsharded(layout, build, Lowered, BATCHES, loss, shards=SHARDS)
    lines = str(caught.value).splitlines()
    assert lines[0] == "dp2 is not the unsharded model (before step 0):"
    assert lines[1] == "  parameter `head.weight` is float32: keep it in float64 (ranks 0, 1)"


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (
            ShardMap({**SHARDS.rules, "up.*": Sharded("tp", dim=3)}),
            "the shard map cuts dim 3 of `up.weight`, which has 2 dims",
        ),
        (
            ShardMap({**SHARDS.rules, "up.*": Sharded("tp", parts=(3, 4))}),
            r"entry of `up.weight`: parts=\(3, 4\) of a dimen",
        ),
        (
            ShardMap(SHARDS.rules, rename=lambda name, _: f"x.{name}"),
            "`embed.weight` is `x.embed.weight` by the",
        ),
        (
            ShardMap({**SHARDS.rules, "up.*": Sharded("tq")}),
            "the shard map cuts `up.weight` over 'tq': the layout has the axes tp, pp, dp",
        ),
        (ShardMap({"up.*": Sharded("tp")}), r"`qkv.weight` has the shape \[12, 8\], its part \[24, 8\]"),
    ],
    ids=["dim", "parts", "names", "axis", "cut"],
)
@pytest.mark.layouts(tp=(1, 2))
def test_a_shard_map_that_does_not_fit_is_refused(layout: Layout, shards: ShardMap, message: str) -> None:
    class Built(Plan):
        def __init__(self, model: nn.Module, layout: Layout) -> None:
            super().__init__(model, layout)
            shards.write(self.model, model, layout)

    with pytest.raises(ValueError, match=message):
        assert_same_as_unsharded(layout, build, Built, BATCHES, loss, shards=SHARDS)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (((1, 2),), {}, r"layouts\(\(1, 2\)\): axes have names: write layouts\(dp="),
        ((), {}, r"layouts\(\): no layout has 2 to at_most=8 ranks"),
        (
            (),
            {"dp": 2},
            r"layouts\(dp=2\): no option of this name, nor sizes of an axis, which are a tuple of different",
        ),
        ((), {"dp": (0, 2)}, r"layouts\(dp=\(0, 2\)\): no option"),
        ((), {"dp": (2, 2)}, r"layouts\(dp=\(2, 2\)\): no option"),
        ((), {"DP": (1, 2)}, r"layouts\(DP=\.\.\.\): an axis is a word"),
        ((), {"dp": (1, 2), "at_most": 1}, r"layouts\(at_most=1\): a number of ranks from 2 to"),
        ((), {"dp": (1, 2), "at_most": True}, r"layouts\(at_most=True\): a number of ranks from 2 to"),
        ((), {"dp": (1, 2), "at_most": 10**9}, rf"a number of ranks from 2 to {MOST_PROCESSES}\Z"),
        (
            (),
            {"dp": (2,), "at_most": 10**9, "backend": "fake"},
            rf"a number of ranks from 2 to {MOST_RANKS}\Z",
        ),
        ((), {"dp": (2,), "backend": "fake", "as_rank": "all"}, r"layouts\(as_rank='all'\): one rank, which"),
        (
            (),
            {"dp": (1, 2), "both_orders": 1},
            r"layouts\(both_orders=1\): True or False, and not with",
        ),
        ((), {"dp": (2,), "both_orders": True, "fresh": True}, r"layouts\(both_orders=True\): True or False"),
        ((), {"dp": 2, "tp": (1,)}, r"from 1 on, dp=\(2,\): write layouts\(dp="),
        ((), {"dp": ()}, r"layouts\(dp=\(\)\): no option"),
        ((), {"dp": (1.0, 2)}, r"layouts\(dp=\(1.0, 2\)\): no option"),
        ((), {"dp": (16,)}, r"layouts\(dp=\(16,\)\): no layout has 2 to at_most=8 ranks"),
    ],
)
def test_a_mark_that_asks_for_no_layout_is_refused(args: Any, options: Any, message: str) -> None:
    with pytest.raises(MarkError, match=message):
        parse_mark(args, options)


def test_layouts_come_smallest_first_and_outer_axes_first() -> None:
    mark = parse_mark((), {"dp": (1, 2), "fsdp": (1, 2, 4), "tp": (1, 2), "at_most": 4, "backend": "shm"})
    names = [each.name for each in mark.layouts]
    assert names == ["dp2", "fsdp2", "tp2", "fsdp4", "dp2-fsdp2", "dp2-tp2", "fsdp2-tp2"]
    assert [each.ranks for each in mark.layouts] == [2, 2, 2, 4, 4, 4, 4]
    assert mark.of_ranks == {"backend": "shm"}
    by_name = {each.name: each for each in mark.layouts}
    assert contains(by_name["dp2-fsdp2"], by_name["fsdp2"])
    assert contains(by_name["fsdp4"], by_name["fsdp2"])
    assert not contains(by_name["dp2-tp2"], by_name["fsdp2"])
    assert not contains(by_name["dp2"], by_name["dp2"])


def test_layouts_run_again_in_the_other_order() -> None:
    mark = parse_mark((), {"dp": [1, 2], "tp": (1, 2), "at_most": 2, "both_orders": True})
    assert [each.name for each in mark.layouts] == ["dp2", "tp2", "tp2-again", "dp2-again"]
    assert mark.of_ranks == {}


def test_options_of_ranks_and_of_features_are_no_axes() -> None:
    options = {"dp": (2,), "timeout": 5, "mine": 1, "fresh": False}
    assert parse_mark((), options, ["mine"]).of_ranks == {"timeout": 5, "mine": 1, "fresh": False}
    fake = parse_mark((), {"dp": (2,), "backend": "fake"})
    assert fake.of_ranks == {"backend": "fake", "as_rank": 0}
    as_rank = {"backend": "fake", "as_rank": 1}
    assert parse_mark((), {"dp": (2,), **as_rank}, ["as_rank"]).of_ranks == as_rank


def test_parts_without_rows_are_not_alike() -> None:
    """Nine rows in eight parts: four of two rows, one of one, and three of none."""
    batches = [torch.arange(9.0) + 10 * step for step in range(2)]
    refuse(batches, (1, 1), data=8)
    with pytest.raises(ValueError, match="parts 0 and 1 of 5 of batch 1 are alike"):
        refuse([batches[0], torch.ones(9)], (1, 1), data=8)


def test_a_loss_that_is_not_cut_has_one_part() -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert [part.tolist() for part in parts] == [batch.tolist()]
        return model(batch).sum()

    task = Task(build, loss, stuck, Batches([torch.ones(4, 2)]))
    assert task.run(loss_of, nn.Identity(), 0, torch.ones(4, 2)) == 8
