"""Unit tests of tables: names of claims, counts, changes, causes, and what a run records."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.conformance import causes as causes_module
from lockstep.conformance import registry, render
from lockstep.conformance.causes import causes
from lockstep.conformance.changes import changes, has_worsened, only_in
from lockstep.conformance.collecting import (
    _ATTRIBUTE,
    ItemRecorder,
    ReportRecorder,
    _title,
    _without_the_frame,
    read_case,
    register,
    summary,
)
from lockstep.conformance.command import _items
from lockstep.conformance.deviations import Deviation
from lockstep.conformance.registry import built_in_modules, claim_of, engine_of, engines_of
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


# Recording


class Item:
    """An item of an engine, as far as recorders ask."""

    path = "/away/test_x.py"
    fixturenames = ("engine_name",)

    def __init__(self, nodeid: str, engines: list[str] | None = None, engine: str | None = None) -> None:
        self.nodeid = nodeid
        self.config = SimpleNamespace(getoption=lambda name: engines)
        if engine is not None:
            self.callspec = SimpleNamespace(params={"engine_name": engine})

    def obj(self) -> None:
        """Hold the claim. And more."""


def test_the_engine_is_the_last_part_of_an_id_where_there_are_several() -> None:
    several = ["a", "b", "a"]
    names = ["t::x[2-ranks-b]", "t::x[b]", "t::x[a-b]"]
    items: list[Any] = [Item(name, several, "b") for name in names]
    assert [(claim_of(item), engine_of(item)) for item in items] == [
        ("t::x[2-ranks]", "b"),
        ("t::x", "b"),
        ("t::x[a]", "b"),
    ]
    assert engines_of(items[0].config) == ("a", "b")
    alone: Any = Item("t::x[b]", ["b"])
    assert (claim_of(alone), engine_of(alone), engines_of(Item("").config)) == ("t::x[b]", "b", ("lockstep",))  # type: ignore[arg-type]
    unknown: Any = Item("t::x[c]", several, "c")
    assert (engine_of(unknown), claim_of(unknown)) == (None, "t::x[c]")
    alone.fixturenames = ()
    assert engine_of(alone) is None
    assert engine_of(Item("t::x", several)) == "a"  # type: ignore[arg-type]


def test_an_item_of_installed_suites_has_the_id_of_a_checkout() -> None:
    item: Any = Item("../site-packages/suites/core/test_x.py::test_1[2]")
    item.path = registry.INSTALLED_SUITES / "core" / "test_x.py"
    assert claim_of(item) == "suites/core/test_x.py::test_1[2]"
    assert built_in_modules(["torch-ddp", "mine:Engine"]) == ["lockstep.conformance.adapters.torch_ddp"]


def test_a_worker_sends_with_its_first_report_what_it_collected() -> None:
    recorder = ItemRecorder(SimpleNamespace(workerinput={}))  # type: ignore[arg-type]
    items: Any = [Item("t::x"), Item("t::y")]
    recorder.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]
    gone: Any = [Item("t::z"), Item("t::z")]
    recorder.pytest_deselected(gone)
    recorder.pytest_deselected([Item("t::z"), Item("t::v")])  # type: ignore[list-item]
    first, second = SimpleNamespace(), SimpleNamespace()
    recorder.pytest_runtest_logreport(first)  # type: ignore[arg-type]
    recorder.pytest_runtest_logreport(second)  # type: ignore[arg-type]
    about = ["lockstep", "Hold the claim."]
    sent = {"t::x": ["t::x", *about], "t::y": ["t::y", *about]}
    assert first.lockstep_collected["items"] == sent
    assert set(first.lockstep_collected["deselected"]) == {"t::z", "t::v"}
    assert vars(second) == {}
    main = ItemRecorder(SimpleNamespace())  # type: ignore[arg-type]
    main.pytest_runtest_logreport(second)  # type: ignore[arg-type]
    assert vars(second) == {}
    with pytest.raises(pytest.UsageError, match=r"^--conformance: two tests have the id t::x: name a folder"):
        recorder.pytest_collection_finish(SimpleNamespace(items=items))  # type: ignore[arg-type]


def test_the_title_of_a_claim_is_the_first_sentence_of_its_docstring() -> None:
    def titled(text: str | None) -> str:
        def test() -> None: ...

        test.__doc__ = text
        return _title(SimpleNamespace(obj=test))  # type: ignore[arg-type]

    texts = ["One\n    two. Three.", "Is it? Yes.", "No end\n\n    but a paragraph", "v1.5 holds. More", None]
    assert [titled(text) for text in texts] == ["One two.", "Is it?", "No end", "v1.5 holds.", ""]
    assert _title(SimpleNamespace()) == ""  # type: ignore[arg-type]


def test_the_pass_of_a_test_with_subtests_is_no_case() -> None:
    passed, failed, case = Case("", HELD), Case("", BROKEN), Case("a", HELD)
    given = [passed], [case, passed], [case, failed], [passed, failed], [passed, passed], []
    assert [_without_the_frame([*each]) for each in given] == [
        (passed,),
        (case,),
        (case, failed),
        (failed,),
        (passed,),
        (),
    ]


class Run:
    """A recorder of reports of two items, and the table it makes."""

    def __init__(self, tmp_path: Any) -> None:
        invocation = SimpleNamespace(args=["-x", "s"])
        config: Any = SimpleNamespace(getoption=lambda name: ["a"], invocation_params=invocation)
        items = {"t::x": ("t::x", "a", "title"), "t::y": ("t::y", "a", "")}
        collected: Any = SimpleNamespace(items=items, deselected=["t::z", "t::y"])
        self.recorder = ReportRecorder(config, tmp_path, collected)

    def report(self, nodeid: str, when: str = "call", seconds: float = 0.25, outcome: Any = "passed") -> None:
        longrepr = "E  why" if outcome == "failed" else None
        report = pytest.TestReport(nodeid, ("t", 0, "t"), {}, outcome, longrepr, when, duration=seconds)  # type: ignore[arg-type]
        self.recorder.pytest_runtest_logreport(report)

    def end(self, status: int = 0, **session: Any) -> Table:
        given = {"shouldfail": False, "shouldstop": False, **session}
        self.recorder.pytest_sessionfinish(SimpleNamespace(**given), status)  # type: ignore[arg-type]
        assert self.recorder._table is not None
        return self.recorder._table


def test_a_run_records_seconds_cases_and_what_was_left_out(tmp_path: Any) -> None:
    run = Run(tmp_path)
    for nodeid in ("t::x", "t::y"):
        for when in ("setup", "call", "teardown"):
            run.report(nodeid, when)
    found = run.end()
    assert found.cells["t::x"]["a"] == Cell((Case("", HELD),), 0.75)
    assert found.claims["t::x"] == Claim("t::x", "title")
    (about,) = found.runs
    assert (about.arguments, about.ended, about.deselected) == (("-x", "s"), "complete", ("t::z",))
    assert list(about.versions) == ["torch", "lockstep-harness", "pytest"]
    assert (tmp_path / "conformance.json").exists()


def test_a_run_that_ended_early_says_why(tmp_path: Any) -> None:
    run = Run(tmp_path)
    run.report("t::x", "setup")
    run.report("t::y", "call", outcome="failed")
    found = run.end()
    assert list(found.cells) == ["t::y"]
    assert found.runs[0].ended == "interrupted"
    assert Run(tmp_path).end(pytest.ExitCode.INTERNAL_ERROR).runs[0].ended == "internal error"
    assert Run(tmp_path).end(shouldfail="stopping").runs[0].ended == "stopping"
    assert Run(tmp_path).end(shouldstop="halting").runs[0].ended == "halting"
    stopped = Run(tmp_path)
    excinfo = SimpleNamespace(value=KeyboardInterrupt(), typename="KeyboardInterrupt")
    stopped.recorder.pytest_keyboard_interrupt(excinfo)  # type: ignore[arg-type]
    assert stopped.end(shouldfail="x").runs[0].ended == "interrupted: KeyboardInterrupt"


def test_what_workers_send_is_part_of_the_run(tmp_path: Any) -> None:
    run = Run(tmp_path)
    report: Any = SimpleNamespace(nodeid="t::w", when="teardown", skipped=False, failed=False, duration=1.0)
    about = {"items": {"t::w": ["t::w", "a", "of a worker"]}, "deselected": ["t::z", "t::q", "t::w"]}
    setattr(report, _ATTRIBUTE, about)
    run.recorder.pytest_runtest_logreport(report)
    found = run.end()
    assert found.claims["t::w"] == Claim("t::w", "of a worker")
    assert found.cells == {"t::w": {"a": Cell((), 1.0)}}
    assert found.runs[0].deselected == ("t::z", "t::q")
    assert 0 <= found.runs[0].seconds < 100


def test_warnings_are_counted_by_the_tests_that_gave_them(tmp_path: Any) -> None:
    run = Run(tmp_path)
    given = ("t::x", "one\nmore"), ("t::x", "one"), ("t::y", " one"), ("t::y", "two"), ("other", "one")
    for nodeid, text in given:
        warning: Any = SimpleNamespace(message=UserWarning(text), category=UserWarning)
        run.recorder.pytest_warning_recorded(warning, nodeid)
    assert run.end().warnings == {"a": {"UserWarning: one": 2, "UserWarning: two": 1}}


def test_the_end_of_a_run_says_where_its_table_is(tmp_path: Any) -> None:
    def said(run: Run) -> list[str]:
        lines: list[str] = []
        terminal: Any = SimpleNamespace(section=lines.append, line=lines.append)
        run.recorder.pytest_terminal_summary(terminal)
        return lines

    run = Run(tmp_path)
    assert said(run) == []
    run.end()
    summed_up = ["conformance", "a  0 of 2 (0 %) cases held, 0 of 2 (0 %) claims, 2 not run"]
    assert said(run) == [*summed_up, f"written to {tmp_path}/conformance.html"]
    (tmp_path / "file").touch()
    other = Run(tmp_path / "file" / "below")
    session: Any = SimpleNamespace(shouldfail=False, shouldstop=False, exitstatus=0)
    other.recorder.pytest_sessionfinish(session, 0)
    assert session.exitstatus == pytest.ExitCode.INTERNAL_ERROR
    assert said(other) == [*summed_up, f"no file is written: {tmp_path}/file/below: Not a directory"]


def test_a_run_that_lists_tests_alone_writes_no_table(tmp_path: Any) -> None:
    def registered(given: str = "out/of", **fields: Any) -> list[str]:
        names: list[str] = []
        manager = SimpleNamespace(register=lambda plugin, name: names.append(name))
        config: Any = SimpleNamespace(
            option=SimpleNamespace(collectonly=fields.pop("collectonly", False)),
            pluginmanager=manager,
            invocation_params=SimpleNamespace(dir=tmp_path),
            getoption=lambda name: given,
            **fields,
        )
        register(config)
        return names

    assert registered(collectonly=True) == []
    assert registered(workerinput={}) == ["harness-conformance-items"]
    assert [*tmp_path.iterdir()] == []
    assert registered() == ["harness-conformance-items", "harness-conformance-reports"]
    assert (tmp_path / "out" / "of").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(pytest.UsageError, match=r"^--conformance .*/file: File exists$"):
        registered("file")


def test_a_report_is_a_case_with_the_name_of_its_subtest() -> None:
    def case(
        outcome: Any = "passed", text: Any = None, when: Any = "call", context: Any = None, **fields: Any
    ) -> Case | None:
        report = pytest.TestReport("t", ("t", 0, "t"), {}, outcome, text, when, **fields)
        if context is not None:
            report.context = context  # type: ignore[attr-defined]
        return read_case(report)

    def subtest(msg: str | None = None, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(msg=msg, kwargs=kwargs)

    assert case() == Case("", HELD)
    assert case(when="setup") is None
    named = [subtest("x"), subtest("x", a=1, b=2), subtest(a=1), subtest()]
    cases = [case(context=each) for each in named]
    assert [each and each.name for each in cases] == ["x", "x a=1, b=2", "a=1", "a subtest"]
    assert case("failed", "E  no", "setup") == Case("", BROKEN, text="in setup\nE  no")
    assert case("failed", "[gw1] linux -- Python 3.12 /x\nE  no") == Case("", BROKEN, text="E  no")
    sums = "contains 2 failed subtests"
    assert case("failed", sums) is None
    assert case("failed", sums, context=subtest("x")) == Case("x", BROKEN, text=sums)
    assert case("failed", "[XPASS(strict)] it rounds") == Case("", Outcome.MENDED, "it rounds")
    deviates = case("skipped", wasxfail="reason: [NOTRUN] it hangs")
    assert deviates == Case("", DEVIATION, "not tried: it hangs")
    assert case("passed", wasxfail="it rounds") == Case("", HELD)


# Command and deviations


def test_a_claim_with_parameters_is_an_item_of_each_engine() -> None:
    assert _items("t.py::x[2]", ["a", "b"]) == ["t.py::x[2-a]", "t.py::x[2-b]"]
    assert [_items(word, ["a", "b"]) for word in ("t.py::x", "-k[2]", "t.py")] == [
        ["t.py::x"],
        ["-k[2]"],
        ["t.py"],
    ]
    assert _items("t.py::x[2]", ["a"]) == ["t.py::x[2]"]


def test_a_deviation_is_about_cases_by_patterns() -> None:
    some = Deviation(("t",), "why", ("a=*, b=1", "c"))
    cases = ["a=2, b=1", "c", "a=2, b=12", "cc", "xa=2, b=1"]
    assert [some.is_about_case(case) for case in cases] == [True, True, False, False, False]
    assert not Deviation(("t",), "why").is_about_case("c")
