"""Tables of claims and engines: reading reports, counting, merging."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from lockstep.__main__ import main
from lockstep.conformance import Capability, NotOffered
from lockstep.conformance.causes import causes
from lockstep.conformance.collecting import read_case
from lockstep.conformance.render import to_markdown, to_page
from lockstep.conformance.shape import WrongShape, check_shape
from lockstep.conformance.stored import NoTable, dump, load, merge, write
from lockstep.conformance.table import Case, Cell, Claim, Outcome, Share, SuiteRun, Table
from lockstep.output import write_texts


def one(engine: str, claim: str, outcome: Outcome, **run: object) -> Table:
    table = Table([engine], {claim: Claim(claim)})
    table.cells[claim] = {engine: Cell((Case("", outcome, text="E  why"),), 0.5)}
    settings = {"when": "2026-01-01", "seconds": 1.0, "arguments": (), "versions": {}, "ended": "complete"}
    table.runs.append(SuiteRun(**settings | run))
    return table


def test_tables_of_single_engines_merge_and_the_last_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = [
        one(
            "A",
            "s/test_x.py::test_1",
            Outcome.BROKEN,
            deselected=("s/test_x.py::test_2", "s/test_x.py::test_3"),
        ),
        one("B", "s/test_x.py::test_2", Outcome.HELD),
        one("A", "s/test_x.py::test_1", Outcome.HELD),
    ]
    for number, table in enumerate(tables):
        (tmp_path / f"{number}.json").write_text(dump(table))
    assert main(["conformance", "--merge", "0.json", "1.json", "2.json", "--output", "all"]) == 0
    message = "A  1 of 2 (50 %) cases held, 1 of 2 (50 %) claims, 1 not run"
    assert capsys.readouterr().out.splitlines()[0] == message
    merged = load(tmp_path / "all" / "conformance.json")
    assert merged == merge(tables)
    assert (merged.engines, len(merged.runs)) == (["A", "B"], 3)
    found = [[merged.cell(claim, engine).outcome for engine in "AB"] for claim in merged.claims.values()]
    assert found == [[Outcome.HELD, Outcome.NOT_RUN], [Outcome.NOT_RUN, Outcome.HELD]]
    assert "Left out by the arguments\n\n* `s/test_x.py::test_3`\n" in to_markdown(merged)
    assert to_page(merged) == (tmp_path / "all" / "conformance.html").read_text()


def test_tables_of_several_torch_versions_merge_into_columns_of_each() -> None:
    claim = "s/test_x.py::test_1"
    old, new = (
        one("A", claim, Outcome.HELD, versions={"torch": version})
        for version in ("2.13.0+cpu", "2.15.0.dev20261101+cpu")
    )
    merged = merge([old, new])
    assert merged.engines == ["A 2.13", "A 2.15"]
    assert [merged.cell(merged.claims[claim], name).held for name in merged.engines] == [1, 1]
    assert "| claim | A 2.13 | A 2.15 |" in to_markdown(merged)
    third = one("B", "s/test_x.py::test_2", Outcome.HELD, versions={"torch": "2.14.1"})
    assert merge([merged, third]).engines == ["A 2.13", "A 2.15", "B 2.14"]
    assert merge([old, old]).engines == ["A"]


def test_builds_of_one_torch_version_are_named_in_full() -> None:
    builds = ("2.13.0+cpu", "2.13.0+cu130")
    tables = [one("A", "s/test_x.py::test_1", Outcome.HELD, versions={"torch": each}) for each in builds]
    assert merge(tables).engines == ["A 2.13.0+cpu", "A 2.13.0+cu130"]


CHANGES = """\
# What changed

* Before: 2026-01-01, 1 s, torch 2.13.0: pytest : ran to its end.
* After: 2026-01-01, 1 s, torch 2.15.0: pytest : ran to its end.

## A

### held, now broken (1 claim)

* `s/test_x.py::test_1`: 1/1 → 0/1: why

### known deviation, now held (1 claim)

* `s/test_x.py::test_2`: 0/1 → 1/1

### Run only before (1 claim)

* `s/test_x.py::test_4`

Only one table has these engines: B, C.
"""


def test_what_changed_between_two_tables_is_listed_by_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    held, broken, known = Outcome.HELD, Outcome.BROKEN, Outcome.DEVIATION
    old = joined("2.13.0", [("A", 1, held), ("A", 2, known), ("B", 1, held), ("A", 4, held)])
    new = joined("2.15.0", [("A", 1, broken), ("A", 2, held), ("C", 1, held)])
    for name, table in (("old", old), ("new", new)):
        Path(f"{name}.json").write_text(dump(table))
    assert main(["conformance", "--diff", "old.json", "new.json", "--output", "out"]) == 1
    assert capsys.readouterr().out == CHANGES
    assert Path("out/changes.md").read_text() == CHANGES
    assert main(["conformance", "--diff", "new.json", "old.json", "--output", "out"]) == 0
    assert main(["conformance", "--diff", "new.json", "new.json", "--output", "out"]) == 0
    assert "## C\n\nNo claim has another outcome.\n" in Path("out/changes.md").read_text()


def joined(torch: str, cells: list[tuple[str, int, Outcome]]) -> Table:
    """Return the table of one run with several engines: engine, number of the claim, outcome."""
    tables = [one(engine, f"s/test_x.py::test_{number}", outcome) for engine, number, outcome in cells]
    table = merge(tables)
    table.runs = one("A", "", Outcome.HELD, versions={"torch": torch}).runs
    return table


def test_warnings_of_all_tables_are_kept_and_tests_that_ran_twice_count_once() -> None:
    tables = [one("A", f"s/test_x.py::test_{number}", Outcome.HELD) for number in range(3)]
    tables[0].warnings = {"A": {"old": 3, "older": 1}}
    tables[1].warnings = {"A": {"old": 1, "new": 2}, "B": {"old": 1}}
    assert merge(tables).warnings == {"A": {"old": 3, "older": 1, "new": 2}, "B": {"old": 1}}
    assert tables[0].warnings == {"A": {"old": 3, "older": 1}}


ONE = dump(one("A", "s/test_x.py::test_1", Outcome.HELD))
"""A table of one claim, as it is in a file."""

CASE = ["claims", 0, "engines", "A", "cases", 0]
CELL = "claims[0].engines['A']"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError: Expecting property name"),
        ("[" * 100_000, "its brackets are nested too deeply"),
        ("[]", "the table is a list, and not an object"),
        ("null", "the table is null, and not an object"),
        ("3", "the table is a number, 3, and not an object"),
        ('{"format": 1, "engines": []}', "the table has no 'claims'"),
        ('{"engines": []}', "the table has no 'format'"),
    ],
)
def test_a_file_that_holds_no_table_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "table.json").write_text(text)
    refused = re.escape("table.json is no conformance.json: ") + f"(WrongShape: )?{re.escape(message)}"
    with pytest.raises(NoTable, match=refused):
        load(tmp_path / "table.json")


def test_a_table_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"format": 2}')
    with pytest.raises(NoTable, match=r"table.json: format 2, this version reads 1"):
        load(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["engines"], "A", "engines is a text, 'A', and not a list"),
        (["engines", 0], 3, "engines[0] is a number, 3, and not a text"),
        (["engines"], ["A", "A"], "engines have 'A' 2 times"),
        (["engines"], ["B"], "claims[0].engines has 'A', which the table's engines do not have"),
        (["colour"], 3, "the table has 'colour'; it can have format, engines, claims, runs, warnings"),
        (["warnings"], [], "warnings is a list, and not an object"),
        (["warnings"], {"A": 3}, "warnings['A'] is a number, 3, and not an object"),
        (["warnings"], {"A": {"old": "3"}}, "warnings['A']['old'] is a text, '3', and not a count"),
        (["warnings"], {"A": {"old": True}}, "warnings['A']['old'] is a truth value, True, and not a count"),
        (["claims"], {}, "claims is an object, and not a list"),
        (["claims", 0], None, "claims[0] is null, and not an object"),
        (["claims", 0], {}, "claims[0] has no 'id'"),
        (["claims", 0, "id"], 3, "claims[0].id is a number, 3, and not a text"),
        (["claims", 0, "id"], ["a"], "claims[0].id is a list, and not a text"),
        (["claims", 0, "title"], None, "claims[0].title is null, and not a text"),
        (["claims", 0, "engines"], ["A"], "claims[0].engines is a list, and not an object"),
        (["claims", 0, "engines", "A"], [], f"{CELL} is a list, and not an object"),
        (["claims", 0, "engines", "A"], {"cases": []}, f"{CELL} has no 'seconds'"),
        ([*CASE[:-2], "seconds"], "1", f"{CELL}.seconds is a text, '1', and not a number of seconds"),
        ([*CASE[:-2], "seconds"], -1, f"{CELL}.seconds is a number, -1, and not a number of seconds"),
        ([*CASE[:-2], "seconds"], math.nan, f"{CELL}.seconds is a number, nan, and not a number of seconds"),
        ([*CASE[:-2], "seconds"], 10**4000, f"{CELL}.seconds is a number, one of more than 12 digits, and"),
        ([*CASE[:-1]], 3, f"{CELL}.cases is a number, 3, and not a list"),
        (CASE, "held", f"{CELL}.cases[0] is a text, 'held', and not an object"),
        ([*CASE, "name"], None, f"{CELL}.cases[0].name is null, and not a text"),
        ([*CASE, "text"], 3, f"{CELL}.cases[0].text is a number, 3, and not a text"),
        (
            [*CASE, "outcome"],
            "won",
            f"{CELL}.cases[0].outcome is a text, 'won', and not one of broken, mended",
        ),
        ([*CASE, "outcome"], [], f"{CELL}.cases[0].outcome is a list, and not one of broken"),
        ([*CASE, "colour"], 3, f"{CELL}.cases[0] has 'colour'; it can have name, outcome, reason, text"),
        (["runs"], None, "runs is null, and not a list"),
        (["runs", 0, "when"], 3, "runs[0].when is a number, 3, and not a text"),
        (["runs", 0, "seconds"], math.inf, "runs[0].seconds is a number, inf, and not a number of seconds"),
        (["runs", 0, "arguments"], "-x", "runs[0].arguments is a text, '-x', and not a list"),
        (["runs", 0, "arguments"], [1], "runs[0].arguments[0] is a number, 1, and not a text"),
        (["runs", 0, "versions"], ["torch"], "runs[0].versions is a list, and not an object"),
        (["runs", 0, "versions"], {"torch": 2}, "runs[0].versions['torch'] is a number, 2, and not a text"),
        (["runs", 0, "deselected"], [{}], "runs[0].deselected[0] is an object, and not a text"),
        (["runs", 0, "colour"], 3, "runs[0] has 'colour'; it can have when, seconds"),
    ],
)
def test_a_table_of_a_wrong_shape_is_refused_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: list[str | int], value: object, message: str
) -> None:
    table = content = json.loads(ONE)
    for name in place[:-1]:
        content = content[name]
    content[place[-1]] = value
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    assert main(["conformance", "--merge", str(file), "--output", str(tmp_path / "out")]) == 4
    start = f"python -m lockstep conformance: {file} is no conformance.json: WrongShape: {message}"
    assert capsys.readouterr().err.startswith(start)
    assert not (tmp_path / "out").exists()


def test_a_claim_that_a_table_has_twice_is_refused(tmp_path: Path) -> None:
    table = json.loads(ONE)
    table["claims"] *= 2
    (tmp_path / "table.json").write_text(json.dumps(table))
    with pytest.raises(NoTable, match=r"the ids of claims have 's/test_x.py::test_1' 2 times"):
        load(tmp_path / "table.json")


def test_unusual_tables_are_merged(tmp_path: Path) -> None:
    surrogate = one("A \ud800", "s/test_x.py::test_1", Outcome.BROKEN)
    no_reason = one("A", "s/test_x.py::test_2", Outcome.DEVIATION)
    no_engine = Table([], {"s/test_x.py::test_3": Claim("s/test_x.py::test_3")})
    files = []
    for number, table in enumerate((surrogate, no_reason, no_engine)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(dump(table))
        assert main(["conformance", "--merge", str(files[-1]), "--output", str(tmp_path / "one")]) == 0
    assert main(["conformance", "--merge", *map(str, files), "--output", str(tmp_path / "all")]) == 0
    assert "A \\ud800" in (tmp_path / "all" / "conformance.html").read_text()


@pytest.mark.parametrize("option", ["--merge", "--diff"])
@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("file", "file: File exists"),
        ("file/below", "file/below: Not a directory"),
        ("/dev/null/below", "/dev/null/below: Not a directory"),
        ("dangling", "dangling: File exists"),
        ("taken", "taken/{name}: Is a directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_named_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    output: str,
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("dangling").symlink_to("away/out")
    name = "conformance.html" if option == "--merge" else "changes.md"
    Path("taken", name).mkdir(parents=True)
    Path("table.json").write_text(ONE)
    files = ["table.json"] * (1 if option == "--merge" else 2)
    assert main(["conformance", option, *files, "--output", output]) == pytest.ExitCode.USAGE_ERROR
    message = f"nothing is written to --output {output}: {problem.format(name=name)}\n"
    assert capsys.readouterr() == ("", f"python -m lockstep conformance: {message}")
    assert [path.name for path in Path("taken").iterdir()] == [name]


def test_of_several_files_none_is_written_where_one_cannot_be(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_text("before")
    with pytest.raises(OSError, match="Not a directory"):
        write_texts({first: "after", Path("/dev/null/second"): ""})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("first", "before")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge", "away.json"], "away.json is no conformance.json: FileNotFoundError"),
        (["--engine", "lockstep", "--merge", "a.json"], "--merge runs nothing; it has no use for --engine"),
        (["--merge", "a.json", "-x"], "--merge runs nothing; it has no use for -x"),
        (["--diff", "a.json", "b.json", "-x"], "--diff runs nothing; it has no use for -x"),
        (["--diff", "a", "b", "--merge", "c"], "--merge runs nothing; it has no use for --diff"),
        (["--diff", "away.json", "b.json"], "away.json is no conformance.json: FileNotFoundError"),
    ],
)
def test_merging_refuses_what_it_cannot_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["conformance", *arguments]) == pytest.ExitCode.USAGE_ERROR
    assert capsys.readouterr().err.startswith(f"python -m lockstep conformance: {message}")


# What reports become


def skipped(reason: str) -> pytest.TestReport:
    longrepr = ("test.py", 1, reason)
    return pytest.TestReport("test.py::test", ("test.py", 0, "test"), {}, "skipped", longrepr, "call")


def test_a_skip_by_an_adapter_differs_from_other_skips() -> None:
    error = NotOffered("torch-ddp", Capability.SHARDING)
    for text in (f"Skipped: {error}", f"lockstep.conformance.capabilities.NotOffered: {error}"):
        assert read_case(skipped(text)) == Case("", Outcome.NOT_OFFERED, "sharding")
    assert read_case(skipped("Skipped: no")) == Case("", Outcome.SKIPPED, "no")


def failed(text: str) -> Case | None:
    where = ("test.py", 0, "test")
    return read_case(pytest.TestReport("test.py::test", where, {}, "failed", text, "call"))


def test_an_unexpected_pass_differs_from_a_failure() -> None:
    assert failed("rank 0 of 1 failed\n[XPASS(strict)] rounds twice\n") == Case(
        "", Outcome.MENDED, "rounds twice"
    )
    claim = Claim("test.py::test")
    deviates = Case("a=1", Outcome.DEVIATION, "why")
    mended = {
        "all": Cell((Case("", Outcome.MENDED),)),
        "some": Cell((Case("a=2", Outcome.MENDED), deviates)),
    }
    table = Table(list(mended), {claim.id: claim}, {claim.id: mended})
    assert [table.holds(claim, engine) for engine in table.engines] == [True, False]
    assert [str(cell.outcome) for cell in mended.values()] == ["mended"] * 2


def test_failed_subtests_are_counted_once() -> None:
    assert failed("contains 2 failed subtests") is None


def test_a_long_failure_loses_its_middle() -> None:
    case = failed("start" + "x" * 100_000 + "end")
    assert case is not None
    assert len(case.text) < 13_000
    assert (case.text[:6], case.text[-4:]) == ("startx", "xend")
    assert "[88008 characters left out]" in case.text
    (whole, cut) = (failed("x" * length) for length in (12_000, 12_001))
    assert whole is not None
    assert whole.text == "x" * 12_000
    assert cut is not None
    assert cut.text == f"{'x' * 6000}\n[1 characters left out]\n{'x' * 6000}"


def test_an_engine_that_broke_early_has_as_many_cases_as_others() -> None:
    claim = Claim("s/test_x.py::test_1")
    held = tuple(Case(f"a={number}", Outcome.HELD) for number in range(5))
    cells = {
        "whole": Cell(held),
        "died": Cell((*held[:2], Case("", Outcome.BROKEN))),
        "refused": Cell((Case("", Outcome.NOT_OFFERED, "sharding"),)),
    }
    table = Table([*cells, "absent"], {claim.id: claim}, {claim.id: cells})
    assert [table.share(engine, [claim]) for engine in table.engines] == [
        Share(held, 5) for held in (5, 2, 0, 0)
    ]
    assert [table.share_of_offered(engine, [claim]).total for engine in table.engines] == [5, 5, 0, 5]
    assert table.only("whole") == []  # the absent one was not run


# Rows and causes


def of_parameters(*texts: str) -> Table:
    """Return a table of one test whose parameter sets failed with these texts; "" is one that is held."""
    table = Table(["mine:Engine"])
    for number, text in enumerate(texts):
        claim = Claim(f"s/test_x.py::test_1[{number}-ranks]")
        table.claims[claim.id] = claim
        outcome = Outcome.BROKEN if text else Outcome.HELD
        table.cells[claim.id] = {"mine:Engine": Cell((Case("", outcome, text=text),), 0.5)}
    return table


def test_a_test_is_a_row_that_opens_into_its_parameter_sets() -> None:
    table = of_parameters("", "E   ValueError: 1", "")
    lines = to_markdown(table).splitlines()
    assert "| 1 (3 parameter sets) | ✗ broken 2/3, 1.50 s |" in lines
    assert [line for line in lines if "-ranks` |" in line] == [
        "| `0-ranks` | ✓ 1/1, 0.50 s |",
        "| `1-ranks` | ✗ broken 0/1, 0.50 s |",
        "| `2-ranks` | ✓ 1/1, 0.50 s |",
    ]
    page = to_page(table)
    assert page.count("<details><summary>1 <i>3 parameter sets</i></summary></details>") == 1
    assert page.count("<tr class=p ") == 3
    assert page.count('<a href="#c0">') == 2


TRACEBACK = """rank 0 of 2 failed first
suites/core/test_a.py:{line}: in check
mine/engine.py:7: in step
E   RuntimeError: tensor 1.weight at 0x7f{number}a is off by {number}.00061035156251
/usr/lib/python3.11/site-packages/torch/optim.py:9: RuntimeError
------------------- rank 1 failed -------------------
mine/engine.py:99: RuntimeError
---------------- re-run (seed 0) ----------------
pytest s/test_x.py --engine mine:Engine -k {line}
"""


def test_causes_are_places_and_messages_without_numbers() -> None:
    same = [TRACEBACK.format(line=line, number=line * 3) for line in (1, 2, 3)]
    other = "E   RuntimeError: other\nmine/engine.py:7: RuntimeError"
    bare = "E   assert 3 == 4\nmine/a.py:8: AssertionError"
    first, *rest = causes(of_parameters(other, *same, bare, "rank 1 of 2 died: SIGSEGV"))
    assert (len(first.broken), first.where) == (3, "mine/engine.py:7")
    assert first.what == "RuntimeError: tensor N.weight at ID is off by N"
    assert first.rerun == "pytest s/test_x.py --engine mine:Engine -k 1"
    assert [(len(cause.broken), cause.where, cause.what) for cause in rest] == [
        (1, "mine/engine.py:7", "RuntimeError: other"),
        (1, "mine/a.py:8", "AssertionError: assert N == N"),
        (1, "", "rank N of N died: SIGSEGV"),
    ]
    line = "pytest 's/test_x.py::test_1[0-ranks]' -p lockstep.conformance.plugin --engine mine:Engine"
    assert rest[0].rerun == line


def test_a_folder_harness_is_the_projects_own() -> None:
    text = "suites/test_a.py:1: in check\nE   ValueError: x\nFOLDER/mine.py:7: ValueError"
    assert causes(of_parameters(text.replace("FOLDER", "lockstep")))[0].where == "suites/test_a.py:1"
    assert causes(of_parameters(text.replace("FOLDER", "harness")))[0].where == "harness/mine.py:7"


def test_merged_tables_keep_titles_and_warnings_of_each(tmp_path: Path) -> None:
    tables = [one("A", "t", Outcome.HELD, versions={"torch": "2.13.0"}) for _ in range(3)]
    for table, title in zip(tables, ("", "first", "second"), strict=True):
        table.claims["t"] = Claim("t", title)
    for table, number in zip(tables, (0, 3, 2), strict=True):
        table.warnings["A"] = {"UserWarning: x": number}
    assert merge(tables).claims["t"].title == "first"
    assert merge(tables).warnings == {"A": {"UserWarning: x": 3}}
    assert merge(tables[:1]).warnings == {"A": {"UserWarning: x": 0}}
    other = one("A", "t", Outcome.BROKEN, versions={"torch": "2.15.1"})
    other.warnings["A"] = {"UserWarning: y": 1}
    apart = merge([tables[1], other])
    assert apart.warnings == {"A 2.13": {"UserWarning: x": 3}, "A 2.15": {"UserWarning: y": 1}}
    write(apart, tmp_path / "new" / "below")
    assert load(tmp_path / "new" / "below" / "conformance.json") == apart


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, ""),
        (10**12, ""),
        (-1, "is a number, -1, and not a count"),
        (10**12 + 1, "is a number, one of more than 12 digits, and not a count"),
        (1.5, "is a number, 1.5, and not a count"),
        (True, "is a truth value, True, and not a count"),
        (None, "is null, and not a count"),
        ([], "is a list, and not a count"),
        ("x" * 58, f"is a text, '{'x' * 58}', and not a count"),
        ("x" * 59, f"is a text, '{'x' * 56}..., and not a count"),
    ],
)
def test_the_number_of_a_warning_is_a_count(number: object, words: str) -> None:
    content = {"engines": ["a"], "claims": [], "runs": [], "format": 1, "warnings": {"a": {"w": number}}}
    if not words:
        check_shape(content)
        return
    with pytest.raises(WrongShape) as caught:
        check_shape(content)
    assert str(caught.value) == f"warnings['a']['w'] {words}"


def test_the_name_that_is_there_most_often_is_named() -> None:
    content = {"engines": ["a", "b", "c", "b", "c", "c"], "claims": [], "runs": [], "format": 1}
    with pytest.raises(WrongShape, match=r"^engines have 'c' 3 times$"):
        check_shape(content)
