"""`--draw N` of the project's conftest.py: one claim of N."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def collect(number: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "suites/core/test_clipping.py", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--draw={number}"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


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
