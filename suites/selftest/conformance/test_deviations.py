"""The tables of known deviations: each entry is about claims that exist, and says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.conformance import deviations
from lockstep.conformance.deviations import Deviation, expand
from lockstep.conformance.registry import built_in_names
from suites.selftest.warm_pytest import run_module

SUITES = Path(__file__).parents[2]
ENTRIES = [(engine, entry) for engine, table in deviations._TABLES.items() for entry in table]


@pytest.fixture(scope="module")
def claims() -> list[str]:
    """The node ids of all tests of the suites. Collected beside this run, which may hold one file only."""
    own = [
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        f"--ignore={SUITES / 'selftest'}",
        f"--ignore={SUITES / 'engine'}",
    ]
    done = run_module("pytest", str(SUITES), *own, cwd=SUITES.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_deviation_is_about_claims_that_exist(
    claims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(claims) > 1000
    patterns = {pattern for _, entry in ENTRIES for pattern in entry.claims}
    each = tuple(Deviation((pattern,), "") for pattern in patterns)
    monkeypatch.setitem(deviations._TABLES, "one for each pattern", each)
    known = (deviations.known_deviations("one for each pattern", claim) for claim in claims)
    assert patterns == {entry.claims[0] for entries in known for entry in entries}


def test_choices_in_braces_stand_for_a_pattern_each() -> None:
    assert expand("test_{a,b}[*-{,in}side]", "test_c") == (
        "test_a[*-side]",
        "test_a[*-inside]",
        "test_b[*-side]",
        "test_b[*-inside]",
        "test_c",
    )


def test_every_deviation_is_of_an_engine_that_can_be_named() -> None:
    assert deviations._TABLES.keys() <= set(built_in_names())


def test_a_claim_that_deviates_as_a_whole_has_one_reason(claims: list[str]) -> None:
    for engine in deviations._TABLES:
        for claim in claims:
            reasons = [
                entry.why for entry in deviations.known_deviations(engine, claim) if entry.cases is None
            ]
            assert len(reasons) <= 1, (engine, claim)


ROW = re.compile(r"^\| .*: `(?P<test>\S+)` \| (?P<marks>.*) \|$", re.MULTILINE)
PAGE = SUITES.parent / "docs" / "reference" / "conformance.md"


def test_the_page_marks_as_deviating_what_the_tables_say(
    claims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deviations, "_TORCH", "2.13.0")  # the page's
    _, _, table = PAGE.read_text().partition("| claim | ")
    engines = table.partition(" |\n")[0].split(" | ")
    rows = ROW.findall(table)
    assert len(rows) > 20
    for test, marks in rows:
        about = [claim for claim in claims if claim.partition("[")[0].endswith(f"/{test}")]
        known = {e: any(deviations.known_deviations(e, claim) for claim in about) for e in engines}
        assert known == dict(zip(engines, (mark == "≈" for mark in marks.split(" | ")), strict=True)), test


def test_the_shares_of_the_page_have_one_total() -> None:
    """All engines are asked the same cases, and those of the suites add up to all."""
    _, _, table = PAGE.read_text().partition("| engine | all | ")
    _, _, *lines = table.partition("\n\n")[0].splitlines()
    rows = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in lines)}
    assert {name.partition(" ")[0] for name in rows} == {*built_in_names()}  # of a version of torch, perhaps
    counts = [[[*map(int, cell.split(",")[0].split(" / "))] for cell in cells] for cells in rows.values()]
    assert len({tuple(sum(cell) for cell in cells) for cells in counts}) == 1
    for everything, *suites in counts:
        assert [sum(parts) for parts in zip(*suites, strict=True)] == everything


def test_a_reason_names_the_issue_if_there_is_one() -> None:
    assert Deviation(("test_a",), "it rounds").reason == "it rounds"
    assert Deviation(("test_a",), "it rounds", issue=7).reason == "it rounds (pytorch#7)"


@pytest.mark.parametrize(
    ("torch", "before", "since", "between"),
    [
        ("2.9.1", True, False, False),
        ("2.14.0+cpu", True, False, True),
        ("2.15.0", False, True, False),
        ("2.16", False, True, False),
    ],
)
def test_a_deviation_may_begin_or_end_with_a_version_of_torch(
    torch: str, before: bool, since: bool, between: bool
) -> None:
    def known(**versions: str) -> bool:
        return Deviation(("test_a",), "it rounds", **versions).is_of(torch)

    assert known()
    assert known(before="2.15") is before
    assert known(since="2.15") is since
    assert known(since="2.10", before="2.15") is between


def test_what_is_known_is_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = "core/test_states.py::test_evaluation_and_inference_mode_leave_training_possible[NO_SHARD-flat]"
    for torch, known in (("2.13.0+cpu", True), ("2.15.0", False)):
        monkeypatch.setattr(deviations, "_TORCH", torch)
        assert bool(deviations.known_deviations("torch-fsdp2", claim)) is known
