"""The block in which compiled code goes wrong is named, where compiled graphs show it."""

from __future__ import annotations

import pytest

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
        ("test_around", "wrong", 3),
        ("test_whole", "wrong", 3),
        ("test_one_graph", "wrong", 1),
        ("test_checkpointed", "wrong_aot", 3),
    ],
)
def test_the_block_is_named(run: Run, name: str, backend: str, call: int) -> None:
    head, where, values, *_ = look(run, name).splitlines()
    assert head == f"eager agrees: the difference comes with {backend}, in module `blocks.2`"
    assert where == f"  on all ranks, at call {call} of a compiled graph (values of rank 0):"
    assert values.startswith("    the output: Mismatched elements: 12 / 12 (100.0%)")


def test_a_wrong_gradient_is_named_with_its_parameter(run: Run) -> None:
    text = look(run, "test_backward")
    assert text.startswith("eager agrees: the difference comes with wrong_backward, in module `blocks.2`\n")
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
        "eager agrees: the difference comes with wrong, in module `blocks.2`\n"
    )
