"""The status line of a test that runs long, in a terminal, and the plain lines of a log."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.progress import controller, display
from lockstep.features.progress.display import ProgressDisplay, StatusLine, fit, way_of, width
from lockstep.features.progress.glance import Glance
from lockstep.protocol import Progress
from suites.selftest.progress.screen import Screen, run_in_terminal
from suites.selftest.project import Project


@pytest.fixture(scope="module")
def looks(shared_project: Project) -> list[list[str]]:
    """The screens of a session in a terminal of 120 columns, the last one after its end."""
    seen: list[list[str]] = []

    def look(screen: Screen) -> None:
        seen.append([*screen.rows])
        if "all_reduce #1, rank 1 in save() at" in screen.rows[-1]:
            (shared_project.path / "seen-waits").touch()
        if "subtest 3 of 4" in screen.rows[-1]:
            (shared_project.path / "seen-cases").touch()

    shared_project.copy("progress")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "lockstep.plugin", "--tb=no"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TERM": "xterm"}
    environ.pop("COLUMNS", None)  # a worker of xdist has it
    screen = run_in_terminal(command, shared_project.path, environ, 120, look)
    return [*seen, screen.rows]


def test_a_long_test_has_a_line_below_that_of_pytest(looks: list[list[str]]) -> None:
    (row, line) = next(rows for rows in looks if "rank 1 in save() at" in rows[-1])[-2:]
    assert row == "test_progress.py F"
    name, _, words = line.partition("  ")
    assert name == "test_progress.py::test_waits"
    elapsed, _, rest = words.partition(" s of 60 s, ")
    assert 2 <= int(elapsed) < 60
    assert rest.startswith("1 failed: rank 0 in all_reduce #1, rank 1 in save() at test_progress.py:")


def test_it_says_which_subtest_of_how_many(looks: list[list[str]]) -> None:
    line = next(rows[-1] for rows in looks if "subtest 3 of 4" in rows[-1])
    assert line.startswith("test_progress.py::test_cases  ")


def test_it_is_gone_when_the_test_ends(looks: list[list[str]]) -> None:
    row, failed = (row for row in looks[-1] if "test_progress.py" in row)
    assert row == "test_progress.py F...".ljust(113) + "[100%]"
    assert failed.startswith("FAILED test_progress.py::test_fails - ")
    assert not any("test_is_short" in row for rows in looks for row in rows)


NAME = "tests/test_train.py::test_resume[2-ranks]"
WORDS = "12 s of 60 s, subtest 17 of 144, 3 failed: rank 0 in all_gather #7"


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_line_fits_the_terminal(columns: int) -> None:
    assert width(fit(NAME, WORDS, columns)) <= columns


def test_the_name_loses_its_beginning_and_the_words_their_end() -> None:
    assert fit("tests/test_a.py::test_b", "12 s of 60 s", 30) == "..t_a.py::test_b  12 s of 60 s"
    assert fit("tests/test_a.py::test_b", "12 s of 60 s, 3 failed", 30) == "..py::test_b  12 s of 60 s, .."
    assert width("日本") == 4
    assert width("e\N{COMBINING ACUTE ACCENT}") == 1
    assert fit("日本日本日本日本日本", "12 s", 18) == "..本日本日本  12 s"


class Stream:
    encoding = "ascii"

    def __init__(self, is_terminal: bool) -> None:
        self.isatty = lambda: is_terminal


def config(monkeypatch: pytest.MonkeyPatch, reporter: object, *, terminal: bool, **options: Any) -> Any:
    usual = {
        "ranks_no_progress": False,
        "verbose": 0,
        "capture": "fd",
        "rank_pdb": None,
        "rank_debugpy": None,
    }
    monkeypatch.setattr(display, "terminal_stream", lambda _: Stream(terminal))
    monkeypatch.setattr(display, "shows_live", lambda _: options.get("live", False))
    found = SimpleNamespace(**{**usual, **options})
    manager = SimpleNamespace(get_plugin=lambda _: reporter)
    return SimpleNamespace(option=found, pluginmanager=manager, getoption=lambda name: getattr(found, name))


@pytest.mark.parametrize(
    ("options", "environ", "ways"),
    [
        ({}, {}, ("line", "plain")),
        ({"ranks_no_progress": True}, {}, ("off", "off")),
        ({"verbose": -1}, {}, ("off", "off")),
        ({"verbose": 2}, {}, ("line", "plain")),
        ({"rank_pdb": 1}, {}, ("off", "off")),
        ({"capture": "no"}, {}, ("plain", "plain")),
        ({"live": True}, {}, ("plain", "plain")),
        ({}, {"TERM": "dumb"}, ("plain", "plain")),
        ({}, {"CI": "true"}, ("plain", "plain")),
        ({}, {"NO_COLOR": "1"}, ("line", "plain")),
    ],
)
def test_options_and_the_environment_decide_how(
    monkeypatch: pytest.MonkeyPatch, options: Any, environ: dict[str, str], ways: tuple[str, str]
) -> None:
    reporter = object.__new__(pytest.TerminalReporter)
    found = [
        way_of(config(monkeypatch, reporter, terminal=terminal, **options), {"TERM": "xterm"} | environ)
        for terminal in (True, False)
    ]
    assert tuple(found) == ways


def test_a_report_of_another_class_has_replaced_that_of_pytest() -> None:
    class Own(pytest.TerminalReporter):
        pass

    reporters = [object.__new__(each) for each in (pytest.TerminalReporter, Own)]
    assert [display.is_replaced(each) for each in reporters] == [False, True]


@pytest.mark.parametrize(("terminal", "way"), [(True, "off"), (False, "plain")])
def test_a_plugins_own_report_keeps_the_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, way: str
) -> None:
    monkeypatch.setattr(display, "is_replaced", lambda _: True)
    reporter = object.__new__(pytest.TerminalReporter)
    assert way_of(config(monkeypatch, reporter, terminal=terminal), {"TERM": "xterm"}) == way
    assert way_of(config(monkeypatch, None, terminal=terminal), {"TERM": "xterm"}) == "off"


def test_nothing_is_shown_without_a_report_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    without = config(monkeypatch, None, terminal=True)
    del without.option.verbose  # as under `-p no:terminal`, where pytest cannot name the stream either
    monkeypatch.setattr(display, "terminal_stream", lambda _: pytest.fail("there is no terminal writer"))
    assert way_of(without, {"TERM": "xterm"}) == "off"


def test_a_log_gets_a_line_after_half_a_minute_and_each_minute_after(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere: Any = SimpleNamespace(stats={}, write_line=lambda _: pytest.fail("it writes to nowhere there"))
    of_worker = config(monkeypatch, nowhere, terminal=False)
    of_worker.workerinput = {"workerid": "gw3"}
    shown = ProgressDisplay(of_worker, {})
    glances = {now: Glance("test_a.py::test_b", now, 300.0, "subtest 17 of 144", 2, "") for now in range(160)}
    asks = [now for now, glance in glances.items() if shown.look(glance)]
    assert capsys.readouterr().err.splitlines() == [
        f"[gw3] still running: test_a.py::test_b, {now} s of 300 s, subtest 17 of 144, 2 failed"
        for now in (30, 90, 150)
    ]
    assert asks == [*range(26, 30), *range(86, 90), *range(146, 150)]
    shown.end()
    shown.look(glances[30])
    assert "30 s of 300 s" in capsys.readouterr().err


class Terminal(Stream):
    """A terminal of 40 columns, without a size that the system knows, and pytest's writer to it."""

    def __init__(self, column: int = 0) -> None:
        super().__init__(is_terminal=True)
        self.width_of_current_line = column
        self.texts: list[str] = []
        self.num_flushed = 0

    def fileno(self) -> int:
        raise OSError

    def write(self, text: str) -> None:
        self.texts.append(text)

    def flush(self) -> None:
        self.num_flushed += 1

    def markup(self, text: str, light: bool) -> str:
        assert light
        return f"<{text}>"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(display.shutil, "get_terminal_size", lambda: os.terminal_size((40, 24)))
    monkeypatch.setattr(display, "terminal_stream", lambda _: found)
    return found


def line_of(terminal: Terminal) -> StatusLine:
    owner: Any = SimpleNamespace(get_terminal_writer=lambda: terminal)
    return StatusLine(owner)


def test_the_status_line_is_below_the_cursor_which_comes_back(terminal: Terminal) -> None:
    line = line_of(terminal)
    line.erase()
    assert terminal.texts == []
    terminal.width_of_current_line = 47
    for _ in range(2):
        line.draw("test_a.py::t\u00e9st", "3 s\n")
        assert terminal.texts == ["\n\x1b[J<test_a.py::t\\xe9st  3 s?>\x1b[A\r\x1b[7C"]
    terminal.width_of_current_line = 0
    line.draw("test_a.py::test_b", "4 s")
    assert terminal.texts[1:] == ["\n\x1b[J<test_a.py::test_b  4 s>\x1b[A\r"]
    for _ in range(2):
        line.erase()
        assert terminal.texts[2:] == ["\n\x1b[J\x1b[A\r"]
    assert terminal.num_flushed == 3
    line.draw("test_a.py::test_b", "4 s")
    assert len(terminal.texts) == 4
    terminal.width_of_current_line = 80
    line.draw("test_a.py::test_b", "5 s")
    assert len(terminal.texts) == 4


def test_the_status_line_keeps_the_last_column_free(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(terminal)
    line.draw("n" * 50, "3 s")
    assert terminal.texts[-1] == f"\n\x1b[J<..{'n' * 32}  3 s>\x1b[A\r"
    monkeypatch.setattr(Terminal, "fileno", lambda self: 7)
    monkeypatch.setattr(display.os, "get_terminal_size", {7: os.terminal_size((20, 24))}.get)
    line.draw("n" * 50, "3 s")
    assert terminal.texts[-1] == f"\n\x1b[J<..{'n' * 12}  3 s>\x1b[A\r"


def test_a_name_that_fits_is_whole_and_a_narrow_terminal_keeps_some_of_it() -> None:
    assert fit("n" * 12, "3 s", 17) == f"{'n' * 12}  3 s"
    assert fit("n" * 14, "3 s of 60 s", 20) == f"..{'n' * 10}  3 s .."
    assert fit("n" * 13, "3 s", 17) == f"..{'n' * 10}  3 s"
    assert [width(each) for each in ("\uff21", "a", "\u0301")] == [2, 1, 0]


def test_a_terminal_has_the_line_from_the_first_second_on(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = object.__new__(pytest.TerminalReporter)
    reporter.stats = {"failed": [1], "error": [2, 3], "passed": [4]}
    of_run = config(monkeypatch, reporter, terminal=True)
    of_run.get_terminal_writer = lambda: terminal
    monkeypatch.setattr(display, "terminal_stream", lambda _: terminal)
    shown = ProgressDisplay(of_run, {"TERM": "xterm"})
    limit = float("inf")
    asks = [shown.look(Glance("a.py::b", now, limit, "", 1, "rank 0 in f")) for now in (0.9, 1.0, 2.0)]
    assert asks == [False, True, True]
    assert [text[4:].partition(">")[0] for text in terminal.texts] == [
        f"<a.py::b  {now} s, 4 failed: rank 0 in f" for now in (1, 2)
    ]
    shown.end()
    assert terminal.texts[2:] == ["\n\x1b[J\x1b[A\r"]


def test_a_log_of_the_main_process_is_pytests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    reporter = object.__new__(pytest.TerminalReporter)
    reporter.stats = {}
    monkeypatch.setattr(pytest.TerminalReporter, "write_line", lambda _, line: written.append(line))
    monkeypatch.setattr(pytest.TerminalReporter, "flush", lambda _: written.append("flushed"))
    shown = ProgressDisplay(config(monkeypatch, reporter, terminal=False), {})
    shown.look(Glance("a.py::b", 30.4, 60.4, "", 0, ""))
    assert written == ["still running: a.py::b, 30 s of 60 s", "flushed"]
    off = ProgressDisplay(config(monkeypatch, reporter, terminal=False, ranks_no_progress=True), {})
    assert not off.look(Glance("a.py::b", 90.0, 100.0, "", 0, ""))
    off.end()
    assert len(written) == 2


def test_a_line_beside_a_terminal_begins_below_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    stream = SimpleNamespace(
        isatty=lambda: True, encoding="ascii", write=written.append, flush=lambda: written.append("flushed")
    )
    of_worker = config(monkeypatch, None, terminal=False)
    of_worker.workerinput = {"workerid": "gw3"}
    monkeypatch.setattr(display.sys, "stderr", stream)
    ProgressDisplay(of_worker, {}).look(Glance("a.py::\u00e9", 30.0, 60.0, "", 0, ""))
    assert written == ["\n[gw3] still running: a.py::\\xe9, 30 s of 60 s\n", "flushed"]


def test_a_test_is_followed_by_the_answers_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Shown:
        def __init__(self, config: object, environ: object) -> None:
            said.append(config)

        def look(self, glance: object) -> bool:
            said.append(glance)
            return True

        def end(self) -> None:
            said.append("end")

    class Noted:
        def note(self, rank: int, answer: object, now: float) -> None:
            said.append((rank, answer, now))

        def note_silent(self, silent: set[int], now: float) -> None:
            said.append((silent, now))

        def glance(self, run: object, now: float) -> object:
            return self, run, now

    monkeypatch.setattr(controller, "ProgressDisplay", Shown)
    monkeypatch.setattr(controller, "Places", Noted)
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: 7.0))
    config, answer, run = object(), Progress(), object()
    followed = controller.FollowedRuns(config)  # type: ignore[arg-type]
    followed.pytest_ranks_run_ended()
    assert said == []
    for _ in range(2):
        followed.pytest_ranks_answer(1, answer)
    assert followed.pytest_ranks_probe(run, {3})  # type: ignore[arg-type]
    *before, silent, shown_of, (places, *glance) = said
    assert before == [(1, answer, 7.0)] * 2
    assert (silent, shown_of, glance) == (({3}, 7.0), config, [run, 7.0])
    said.clear()
    assert followed.pytest_ranks_probe(run, set())  # type: ignore[arg-type]
    assert [said[0], said[1][0] is places] == [(set(), 7.0), True]
    followed.pytest_ranks_run_ended()
    followed.pytest_ranks_run_begins()
    assert followed.pytest_ranks_probe(run, set())  # type: ignore[arg-type]
    assert said[2] == "end"
    assert said[4][0] is not places
