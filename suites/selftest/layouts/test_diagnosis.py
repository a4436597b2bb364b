"""Reports of layouts without ranks: which lines there are of what ranks hold, in which order."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.layouts.diagnosis import _CAUSES, _LINES, Failure, _is_close, _shown, describe
from lockstep.layouts.moment import Held, Moment
from lockstep.layouts.reference import Blocks, Step
from suites.selftest.layouts.model import SHARDS, OnPaper

NAMES = ("first", "middle", "last")
GENERATOR = torch.Generator().manual_seed(0)
WHOLE = {name: torch.randn(5, generator=GENERATOR, dtype=torch.float64) for name in NAMES}
OTHER = {name: torch.randn(5, generator=GENERATOR, dtype=torch.float64) for name in NAMES}
LOSS = 2.0


def blocks(step: int, rows: int, sequence: int, term: str) -> Blocks:
    """Return blocks of random gradients of which the whole ones are the sum."""
    number = rows * sequence
    found = {name: torch.randn(number, 5, generator=GENERATOR, dtype=torch.float64) for name in NAMES}
    for name in NAMES:
        found[name][-1] += WHOLE[name] - found[name].sum(0)
    return Blocks(rows, sequence, (), (LOSS / number,) * number, found, WHOLE)


def reference() -> Any:
    before = {name: each * 3 for name, each in WHOLE.items()}
    steps = [
        Step(before, LOSS, {name: each * (5 + number) for name, each in OTHER.items()}, 4.0, WHOLE)
        for number in range(2)
    ]
    return SimpleNamespace(
        steps=[*steps, Step(before, LOSS, WHOLE, 4.0, OTHER)], names=NAMES, has_parts=False, blocks=blocks
    )


def failure(*held: dict[str, torch.Tensor], kind: str = "gradient", **changes: Any) -> Failure:
    """Return the failure of ranks that hold these tensors, all of each."""
    layout = changes.pop("layout", OnPaper(dp=len(held)))
    losses, norms = changes.pop("losses", (LOSS,) * len(held)), changes.pop("norms", (4.0,) * len(held))
    title = changes.pop("title", "in step 2")
    moments = {
        rank: Moment(
            2,
            title,
            kind,
            [Held(name, name, torch.arange(5), each) for name, each in named.items()],
            losses[rank],
            norms[rank],
            **changes,
        )
        for rank, named in enumerate(held)
    }
    return Failure(layout, SHARDS, cast(Any, reference()), 1, moments, dict.fromkeys(moments))


def lines(*held: dict[str, torch.Tensor], **changes: Any) -> list[str]:
    return [line.strip() for line in describe(failure(*held, **changes)).splitlines()]


def test_the_wrong_tensors_are_those_of_any_rank_the_last_first() -> None:
    first, last = {**WHOLE, "first": OTHER["first"]}, {**WHOLE, "last": OTHER["last"]}
    found = failure(first, last)
    assert found.names == ["last", "middle", "first"]
    assert [each.name for each in found.suspects] == ["last", "first"]
    assert torch.equal(found.suspects[0].values[1], OTHER["last"])
    assert found.assembled == {}


def test_of_two_tied_tensors_of_a_rank_the_worse_is_suspected() -> None:
    found = failure(dict(WHOLE), dict(WHOLE))
    for values in ((OTHER["last"], WHOLE["last"]), (WHOLE["last"], OTHER["last"])):
        found.moments[0].held[2:] = [
            Held("last", own, torch.arange(5), each) for own, each in zip("ab", values, strict=True)
        ]
        again = Failure(found.layout, SHARDS, found.reference, 1, found.moments, {})
        assert torch.equal(again.suspects[0].values[0], OTHER["last"])
    found.moments[0].held[2:] = [Held("last", "last", torch.arange(5), None)]
    found.moments[1].held[2:] = [Held("last", "last", torch.arange(5), OTHER["last"])]
    again = Failure(found.layout, SHARDS, found.reference, 1, found.moments, {})
    assert list(again.suspects[0].values) == [1]


def test_gradients_of_earlier_steps_are_the_last_first() -> None:
    wrong = {**WHOLE, "last": OTHER["last"]}
    (found,) = failure(wrong, wrong).suspects
    assert [each.tolist() for each in found.earlier] == [
        (OTHER["last"] * number).tolist() for number in (6, 5)
    ]
    (found,) = failure({"last": WHOLE["last"]}, kind="parameter", title="after step 2").suspects
    assert [each.tolist() for each in found.earlier] == [(WHOLE["last"] * 3).tolist()]
    (found,) = failure({"last": WHOLE["last"]}, kind="parameter", title="before step 2").suspects
    assert found.earlier == ()


def test_causes_are_said_with_how_many_tensors_they_explain_and_the_rest_after() -> None:
    doubled = {name: each * 2 for name, each in WHOLE.items()}
    twice = "is 2 times the reference: multiplied by dp (2) once too often"
    found = lines(doubled, doubled)
    assert found[0] == "on paper is not the unsharded model (in step 2):"
    assert found[1] == f"gradient of `last` (and 2 more of 3) {twice}"
    assert len(found) == 3
    of_two = {**doubled, "middle": WHOLE["middle"] * 4}
    scale = float(WHOLE["middle"].abs().max())
    assert lines(of_two, of_two)[1:] == [
        f"gradient of `last` (and 1 more of 3) {twice}",
        "gradient of `middle` is 4 times the reference",
        f"largest: gradient `middle`: {3 * scale:.3g} of {scale:.3g}",
    ]
    noise = {name: OTHER[name] for name in ("first", "middle")}
    found = lines({**doubled, **noise}, {**doubled, **noise})
    assert found[1] == f"gradient of `last` {twice}"
    assert found[2] == "gradient of `middle` (and 1 more of 3) differs, which that may have caused"
    found = lines({**WHOLE, **noise}, {**WHOLE, **noise})
    alone = "differs; no single reduction, factor or part explains it"
    assert found[1] == f"gradient of `middle` (and 1 more of 3) {alone}"
    assert found[2].startswith("largest: gradient `")
    assert (
        lines({**WHOLE, "last": OTHER["last"]}, {**WHOLE, "last": OTHER["last"]})[1]
        == f"gradient of `last` {alone}"
    )


def test_of_two_causes_the_one_that_explains_another_tensor_alone_holds() -> None:
    shares = [{name: each * share for name, each in WHOLE.items()} for share in (0.25, 0.75)]
    for sign, held in zip((1, -1), shares, strict=True):
        held["first"] = WHOLE["first"] / 2 + sign * OTHER["first"]
    cause = "equals the reference after a sum over dp: that reduction is missing"
    assert lines(*shares)[1] == f"gradient of `last` (and 2 more of 3) {cause}"


def loss_line(*losses: float, **sizes: int) -> str:
    """Return what is said of a loss of which ranks have these values."""
    found = lines(*[WHOLE] * len(losses), losses=losses, layout=OnPaper(**(sizes or {"dp": len(losses)})))
    assert len(found) <= 2
    return found[1] if len(found) > 1 else ""


@pytest.mark.parametrize(
    ("losses", "sizes", "line"),
    [
        ((LOSS, LOSS), {}, ""),
        ((0.5, 1.5), {}, "equals the reference after a sum over dp: that reduction is missing (0.5, 1.5"),
        ((1.0, 3.0), {}, "equals the reference after a mean over dp: that reduction is missing (1, 3"),
        (
            (0.25, 0.5, 0.75, 0.5),
            {"dp": 2, "tp": 2},
            "equals the reference after a sum over dp and tp: that reduction is missing (0.25, 0.5, 0.75",
        ),
        (
            (0.5, 0.5, 1.5, 1.5),
            {"dp": 2, "tp": 2},
            "equals the reference after a sum over dp: that reduction is missing (0.5, 1.5",
        ),
        ((LOSS, 7.25), {}, "is right on rank 0 alone (2, 7.25"),
        ((3.5, 7.25), {}, "is 3.5, 7.25"),
        ((LOSS * 2,) * 2, {}, "is 2 times the reference: multiplied by dp (2) once too often (4"),
        (
            (LOSS + math.log(2),) * 2,
            {},
            "is the reference plus log 2: a log-sum-exp counts dp (2) wrongly (2.",
        ),
        (
            (LOSS - math.log(2),) * 2,
            {},
            "is the reference minus log 2: a log-sum-exp counts dp (2) wrongly (1.",
        ),
        ((LOSS, math.nan), {}, "is not finite on rank 1 (2, nan"),
        ((LOSS * 1.3,) * 2, {}, "is 2.6"),
    ],
)
def test_a_wrong_loss_is_said_with_its_cause(
    losses: tuple[float, ...], sizes: dict[str, int], line: str
) -> None:
    found = loss_line(*losses, **sizes)
    assert found.startswith(f"loss {line}" if line else ""), found
    assert found.rstrip(")").endswith("expected 2" if line else "")


def test_losses_and_norms_are_compared_with_gradients_alone() -> None:
    given: dict[str, Any] = {"losses": (9.0, 9.0), "norms": (9.0, 9.0), "title": "before step 2"}
    before = {name: each * 3 for name, each in WHOLE.items()}
    assert len(lines(before, before, kind="parameter", **given)) == 1
    assert len(lines(WHOLE, WHOLE, losses=(None, None), norms=(None, None))) == 1
    assert len(lines(WHOLE, WHOLE, losses=(None, LOSS), norms=(None, 4.0))) == 1
    assert lines(WHOLE, WHOLE, norms=(4.0, 9.0))[1] == "total norm differs (4, 9, expected 4)"
    assert (
        lines(WHOLE, WHOLE, norms=(4.0, math.inf))[1]
        == "total norm is not finite on rank 1 (4, inf, expected 4)"
    )


def test_numbers_are_shown_with_the_digits_in_which_they_differ() -> None:
    assert _shown({0: 1.5, 1: 1.5, 2: 2.0}, 3.0) == "1.5, 2, expected 3"
    assert _shown({0: 3.0 + 1e-9, 1: 3.0 - 3e-9}, 3.0) == "3, off by 3.0e-09"
    assert (_is_close(-2.0, -2.0 - 1e-9), _is_close(2.0, 2.0 + 3e-9)) == (True, False)


def test_a_report_has_few_lines_and_says_what_is_across_hosts() -> None:
    paper = OnPaper(dp=2, tp=1)
    paper._hosts = ("a", "b")
    found = failure(WHOLE, WHOLE, layout=paper)
    text = describe(found, [f"number {number}" for number in range(9)]).splitlines()
    assert text[0] == "on paper is not the unsharded model (in step 2; across hosts: dp):"
    assert text[1:] == [f"  note: number {number}" for number in range(_LINES - 1)]


def test_of_many_complaints_the_first_are_shown() -> None:
    moments = {
        0: Moment(0, "before step 0", "parameter", complaints=[f"{number} is wrong" for number in range(9)])
    }
    text = describe(Failure(OnPaper(dp=2), SHARDS, cast(Any, None), 1, moments, {}))
    assert text.splitlines()[1] == "  0 is wrong (rank 0)"
    assert text.splitlines()[-1] == f"  and {9 - _CAUSES} more"


def test_complaints_are_said_in_place_of_what_differs() -> None:
    found = lines(OTHER, OTHER, losses=(9.0, 9.0), complaints=["`a` is wrong", "`b` is wrong"])
    assert found[1:] == ["`a` is wrong (ranks 0, 1)", "`b` is wrong (ranks 0, 1)"]


def test_blocks_are_as_many_as_parts_of_the_batch() -> None:
    asked: list[tuple[int, int, int, str]] = []
    found = failure(*[WHOLE] * 12, layout=OnPaper(dp=2, fsdp=3, tp=2))
    found.reference.blocks = lambda *given: asked.append(given) or blocks(*given)  # type: ignore[method-assign, func-returns-value]
    of = found._weighing("z")
    assert asked == [(2, 6, 1, "z")]
    assert (of.data_axes, of.sizes, of.microbatches) == (
        {"dp": 2, "fsdp": 3},
        {"dp": 2, "fsdp": 3, "tp": 2},
        1,
    )
