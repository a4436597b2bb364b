"""The table of claims and engines: what a run writes, and what it says of what was not run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.conformance.stored import dump, load
from lockstep.conformance.table import Case, Claim, Outcome, Share, Table
from suites.selftest.project import copy_project
from suites.selftest.warm_pytest import run_to_end

PROJECT = Path(__file__).parents[3]


def conformance(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit status, and what it printed."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (PROJECT, directory)))}
    return run_to_end(("conformance", *arguments), directory, environ, timeout=300, module="lockstep")


@dataclass
class Written:
    """The exit status and the output of a run of the command, and the files that it wrote."""

    status: int
    output: str
    directory: Path

    @property
    def table(self) -> Table:
        return load(self.directory / "conformance.json")

    def read(self, suffix: str) -> str:
        return (self.directory / f"conformance.{suffix}").read_text()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("sample")
    copy_project("conformance", directory)
    engines = ("--engine", "lockstep", "--engine", "other:Other")
    return Written(*conformance(directory, *engines, "--output", "out", "claims"), directory / "out")


STEP = "claims/test_step.py"
OUTCOMES = {
    # claim: (title, outcome and cases held of each engine)
    f"{STEP}::TestStep::test_moves_all_weights": ("Weights move <b>alike</b>.", "held 3/3", "broken 2/3"),
    f"{STEP}::TestStep::test_shards": ("", "held 2/2", "not offered 0/2"),
    f"{STEP}::test_half_of_it": ("", "held 2/2", "held 1/2"),
    f"{STEP}::TestInTheController::test_rounding[fp16]": ("", "held 1/1", "known deviation 0/1"),
    f"{STEP}::TestInTheController::test_on_a_gpu": ("", "skipped 0/1", "skipped 0/1"),
    f"{STEP}::TestInTheController::test_tear_down": ("", "held 1/1", "broken 0/1"),
    f"{STEP}::TestInTheController::test_no_engine_holds_it": ("", "broken 0/1", "broken 0/1"),
}


def test_the_table_has_each_claim_with_each_engines_outcome(written: Written) -> None:
    table = written.table
    assert table.engines == ["lockstep", "other:Other"]
    found = {
        claim.id: (claim.title, *(outcome(table, claim, engine) for engine in table.engines))
        for claim in table.claims.values()
    }
    assert found == OUTCOMES
    assert written.status == pytest.ExitCode.TESTS_FAILED


def outcome(table: Table, claim: Claim, engine: str) -> str:
    cell = table.cell(claim, engine)
    assert (cell.seconds > 0) == bool(cell.cases)
    return f"{cell.outcome} {cell.held}/{table.num_cases(claim, engine)}"


def test_cases_carry_names_reasons_and_failures(written: Written) -> None:
    table = written.table
    cases = {claim.name: table.cell(claim, "other:Other").cases for claim in table.claims.values()}
    assert cases["shards"] == (Case("", Outcome.NOT_OFFERED, "sharding"),)
    assert cases["half of it"][1] == Case("offload=True", Outcome.NOT_OFFERED, "offload to CPU")
    assert cases["rounding"] == (Case("", Outcome.DEVIATION, "rounds twice, pytorch#144045"),)
    assert cases["on a gpu"] == (Case("", Outcome.SKIPPED, "needs a GPU"),)
    broken = cases["moves all weights"][1]
    assert (broken.name, broken.outcome) == ("lr=2", Outcome.BROKEN)
    assert broken.text.startswith("all 2 ranks failed")
    assert "a <weight> | stood still" in broken.text
    (tear_down,) = cases["tear down"]
    assert tear_down.text.startswith("in teardown\n")
    assert "left behind" in tear_down.text


def test_shares_count_cases_and_claims_of_all_and_of_offered(written: Written) -> None:
    table = written.table
    claims = list(table.claims.values())
    assert table.share("lockstep", claims) == Share(9, 11)
    assert table.share("other:Other", claims) == Share(3, 11)
    assert table.share_of_offered("other:Other", claims) == Share(3, 8)
    assert table.claims_held("other:Other", claims) == Share(1, 7)
    only = [claim.name for claim in table.only("lockstep")]
    assert only == ["moves all weights", "shards", "rounding", "tear down"]
    assert table.only("other:Other") == []
    lines = written.output.splitlines()
    assert "lockstep     9 of 11 (81 %) cases held, 5 of 7 (71 %) claims, 1 broken, 1 skipped" in lines
    assert (
        "other:Other  3 of 11 (27 %) cases held, 1 of 7 (14 %) claims, 3 broken, 1 known deviation, "
        "1 not offered, 1 skipped"
    ) in lines
    assert f"written to {written.directory / 'conformance.html'}" in lines


def test_the_run_is_described(written: Written) -> None:
    (run,) = written.table.runs
    assert (run.ended, run.deselected) == ("complete", ())
    assert run.versions.keys() == {"torch", "lockstep-harness", "pytest"}
    assert run.arguments[-1] == "claims"


# The page


class Page(HTMLParser):
    """Elements with their text; fails where tags do not match."""

    VOID = frozenset({"meta", "br", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            self.elements.append((tag, dict(attrs), ""))
        else:
            self.open.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        name, attributes, texts = self.open.pop()
        assert name == tag
        self.elements.append((tag, attributes, "".join(texts)))

    def handle_data(self, data: str) -> None:
        for *_, texts in self.open:
            texts.append(data)

    def attributes(self, name: str) -> list[str]:
        return [str(found[name]) for _, found, _ in self.elements if name in found]

    def texts(self, tag: str, **wanted: str) -> list[str]:
        return [
            text for name, found, text in self.elements if name == tag and wanted.items() <= found.items()
        ]


@pytest.fixture(scope="module")
def page(written: Written) -> Page:
    return Page(written.read("html"))


def without_seconds(text: str) -> str:
    return re.sub(r" [\d.]+ s$", "", text)


def test_the_page_is_well_formed_and_every_cell_has_its_text(page: Page) -> None:
    assert page.texts("th", scope="row")[2:] == [
        "moves all weights Weights move <b>alike</b>.",
        "shards",
        "half of it",
        "rounding fp16",
        "on a gpu",
        "tear down",
        "no engine holds it",
    ]
    cells = [without_seconds(text) for tag, found, text in page.elements if tag == "td" and "class" in found]
    assert cells == [
        *("✓ 3/3", "✗ broken 2/3"),
        *("✓ 2/2", "- not offered: sharding"),
        *("✓ 2/2", "✓ 1/2 (1 not offered)"),
        *("✓ 1/1", "≈ deviates 0/1"),
        *("○ skipped: needs a GPU",) * 2,
        *("✓ 1/1", "✗ broken 0/1"),
        *("✗ broken 0/1",) * 2,
    ]


def test_the_page_loads_nothing_and_its_links_have_targets(page: Page) -> None:
    assert {tag for tag, _, _ in page.elements}.isdisjoint({"link", "img", "iframe", "object", "base"})
    assert page.attributes("src") == []
    (style,), (script,) = page.texts("style"), page.texts("script")
    for word in ("url(", "@import", "import(", "fetch", "http"):
        assert word not in style + script
    links, ids = page.attributes("href"), page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= set(ids)
    outside = [link for link in links if not link.startswith("#")]
    assert outside == ["https://github.com/pytorch/pytorch/issues/144045"]


def test_causes_come_first_with_their_counts_and_a_line_to_run_again(page: Page) -> None:
    assert page.texts("h2")[:2] == ["Broken", "Cases held"]
    found = [re.sub(r"\s+", " ", text) for text in page.texts("p", **{"class": "cause"})]
    assert {text.partition(" on ")[0] for text in found} == {"1 case of 1 claim"}
    assert [text.partition(" on ")[2] for text in found] == [
        f"lockstep at {STEP}:64: AssertionError: assert 'lockstep' == 'none'",
        f"other:Other at {STEP}:23: AssertionError: a <weight> | stood still",
        f"other:Other at {STEP}:58: AssertionError: left behind",
        f"other:Other at {STEP}:64: AssertionError: assert 'other' == 'none'",
    ]
    lines = page.texts("pre", **{"class": "rerun"})
    plugin = "-p lockstep.conformance.plugin"
    assert lines[0] == f"pytest {STEP}::TestInTheController::test_no_engine_holds_it {plugin}"
    assert lines[1].startswith(f"pytest {STEP}::TestStep::test_moves_all_weights {plugin}")
    assert lines[1].endswith("--engine other:Other --subtest lr=2")


def test_broken_cells_link_to_the_text_of_their_failure(page: Page) -> None:
    links = [found["href"] for tag, found, text in page.elements if tag == "a" and "✗" in text]
    texts = [page.texts("div", id=str(link).removeprefix("#"))[0] for link in links]
    assert len(texts) == 4
    assert texts[0].strip().startswith("lr=2")
    assert "a <weight> | stood still" in texts[0]
    assert "left behind" in texts[1]
    assert ["'lockstep' == 'none'" in text for text in texts[2:]] == [True, False]


def test_without_a_script_the_filter_is_not_shown_and_all_else_is(page: Page) -> None:
    hidden = [found.get("id") for _, found, _ in page.elements if "hidden" in found]
    assert hidden == ["filter"]
    assert "4 claims" in page.texts("summary")  # what only lockstep holds


def test_markdown_has_a_row_for_each_claim_and_escapes_text(written: Written) -> None:
    lines = [re.sub(r", [\d.]+ s", "", line) for line in written.read("md").splitlines()]
    assert "| moves all weights: Weights move \\<b\\>alike\\</b\\>. | ✓ 3/3 | ✗ broken 2/3 |" in lines
    assert "| rounding `fp16` | ✓ 1/1 | ≈ deviates 0/1 |" in lines
    assert "| claims | 9 / 2 / 0, 81 % | 3 / 5 / 3, 27 % |" in lines
    issue = "[pytorch\\#144045](https://github.com/pytorch/pytorch/issues/144045)"
    assert f"* other:Other: rounds twice, {issue} (1 claim)" in lines
    message = "AssertionError: a \\<weight\\> \\| stood still"
    assert f"* **1 case** of 1 claim on other:Other at `{STEP}:23`: {message}" in lines
    assert f"  * `{STEP}::TestStep::test_moves_all_weights`: lr=2" in lines
    assert lines.index("## Broken") < lines.index("## Cases held")


def test_a_table_is_the_same_when_it_has_been_written_and_read(written: Written, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(dump(written.table))
    assert load(tmp_path / "table.json") == written.table
    assert json.loads(dump(written.table))["format"] == 1


def test_the_command_itself_warns_of_nothing(tmp_path: Path) -> None:
    """pytest warns of a plugin whose asserts it comes too late to rewrite."""
    copy_project("conformance", tmp_path)
    status, output = conformance(tmp_path, "--engine", "lockstep", "--collect-only", "-W", "error", "claims")
    assert status == 0, output


def test_cells_are_the_same_under_xdist(written: Written, tmp_path: Path) -> None:
    copy_project("conformance", tmp_path)
    _, output = conformance(tmp_path, "--engine", "lockstep", "--engine", "other:Other", "claims", "-n2")
    table = load(tmp_path / "conformance-report" / "conformance.json")
    assert table.claims.keys() == written.table.claims.keys(), output
    for claim in table.claims.values():
        for engine in ("lockstep", "other:Other"):
            cell, alone = table.cell(claim, engine), written.table.cell(claim, engine)
            assert [(case.name, case.outcome) for case in cell.cases] == [
                (case.name, case.outcome) for case in alone.cases
            ]
            assert not any("[gw" in case.text for case in cell.cases)


# What was not run


def test_with_n_x_and_k_the_table_says_what_was_not_run(tmp_path: Path) -> None:
    copy_project("left_out", tmp_path)
    _, output = conformance(tmp_path, *("--engine", "lockstep", "claims", "-n2", "-x", "-k", "test_it"))
    table = load(tmp_path / "conformance-report" / "conformance.json")
    assert len(table.claims) == 20, output
    outcomes = [table.cell(claim, "lockstep").outcome for claim in table.claims.values()]
    assert set(outcomes) == {Outcome.BROKEN, Outcome.NOT_RUN}
    (run,) = table.runs
    assert "stopping after 1 failures" in run.ended
    assert run.deselected == ("claims/test_a.py::test_left_out",)
    page = Page((tmp_path / "conformance-report" / "conformance.html").read_text())
    assert "did not run to its end" in page.texts("li")[0]
    assert page.texts("h2")[-2:] == ["Not run on lockstep", "Left out by the arguments"]


def test_a_table_that_cannot_be_written_is_refused_before_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(taken="")
    message = re.escape(f"--conformance {pytester.path / 'taken.py'}: File exists")
    with pytest.raises(pytest.UsageError, match=f"^{message}$"):
        pytester.parseconfigure("-p", "lockstep.conformance.plugin", "--conformance", "taken.py")


def test_a_table_that_cannot_be_written_is_reported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    pytester.path.joinpath("out", "conformance.md").mkdir(parents=True)
    run = pytester.runpytest("-p", "lockstep.conformance.plugin", "--conformance", "out")
    message = f"no file is written: {pytester.path / 'out' / 'conformance.md'}: Is a directory"
    run.stdout.fnmatch_lines([message])
    assert run.ret == pytest.ExitCode.INTERNAL_ERROR
    run.stdout.no_fnmatch_line("*INTERNALERROR*")
