"""Timelines of a training with planted faults: the text of the report, and the files of `--timeline`."""

from __future__ import annotations

import importlib.util
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lockstep.features.timeline import files
from lockstep.features.timeline.timeline import Bar, Lane, Span, Timeline
from lockstep.features.timeline.trace import can_write_trace
from suites.selftest.browser import Browser
from suites.selftest.project import Project, line_of


@dataclass(frozen=True)
class Drawn:
    """A session with `--timeline`."""

    path: Path
    output: str

    def text(self, test: str) -> list[str]:
        """Return the lines of a test's timeline in its report."""
        report = re.split(rf"_+ {re.escape(test)} _+\n", self.output)[1]
        section = re.split(r"-+ timeline: [^\n]*\n", report)[1]
        return re.split(r"\n-{5,}", section)[0].splitlines()

    def folder(self, test: str, file: str = "test_training.py") -> Path:
        return self.path / "out" / file / test

    def page(self, test: str, file: str = "test_training.py") -> Path:
        return self.folder(test, file) / "timeline.html"

    def calls(self, test: str) -> list[tuple[str, str, str]]:
        """Return operation, phase and innermost line of each call of rank 0, off a page."""
        page = (self.folder(test, "test_backends.py") / "timeline.html").read_text()
        rows = [re.split("<td[^>]*>", row) for row in re.findall(r"<tr id=.*?</tr>", page)]
        return [
            (row[2].partition(" ")[0], row[7], row[8].removesuffix("</tr>").partition("<br>")[0])
            for row in rows
            if row[1] == "0"
        ]

    def place(self, code: str) -> str:
        return f"engine.py:{line_of(code, self.path / 'engine.py')}"


@pytest.fixture(scope="module")
def drawn(shared_project: Project) -> Drawn:
    shared_project.copy("timeline")
    return Drawn(shared_project.path, shared_project.run("--timeline=out"))


def test_a_wrong_wait_is_named_by_file_and_line(drawn: Drawn) -> None:
    first, second, *_ = drawn.text("test_fault[waits_for_all]")
    assert "all_gather #8 (A) ███████ waits" in first
    assert first.endswith(f"gather() at {drawn.place('dist.all_gather(parts')}")
    assert "─ never came ─" in second
    assert "barrier #1 ███████ waits" in second
    assert second.endswith(f"step() at {drawn.place('dist.barrier()')}")


def test_a_wrong_order_of_two_groups_shows_both_lines(drawn: Drawn) -> None:
    first, second, *notes = drawn.text("test_fault[other_order]")
    assert first.endswith(f"clip() at {drawn.place('dist.all_reduce(norm, group=self.shard_group)')}")
    assert second.endswith(f"average_of_all() at {drawn.place('dist.all_reduce(loss')}")
    assert first.count("never came") == second.count("never came") == 1
    assert [note[:14] for note in notes] == ["A: ranks 0, 1 ", "D: ranks 0, 1 "]


def test_a_rank_waits_in_the_first_of_several_in_flight(drawn: Drawn) -> None:
    line = line_of("first = dist.all_reduce", drawn.path / "test_waits.py")
    first, second = drawn.text("test_several_in_flight")
    assert first.endswith(f"test_several_in_flight() at test_waits.py:{line}")
    assert second.count("never came") == 2


def test_a_group_of_an_earlier_world_waits_for_its_own_ranks(drawn: Drawn) -> None:
    first, _, third, note = drawn.text("test_two_groups_of_one_name")
    assert "failed" not in first
    assert third.count("never came") == 1
    assert note.startswith("A: ranks 0, 1 ")


def test_a_death_in_backward_is_placed_between_two_collectives(drawn: Drawn) -> None:
    first, second, *_ = drawn.text("test_fault[dies_in_backward]")
    assert "all_reduce #5 (A) ███████ failed" in first
    assert "all_reduce #4 (A) ░░" in second
    before = "return engine.average_over_replicas(engine.own_rows(engine.sum_over_shards(grad)))"
    lines = f"sum_over_shards() at {drawn.place('dist.all_reduce(grad, group=self.shard_group)')}, from "
    place = f"in backward: {lines}reduce() at {drawn.place(before)}"
    assert second.endswith(f"✗ died: SIGKILL, between all_reduce #4 and all_reduce #5, {place}")


def test_a_crash_is_placed_at_its_line(drawn: Drawn) -> None:
    second = drawn.text("test_fault[crashes_in_backward]")[1]
    assert second.endswith(f"✗ died: SIGABRT, {drawn.place('os.abort()')} in reduce")


def test_a_timeline_has_at_most_twelve_lines(drawn: Drawn) -> None:
    for fault in ("waits_for_all", "other_order", "dies_in_backward", "other_dtype"):
        assert 2 <= len(drawn.text(f"test_fault[{fault}]")) <= 12


def test_an_ordinary_failure_has_a_page_and_no_timeline_in_its_text(drawn: Drawn) -> None:
    report = drawn.output.split("_ test_exception _")[1].split("\n____")[0]
    assert "timeline: the last" not in report
    assert str(drawn.folder("test_exception") / "timeline.html") in report


class PageReader(HTMLParser):
    """Collects elements of a page, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.bars: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found["id"]} if "id" in found else set()
        self.bars += [found["href"]] if "data-key" in found and tag == "a" else []
        self.loads += [found[name] for name in ("src",) if name in found]


def test_a_healthy_test_has_a_page_that_loads_nothing(drawn: Drawn) -> None:
    page = PageReader((drawn.folder("test_healthy[4-ranks]") / "timeline.html").read_text())
    # Of 4 ranks: 6 gathers, 3 times 2 reductions in backward, of the norm, and of the loss.
    assert len(page.bars) == 4 * (6 + 6 + 2)
    assert {bar.removeprefix("#") for bar in page.bars} <= page.ids
    assert page.loads == []


def test_only_the_rank_at_fault_is_red(drawn: Drawn) -> None:
    page = (drawn.folder("test_fault[dies_in_backward]") / "timeline.html").read_text()
    assert re.findall(r'<span class="blamed"[^>]*><b>rank (\d)', page) == ["1"]
    # Rank 0 waits for it without end.
    assert len(re.findall(r'class="bar all_reduce failed turn"', page)) == 1
    assert '<p class="sentence">rank 1 of 2 died: SIGKILL</p>' in page


def test_only_calls_of_the_case_that_failed_have_failed(drawn: Drawn) -> None:
    page = drawn.page("test_the_first_case_differs", "test_waits.py").read_text()
    assert re.findall(r'class="bar (\w+) failed', page) == ["all_reduce", "barrier"]
    assert len(re.findall(r'class="bar all_reduce over', page)) == 2 * 2 * 5


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_call_has_its_phase_and_line(drawn: Drawn, backend: str) -> None:
    calls = drawn.calls(f"test_phases[{backend}]")
    assert [(op, phase) for op, phase, _ in calls] == [
        ("all_gather", "fixture"),
        ("all_reduce", "forward"),
        ("all_reduce", ""),
        ("broadcast", "backward"),
        ("barrier", "optimizer"),
    ]
    file = drawn.path / "test_backends.py"
    functions = {"started": "dist.all_gather", "in_backward": "dist.broadcast", "step": "dist.barrier"}
    places = {name: f"{name}() at test_backends.py:{line_of(code, file)}" for name, code in functions.items()}
    assert [line for *_, line in calls if line.partition("()")[0] in places] == list(places.values())


def test_a_failure_in_a_fake_world_says_why_it_has_no_timeline(drawn: Drawn) -> None:
    report = re.split(r"_+ test_fake\S* _+\n", drawn.output)[1]
    assert "none: a fake world keeps no record of what its ranks call" in report


# In a browser

FOCUSED = "document.activeElement.querySelector('title').textContent"
"""Description of the bar that has the focus."""


def test_tab_leads_to_the_fault_and_arrows_along_its_lane(drawn: Drawn, browser: Browser) -> None:
    browser.open(drawn.page("test_fault[other_order]"))
    met = []
    for key in ("Tab", "ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
        assert browser.run("details.textContent") == browser.run(FOCUSED)
        met.append(browser.run(FOCUSED).partition(" of ")[0])
    names = ["all_reduce #7", "all_reduce #3", "all_reduce #6", "all_reduce #3", "all_reduce #7"]
    assert met == [f"rank 0: {name}" for name in [*names, "all_reduce #7"]]  # the last one of its lane


def test_arrows_lead_to_the_same_collective_of_other_ranks(drawn: Drawn, browser: Browser) -> None:
    browser.open(drawn.page("test_fault[other_order]"))
    browser.press("Tab", "ArrowLeft", "ArrowLeft", "ArrowDown")
    assert browser.run(FOCUSED).startswith("rank 1: all_reduce #6 of group ")
    # Two bars and their join.
    assert browser.run("[...document.querySelectorAll('.same')].map(e => e.tagName)") == ["g", "a", "a"]
    browser.press("ArrowDown")  # there is no rank 2
    assert browser.run(FOCUSED).startswith("rank 1: all_reduce #6 ")
    browser.press("ArrowUp")
    assert browser.run(FOCUSED).startswith("rank 0: all_reduce #6 ")


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no_scripts"])
def test_a_bar_leads_to_its_row_of_the_table(drawn: Drawn, browser: Browser, scripts: bool) -> None:
    browser.open(drawn.page("test_fault[other_order]"), scripts)
    if scripts:
        browser.press("Tab", "Enter")
    else:
        browser.click("svg a .waits")
    row = browser.run("[...document.querySelector('tr:target').cells].map(cell => cell.innerText)")
    place = drawn.place("dist.all_reduce(norm, group=self.shard_group)")
    assert row[:2] == ["0", "all_reduce #7"]
    assert row[-1].startswith(f"clip() at {place}\nstep() at engine.py:")


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("test_fault[other_order]", "test_training.py"),
        ("test_fault[dies_in_backward]", "test_training.py"),
        ("test_the_first_case_differs", "test_waits.py"),
    ],
)
def test_a_page_opens_with_the_fault_in_sight(drawn: Drawn, browser: Browser, test: str, file: str) -> None:
    browser.resize(600, 700)  # less than the picture needs
    browser.open(drawn.page(test, file))
    (window,) = browser.boxes(".picture")
    faults = browser.boxes(".missing, .waits, .failed, .mismatch")
    assert faults
    assert [box for box in faults if not window.left <= box.left < box.right <= window.right] == []


def test_the_index_lists_all_tests(drawn: Drawn) -> None:
    index = (drawn.path / "out" / "index.html").read_text()
    pages = re.findall(r'href="([^"]+)"', index)
    assert len(pages) == 11 + 2  # none of the fake world
    assert all((drawn.path / "out" / page).exists() for page in pages)


def test_flight_records_are_read_by_torchfrtrace(drawn: Drawn) -> None:
    folder = drawn.folder("test_fault[other_order]")
    dump = pickle.loads((folder / "fr_trace_0").read_bytes())
    assert {group["ranks"] for group in dump["pg_config"].values()} >= {"[0, 1]"}
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    done = subprocess.run([*command, "-p", "fr_trace_"], capture_output=True, text=True, check=False)
    if "gloo != 'nccl'" in done.stderr:
        pytest.skip("the fr_trace of torch 2.11 reads records of nccl and xccl alone")
    assert done.returncode == 0, done.stderr
    assert "missing ranks: {0}" in done.stdout + done.stderr
    assert (
        f"average_of_all at {drawn.path}/{drawn.place('dist.all_reduce(loss')}" in done.stdout + done.stderr
    )


def test_a_trace_joins_the_bars_of_a_collective(drawn: Drawn) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs perfetto")
    trace = protos.Trace()
    trace.ParseFromString((drawn.folder("test_healthy[2-ranks]") / "timeline.pftrace").read_bytes())
    flows = [flow for packet in trace.packet for flow in packet.track_event.flow_ids]
    assert flows
    moments = [packet.timestamp for packet in trace.packet if packet.HasField("track_event")]
    assert 0 < max(moments) - min(moments) < 60e9
    # Each rank is alone in its group of replicas.
    alone = [flow for flow in flows if flows.count(flow) == 1]
    assert {flows.count(flow) for flow in flows} == {1, 2}
    assert len(alone) == 2 * 3


def test_the_last_calls_are_kept_and_those_before_counted() -> None:
    def lane(rank: int) -> Lane:
        bars = [Bar(("0", 0, n), "all_reduce", 10 * n, 10 * n + 5, "over", True) for n in range(1, 5)]
        return Lane(rank, tuple(bars), (), (Span("call", 0, 50), Span("setup", 0, 9)), "passed", "")

    timeline = Timeline("id", (lane(0), lane(1)), 0, 50)
    assert timeline.last(4) is timeline
    last = timeline.last(3)
    assert (last.begun, last.num_left_out) == (20, 2)
    assert [[bar.begun for bar in each.bars] for each in last.lanes] == [[20, 30, 40]] * 2
    assert [each.spans for each in last.lanes] == [(Span("call", 20, 50),)] * 2


def test_a_folder_that_cannot_be_written_to_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "read_timeline", lambda *_, **__: SimpleNamespace())
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path))
    written = files.TimelineFiles(config, str(tmp_path), is_for_all=False)  # type: ignore[arg-type]
    (tmp_path / "test_a.py").touch()  # where a folder has to be
    report = SimpleNamespace(failed=True, sections=[])
    outcome = SimpleNamespace(has_fault=lambda: True, diagnosis=None, preparation=None, parts={})
    item = SimpleNamespace(nodeid="test_a.py::test_b")
    written.pytest_ranks_reported(item, outcome, [report])  # type: ignore[arg-type, list-item]
    ((title, text),) = report.sections
    assert (title, "cannot be written" in text, "test_a.py" in text) == ("timeline", True, True)


def test_a_test_that_ranks_have_ended_alike_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(files, "read_timeline", lambda name, *_, **__: read.append(name))
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=tmp_path))
    ended = SimpleNamespace(has_fault=lambda: False, diagnosis=None, parts={}, ranks=[Mock(world="")])
    for is_for_all in (False, True):
        written = files.TimelineFiles(config, str(tmp_path), is_for_all)  # type: ignore[arg-type]
        written.pytest_ranks_reported(SimpleNamespace(nodeid=str(is_for_all)), ended, [])  # type: ignore[arg-type]
    assert read == ["True"]


def test_a_folder_that_is_called_perfetto_is_no_package_of_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "perfetto").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # a real package would win against a folder
    for name in [name for name in sys.modules if name.startswith("perfetto")]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.util.find_spec("perfetto") is not None
    assert not can_write_trace()
    sys.modules.pop("perfetto", None)
