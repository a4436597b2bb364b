"""Recording of claims in a run, and the items of a command."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.conformance import registry
from lockstep.conformance.collecting import (
    _ATTRIBUTE,
    ItemRecorder,
    ReportRecorder,
    _title,
    _without_the_frame,
    read_case,
    register,
)
from lockstep.conformance.command import _items
from lockstep.conformance.deviations import Deviation
from lockstep.conformance.registry import built_in_modules, claim_of, engine_of, engines_of
from lockstep.conformance.table import Case, Cell, Claim, Outcome, Table

HELD, BROKEN, DEVIATION = Outcome.HELD, Outcome.BROKEN, Outcome.DEVIATION


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
