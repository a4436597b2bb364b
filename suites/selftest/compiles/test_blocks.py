"""The block in which compiled code goes wrong is named, where compiled graphs show it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.exceptions import WorldError
from lockstep.features.compiles import FINDINGS
from lockstep.features.compiles.finding import Finding, described
from lockstep.features.divergence.recorded_run import look_at_graphs
from lockstep.world.outcome import ItemOutcome, RankOutcome
from suites.selftest.project import Run

PROJECT = "compiles"
OPTIONS = ("test_blocks.py", "-p", "no:cacheprovider")


def look(run: Run, name: str) -> str:
    """Return what the report says of the third run."""
    _, _, text = run.failure(name).partition("uncompiled, and passed.\n")
    return text.partition("\n----")[0]


@pytest.mark.parametrize(
    ("name", "backend", "call"),
    [
        ("test_around", "wrong", 2),
        ("test_whole", "wrong", 2),
        ("test_one_graph", "wrong", 1),
        ("test_checkpointed", "wrong_aot", 2),
    ],
)
def test_the_block_is_named(run: Run, name: str, backend: str, call: int) -> None:
    head, where, values, *_ = look(run, name).splitlines()
    assert head == f"eager agrees: the difference comes with {backend}, in module `blocks.1`"
    assert where == f"  on all ranks, at call {call} of a compiled graph (values of rank 0):"
    assert values.startswith("    the output: Mismatched elements: 12 / 12 (100.0%)")


def test_a_wrong_gradient_is_named_with_its_parameter(run: Run) -> None:
    text = look(run, "test_backward")
    assert text.startswith("eager agrees: the difference comes with wrong_backward, in module `blocks.1`\n")
    assert "    gradient of `widen.weight`: Mismatched elements: " in text
    assert "the output" not in text


def test_code_that_is_wrong_of_all_blocks_together_is_said_to_be_so(run: Run) -> None:
    assert look(run, "test_together").startswith(
        "eager agrees: the difference comes with wrong_together; in which module is not known: "
        "one graph has several, and compiled one by one they agree\n"
    )


def test_differences_within_the_tolerance_are_said_to_be_small(run: Run) -> None:
    text = look(run, "test_small")
    assert text.startswith(
        "eager agrees: the difference comes with ahead; in which module is not known: each graph alone"
    )
    assert "\n  first different bits in module `blocks.0`: the output: " in text


def test_of_several_cases_the_one_that_failed_is_looked_at(run: Run) -> None:
    assert look(run, "test_cases").startswith(
        "eager agrees: the difference comes with wrong, in module `blocks.1`\n"
    )


def test_a_difference_of_one_rank_names_that() -> None:
    found = Finding(2, "inductor", "blocks.0", ("the output: differs",))
    text = (
        "inductor, in module `blocks.0`\n  on rank 1, at call 2 of a compiled graph:\n    the output: differs"
    )
    assert described({0: Finding(backend="inductor"), 1: found}) == text


def test_a_graph_that_does_not_run_again_is_the_reason() -> None:
    why = "a graph did not run on copies of its inputs: RuntimeError: no"
    assert described({0: Finding(backend="inductor", unknown=why)}) == (
        f"inductor; in which module is not known: {why}"
    )


UNKNOWN = ": the difference comes with torch.compile; in which module is not known: a third run, compiled, "


@pytest.mark.parametrize(
    ("timed_out", "findings", "text"),
    [
        (True, {}, f"{UNKNOWN}was too slow"),
        (False, {}, f"{UNKNOWN}compared no graph"),
        (
            True,
            {0: Finding(1, "x", "a")},
            ": the difference comes with x, in module `a`\n  on rank 0, at call 1",
        ),
    ],
)
def test_a_third_run_names_what_it_found_or_why_not(
    timed_out: bool, findings: dict[int, Finding], text: str
) -> None:
    parts = {FINDINGS: findings} if findings else {}
    outcome = ItemOutcome((RankOutcome(0),), 1.0, timed_out, 1.0, parts=parts)
    order: Any = None
    assert look_at_graphs(order, lambda _: outcome).startswith(text)


def test_a_third_run_that_cannot_start_says_so() -> None:
    def run(_: object) -> ItemOutcome:
        raise WorldError("no room")

    order: Any = None
    assert look_at_graphs(order, run) == f"{UNKNOWN}could not start: no room"


def test_a_third_run_that_passes_says_so() -> None:
    order: Any = None
    text = look_at_graphs(order, lambda _: ItemOutcome((), 1.0, timed_out=False, seconds=1.0))
    assert text == ", and so did a third run, compiled: the difference does not come every time"
