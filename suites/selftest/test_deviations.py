"""The tables of known deviations: each entry is about claims that exist, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.adapters import deviations
from harness.adapters.deviations import Deviation
from harness.adapters.finding import built_in_names

SUITES = Path(__file__).parents[1]
ENTRIES = [(engine, entry) for engine, table in deviations._TABLES.items() for entry in table]


@pytest.fixture(scope="module")
def claims() -> list[str]:
    """The node ids of all tests of the suites. Collected beside this run, which may hold one file only."""
    own = ["--collect-only", "-q", "-p", "no:cacheprovider", f"--ignore={SUITES / 'selftest'}"]
    command = [sys.executable, "-m", "pytest", str(SUITES), *own]
    done = subprocess.run(command, cwd=SUITES.parent, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_deviation_is_about_claims_that_exist(claims: list[str]) -> None:
    assert len(claims) > 1000
    unknown = {
        (engine, pattern)
        for engine, entry in ENTRIES
        for pattern in entry.claims
        if not any(Deviation((pattern,), "").is_about(claim) for claim in claims)
    }
    assert unknown == set()


def test_every_deviation_is_of_an_engine_that_can_be_named() -> None:
    assert deviations._TABLES.keys() <= set(built_in_names())


def test_of_a_claim_that_deviates_as_a_whole_one_reason_is_told(claims: list[str]) -> None:
    for engine in deviations._TABLES:
        for claim in claims:
            told = [entry.why for entry in deviations.known_deviations(engine, claim) if entry.points is None]
            assert len(told) <= 1, (engine, claim)
