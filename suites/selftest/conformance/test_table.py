"""Unit tests of tables: names of claims, counts, changes and causes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.conformance import causes as causes_module
from lockstep.conformance import render
from lockstep.conformance.causes import causes
from lockstep.conformance.changes import changes, has_worsened, only_in
from lockstep.conformance.collecting import (
    summary,
)
from lockstep.conformance.table import Case, Cell, Claim, Outcome, Share, SuiteRun, Table

HELD, BROKEN, DEVIATION = Outcome.HELD, Outcome.BROKEN, Outcome.DEVIATION


def table(**cells: dict[str, Cell]) -> Table:
    """Return a table with the cells of each engine by claim."""
    names = dict.fromkeys(name for of_engine in cells.values() for name in of_engine)
    of_claims = {
        name: {engine: found[name] for engine, found in cells.items() if name in found} for name in names
    }
    return Table(list(cells), {name: Claim(name) for name in names}, of_claims)


def cell(*outcomes: Outcome, **fields: Any) -> Cell:
    """Return a cell with a named case for each outcome."""
    return Cell(tuple(Case(f"a={number}", each) for number, each in enumerate(outcomes)), **fields)


def test_a_claim_has_its_names_from_its_id() -> None:
    claim = Claim("s/below/test_x.py::TestA::test_b_c[2-ranks-x[0]]")
    assert (claim.file, claim.suite, claim.group) == (
        "s/below/test_x.py",
        "s/below",
        "s/below/test_x.py TestA",
    )
    assert (claim.name, claim.parameters) == ("b c", "2-ranks-x[0]")
    assert (Claim("test_x.py::test_1").suite, Claim("test_x.py::test_1").parameters) == (".", "")


def test_the_outcome_of_a_cell_is_the_first_in_order() -> None:
    assert [str(cell(*each).outcome) for each in ([HELD, BROKEN], [HELD, DEVIATION], [])] == [
        "broken",
        "known deviation",
        "not run",
    ]
    assert [each.holds for each in Outcome] == [False, True, False, True, False, False, False]
    mixed = cell(HELD, BROKEN, Outcome.MENDED, DEVIATION)
    assert mixed.held == 2
    assert [case.name for case in mixed.having(BROKEN)] == ["a=1"]


def test_a_cell_is_finished_if_the_test_itself_is() -> None:
    failed, passed = Case("", BROKEN), Case("", HELD)
    finished = Cell(), Cell((failed,)), Cell((passed,)), cell(BROKEN), Cell((Case("a", HELD), failed))
    assert [each.finished for each in finished] == [False, False, True, True, False]


def test_reasons_are_those_of_an_outcome_each_once() -> None:
    cases = [Case("a", DEVIATION, "one"), Case("b", DEVIATION, "one"), Case("c", DEVIATION, "")]
    found = Cell((*cases, Case("d", Outcome.SKIPPED, "two"), Case("e", DEVIATION, "three")))
    assert found.reasons(DEVIATION) == ["one", "three"]
    assert found.reasons(Outcome.SKIPPED) == ["two"]


def test_shares_are_rounded_down() -> None:
    assert [str(Share(*each)) for each in ((199, 200), (1, 3), (3, 3), (0, 0))] == [
        "199 of 200 (99 %)",
        "1 of 3 (33 %)",
        "3 of 3 (100 %)",
        "none",
    ]
    assert Share(0, 0).percent == 0


def test_cases_of_a_test_that_did_not_finish_are_those_of_others() -> None:
    found = table(
        whole={"t": cell(HELD, BROKEN)},
        died={"t": Cell((Case("", BROKEN),))},
        offers={"t": cell(HELD, Outcome.NOT_OFFERED)},
        none={"t": cell(Outcome.NOT_OFFERED, Outcome.NOT_OFFERED)},
    )
    (claim,) = found.claims.values()
    engines = [*found.engines, "absent"]
    assert [found.num_cases(claim, engine) for engine in engines] == [2, 2, 2, 2, 2]
    assert [found.num_offered(claim, engine) for engine in engines] == [2, 2, 1, 0, 2]
    assert found.num_cases(Claim("unknown"), "whole") == 1
    assert found.share("whole", [claim, claim]) == Share(2, 4)
    assert found.share_of_offered("offers", [claim]) == Share(1, 1)


def test_an_engine_alone_holds_what_each_other_was_run_on_and_breaks() -> None:
    held, broken = cell(HELD), cell(BROKEN)
    found = table(
        a={"t1": held, "t2": held, "t3": held, "t4": broken},
        b={"t1": broken, "t2": held, "t4": broken},
        c={"t1": broken, "t2": broken, "t3": broken, "t4": held},
    )
    assert [[claim.id for claim in found.only(engine)] for engine in "abc"] == [["t1"], [], ["t4"]]
    assert [claim.id for claim in found.not_run("b")] == ["t3"]
    assert table(a={"t1": held}).only("a") == []
    assert found.claims_held("a", list(found.claims.values())) == Share(3, 4)
    deviates = table(a={"t1": cell(HELD, DEVIATION), "t2": cell(Outcome.MENDED)})
    assert [deviates.holds(claim, "a") for claim in deviates.claims.values()] == [False, True]


def test_claims_are_put_together_by_test_and_by_folder() -> None:
    ids = ["s/x.py::test_1[a]", "s/y.py::test_1", "s/x.py::test_1[b]", "r/x.py::test_2"]
    found = table(a={name: cell(HELD, seconds=1.5) for name in ids})
    claims = list(found.claims.values())
    assert [[claim.id for claim in each] for each in found.tests(claims)] == [ids[::2], ids[1:2], ids[3:]]
    assert {key: len(each) for key, each in found.by("suite").items()} == {"s": 3, "r": 1}
    together = found.together(claims[:2], "a")
    assert (len(together.cases), together.seconds) == (2, 3.0)


def test_a_summary_has_a_line_for_each_engine_with_counts_of_outcomes() -> None:
    found = table(
        a={"t1": cell(HELD, HELD), "t2": cell(BROKEN), "t3": cell(BROKEN)},
        longer={"t1": cell(HELD, DEVIATION)},
    )
    assert summary(found) == [
        "a       2 of 4 (50 %) cases held, 1 of 3 (33 %) claims, 2 broken",
        "longer  1 of 4 (25 %) cases held, 0 of 3 (0 %) claims, 1 known deviation, 2 not run",
    ]
    assert summary(Table(["a"])) == ["no test of an engine was run"]


# Changes


def test_changes_are_those_of_claims_that_both_tables_have_run() -> None:
    held, broken = cell(HELD), cell(BROKEN)
    old = table(
        a={"new": Cell(), "same": held, "b1": held, "gone": Cell(), "b2": broken, "b3": held, "m": broken}
    )
    new = table(
        a={"new": held, "same": held, "b1": broken, "gone": Cell(), "b2": held, "b3": broken, "m": broken}
    )
    found = changes(old, new, "a")
    assert {key: [change.claim.id for change in each] for key, each in found.items()} == {
        (HELD, BROKEN): ["b1", "b3"],
        (BROKEN, HELD): ["b2"],
    }
    assert list(found) == [(HELD, BROKEN), (BROKEN, HELD)]
    assert found[HELD, BROKEN][0].words == "1/1 → 0/1: "
    assert [claim.id for claim in only_in(new, old, "a")] == ["new"]
    assert only_in(old, new, "a") == []
    assert has_worsened(old, new)
    assert has_worsened(new, old)
    assert not has_worsened(old, old)


def test_a_claim_that_holds_other_cases_has_changed() -> None:
    reason = Case("a=0", DEVIATION, "it rounds")
    old = table(a={"d": Cell((reason, Case("a=1", HELD))), "h": cell(HELD), "s": Cell((reason,))})
    new = table(a={"d": Cell((reason, Case("a=1", DEVIATION))), "h": cell(HELD, HELD), "s": Cell((reason,))})
    (found,) = changes(old, new, "a").values()
    assert [(change.claim.id, change.before, change.words) for change in found] == [
        ("d", DEVIATION, "1/2 → 0/2: it rounds")
    ]
    worse = table(a={"d": cell(BROKEN), "h": cell(BROKEN)})
    worse.cells["d"]["a"] = Cell((Case("", BROKEN, text="E  one"), Case("b", BROKEN, text="E  two")))
    (first,) = changes(old, worse, "a")[DEVIATION, BROKEN]
    assert first.words == "1/2 → 0/1: one"


# Causes


def broken(claim: str, *names: str) -> Cell:
    return Cell(tuple(Case(name, BROKEN, text="E   ValueError: 1\nmine.py:3: ValueError") for name in names))


def test_a_cause_has_its_cases_by_claim_and_a_line_that_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes_module, "suites_are_installed", lambda: False)
    found = table(
        mine={"suites/t.py::test_1": broken("1", "a", "b"), "suites/t.py::test_2": broken("2", "")},
        lockstep={"suites/t.py::test_1": broken("1", "a")},
    )
    first, second = causes(found)
    assert first.claims == {"suites/t.py::test_1": ["a", "b"], "suites/t.py::test_2": []}
    assert (first.engine, first.where, first.what) == ("mine", "mine.py:3", "ValueError: N")
    plugin = "-p lockstep.conformance.plugin"
    assert first.narrowed.startswith("pytest suites/t.py")
    assert first.narrowed.endswith(f" {plugin} --engine mine")
    assert first.rerun == f"pytest suites/t.py::test_1 {plugin} --engine mine"
    assert (second.narrowed, second.rerun) == ("", f"pytest suites/t.py::test_1 {plugin}")
    monkeypatch.setattr(causes_module, "suites_are_installed", lambda: True)
    assert first.rerun == "python -m lockstep conformance --engine mine suites/t.py::test_1"
    (own,) = causes(table(**{"mine 2.13": {"mine/suites.py::test_1": broken("1", "a")}}))
    assert own.rerun == f"pytest mine/suites.py::test_1 {plugin} --engine mine"


# Words of the page


def test_a_row_has_the_counts_of_its_cases_and_those_not_offered() -> None:
    offers = Case("x", Outcome.NOT_OFFERED, "hooks")
    found = table(
        a={
            "t1": cell(HELD, HELD),
            "t2": cell(HELD, BROKEN),
            "t3": Cell((offers, Case("y", Outcome.NOT_OFFERED, "groups"))),
            "t4": Cell((offers, Case("y", HELD), Case("z", Outcome.SKIPPED))),
        }
    )
    claims = [*found.claims.values(), Claim("t5")]
    assert [render._in_words(found, [claim], "a") for claim in claims] == [
        "✓ 2/2",
        "✗ broken 1/2",
        "- not offered: hooks; groups",
        "✓ 1/3 (1 not offered) (1 skipped)",
        "· not run",
    ]
    assert render._in_words(found, claims[:2], "a") == "✗ broken 3/4"
    assert render._share_of_offered(found, "a", claims[2:4]) == "50 % of the 2 it offers"
    assert render._share_of_offered(found, "a", claims[2:3]) == "offers none of it"
    assert render._count_outcomes(found, "a", claims) == [
        (HELD, 2),
        (BROKEN, 1),
        (Outcome.NOT_OFFERED, 1),
        (Outcome.NOT_RUN, 1),
    ]


def test_the_filter_finds_rows_by_outcome_and_where_engines_differ() -> None:
    found = table(a={"t1": cell(HELD), "t2": cell(HELD)}, b={"t1": cell(BROKEN), "t2": cell(HELD)})
    claims = list(found.claims.values())
    assert [render._states(found, given) for given in (claims, claims[1:], [])] == ["bhx", "h", "n"]


def test_a_cell_leads_to_its_cause_or_to_its_deviation() -> None:
    deviates = Cell((Case("x", DEVIATION, "it rounds"), Case("y", DEVIATION, "it waits")))
    found = table(
        a={"t1": broken("t1", ""), "t2": cell(HELD), "t3": deviates, "t4": Cell((Case("", DEVIATION),))},
        b={"t1": cell(HELD), "t3": Cell((Case("x", DEVIATION, "it rounds"),))},
    )
    one, two, three, four = found.claims.values()
    deviations = render._known_deviations(found)
    assert deviations == {
        ("a", "it rounds"): [three],
        ("a", "it waits"): [three],
        ("b", "it rounds"): [three],
    }
    first = SimpleNamespace(broken=[(one, [])], engine="a")
    later = SimpleNamespace(broken=[(two, []), (one, [])], engine="a")
    anchors_of_causes = render._anchors_of_causes([first, later])  # type: ignore[list-item]
    assert anchors_of_causes == {("t1", "a"): "c0", ("t2", "a"): "c1"}
    names = {pair: f"d{number}" for number, pair in enumerate(deviations)}
    anchors = render._Anchors({}, anchors_of_causes, names)
    leads = [render._link_of(found, anchors, [claim], "a") for claim in (one, two, three, four)]
    assert leads == ["c0", "", "d0", ""]
    assert render._link_of(found, anchors, [three], "b") == "d2"
    assert render._link_of(found, anchors, [four, one], "a") == "c0"


def test_a_run_is_described_with_what_it_left_out() -> None:
    versions = {"torch": "2.13.0", "pytest": "9.0"}
    run = SuiteRun("2026-01-01", 1.50, ("-x", "s"), versions, "complete", ("t2", "t1", "t2"))
    words = "2026-01-01, 1.5 s, torch 2.13.0, pytest 9.0: pytest -x s"
    assert render._described(run) == f"{words}: ran to its end."
    ended = SuiteRun("2026-01-01", 1.50, ("-x", "s"), versions, "interrupted", ("t3", "t2"))
    assert render._described(ended) == f"{words}: did not run to its end (interrupted)."
    found = table(a={"t1": cell(HELD)})
    found.runs = [run, ended]
    assert render._left_out(found) == ["t2", "t3"]


def test_reasons_are_escaped_and_have_links_to_issues() -> None:
    text = "a_b <c> pytorch#12, see https://x.org/y_z"
    issue = "https://github.com/pytorch/pytorch/issues/12"
    assert render._linked_markdown(text) == (
        f"a\\_b \\<c\\> [pytorch\\#12]({issue}), see [https://x.org/y\\_z](https://x.org/y_z)"
    )
    assert render._linked_html(text) == (
        f'a_b &lt;c&gt; <a href="{issue}">pytorch#12</a>, '
        'see <a href="https://x.org/y_z">https://x.org/y_z</a>'
    )
    assert [render._counted([0] * number) for number in range(3)] == ["0 claims", "1 claim", "2 claims"]
