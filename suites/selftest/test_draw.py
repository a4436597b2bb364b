"""`--draw N` of the project's conftest.py: one claim of N."""

from __future__ import annotations

import os
from pathlib import Path

from suites.selftest.warm_pytest import run_to_end

ROOT = Path(__file__).parents[2]


def collect(number: int) -> tuple[int, str]:
    command = ["suites/core/test_clipping.py", "--collect-only", "-q", "-p", "no:cacheprovider"]
    return run_to_end([*command, f"--draw={number}"], ROOT, os.environ, timeout=180)


def test_a_part_is_drawn_the_same_in_each_process() -> None:
    (code, printed), again, everything = collect(2), collect(2), collect(1)
    drawn, all_of_them = (
        [line for line in text.splitlines() if "::" in line] for text in (printed, everything[1])
    )
    assert code == 0
    assert set(drawn) < set(all_of_them)
    assert [line for line in again[1].splitlines() if "::" in line] == drawn


def test_no_number_below_one_is_taken() -> None:
    code, printed = collect(0)
    assert code == 4
    assert "--draw=0: write a whole number from 1 on" in printed
