"""`--draw K/N` of the project's conftest.py: part K of N of what is collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suites.selftest.warm_pytest import run_to_end

ROOT = Path(__file__).parents[2]


def collect(*options: str) -> tuple[int, str]:
    command = ["suites/core/test_clipping.py", "--collect-only", "-q", "-p", "no:cacheprovider"]
    return run_to_end([*command, *options], ROOT, os.environ, timeout=180)


def collected(*options: str) -> list[str]:
    code, printed = collect(*options)
    assert code == 0, printed
    return [line for line in printed.splitlines() if "::" in line]


def test_each_test_is_in_one_part_and_in_each_process_in_the_same() -> None:
    everything, first, second = collected(), collected("--draw=1/2"), collected("--draw=2/2")
    assert first
    assert second
    assert sorted(first + second) == sorted(everything)
    assert collected("--draw=1/2") == first


@pytest.mark.parametrize("wrong", ["10", "0/2", "3/2", "1/0", "1/2/3"])
def test_a_part_that_there_is_not_is_refused(wrong: str) -> None:
    code, printed = collect(f"--draw={wrong}")
    assert code == 4
    assert f"{wrong!r}: write K/N, such as 1/10, with K from 1 to N" in printed
