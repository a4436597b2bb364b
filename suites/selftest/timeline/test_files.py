"""The files of timelines and who asks for them, without ranks: pages, the list, the index, the sections."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.features.timeline import FEATURE, PICTURES, files, plugin
from lockstep.features.timeline.files import TimelineFiles, register
from lockstep.features.timeline.plugin import FlightRecords
from lockstep.features.timeline.timeline import Bar, Lane, Timeline
from lockstep.hookspecs import RANK_PLUGIN


def timeline_of(*lanes: Lane) -> Timeline:
    return Timeline("test_a.py::test_b", lanes, begun=1_000_000, end=4_500_000)


BAR = Bar(("0", 0, 1), "all_reduce", 2_000_000, 3_000_000, "over", True)
LANES = tuple(Lane(rank, (BAR,) * (rank + 1), (), (), "passed", "") for rank in (0, 1))


class Written:
    """Timelines that are written to a folder, and how they are read and traced."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_for_all: bool = True) -> None:
        self.folder = folder
        self.timeline: Timeline | None = timeline_of(*LANES)
        self.read: list[tuple[object, ...]] = []
        self.done: list[str] = []
        self.traces = True
        monkeypatch.setattr(files, "read_timeline", self._read)
        monkeypatch.setattr(files, "can_write_trace", self._can_write_trace)
        monkeypatch.setattr(files, "write_trace", lambda _, path: self.done.append(f"writes {path.name}"))
        monkeypatch.setattr(files, "remove_flight_files", lambda _: self.done.append("removes"))
        monkeypatch.setattr(files, "write_flight_files", lambda *_: self.done.append("writes flights"))
        self.config: Any = SimpleNamespace(invocation_params=SimpleNamespace(dir=Path("/base")))
        self.files = TimelineFiles(self.config, str(folder), is_for_all)

    def _read(self, *args: object, sentence: str) -> Timeline | None:
        self.read.append((*args, sentence))
        return self.timeline

    def _can_write_trace(self) -> bool:
        self.done.append("asks")
        return self.traces

    def report(self, *outcomes: str, **outcome: Any) -> list[str]:
        """Report a test with phases of these outcomes; return what the sections of each say."""
        reports: list[Any] = [
            SimpleNamespace(
                failed=each == "failed",
                skipped=each == "skipped",
                longreprtext=f"text {place}",
                sections=[],
            )
            for place, each in enumerate(outcomes)
        ]
        given = {"has_fault": lambda: False, "diagnosis": None, "preparation": None, "parts": {}, "ranks": []}
        self.outcome: Any = SimpleNamespace(**{**given, **outcome})
        self.files.pytest_ranks_reported(SimpleNamespace(nodeid="test_a.py::test_b"), self.outcome, reports)  # type: ignore[arg-type]
        assert {title for each in reports for title, _ in each.sections} <= {"timeline"}
        return ["".join(text for _, text in each.sections) for each in reports]

    @property
    def place(self) -> Path:
        return self.folder / "test_a.py" / "test_b" / "timeline.html"

    def listed(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "tests-master.jsonl").read_text().splitlines()]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(tmp_path / "out", monkeypatch)


def test_a_test_that_passes_has_a_page_and_a_line_in_the_list(written: Written) -> None:
    assert written.report("passed", "passed") == ["", ""]
    assert written.place.exists()
    assert written.read == [("test_a.py::test_b", written.outcome, "/base", "")]
    assert written.done == ["removes", "asks", "writes timeline.pftrace"]
    assert written.listed() == [
        {
            "nodeid": "test_a.py::test_b",
            "page": "test_a.py/test_b/timeline.html",
            "outcome": "passed",
            "ranks": 2,
            "calls": 3,
            "ms": 3.5,
        }
    ]
    written.traces = False
    written.report("passed")
    assert written.done[3:] == ["removes", "writes timeline.pftrace"]
    assert len(written.listed()) == 2


def test_failures_of_a_test_point_to_its_page(written: Written) -> None:
    written.traces = False
    diagnosis = SimpleNamespace(sentence="a mismatch")
    said = written.report("passed", "failed", "failed", diagnosis=diagnosis)
    assert said == ["", str(written.place), str(written.place)]
    assert written.read[0][3] == "a mismatch"
    assert written.done == ["removes", "writes flights", "asks"]
    assert written.listed()[0]["outcome"] == "failed"
    page = written.place.read_text()
    assert "text 1\n\ntext 2" in page
    assert "text 0" not in page
    written.report("skipped", "passed")
    assert written.listed()[1]["outcome"] == "skipped"


def test_a_test_without_a_record_says_why(written: Written) -> None:
    written.timeline = None
    assert written.report("failed", ranks=[SimpleNamespace(world="")]) == [
        "none: no rank has a record of a call in this test"
    ]
    assert written.report("failed", "passed", ranks=[SimpleNamespace(world="4")]) == [
        "none: a fake world keeps no record of what its ranks call, and no rank of it waits for another",
        "",
    ]
    assert not written.folder.exists()


def test_pictures_of_other_features_have_a_page_of_their_own(written: Written) -> None:
    written.timeline = None
    diagnosis = SimpleNamespace(sentence="why")
    pictures = {PICTURES: [("A title", "<svg id='own'></svg>")]}
    assert written.report("failed", parts=pictures, diagnosis=diagnosis) == [str(written.place)]
    page = written.place.read_text()
    assert "A title" in page
    assert "<svg id='own'></svg>" in page
    assert "why" in page
    assert written.listed()[0]["ms"] == 0


def test_only_faults_are_written_where_no_timeline_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Written(tmp_path, monkeypatch, is_for_all=False)
    assert faults.report("failed") == [""]
    assert faults.report("failed", has_fault=lambda: True) == [str(faults.place)]
    assert len(faults.read) == 1
    assert not (tmp_path / "tests-master.jsonl").exists()
    session: Any = SimpleNamespace(config=faults.config)
    faults.files.pytest_sessionfinish(session)
    assert not (tmp_path / "index.html").exists()
    (tmp_path / "tests-gw0.jsonl").touch()
    faults.files.pytest_configure(faults.config)
    assert (tmp_path / "tests-gw0.jsonl").exists()


def test_the_index_is_written_by_the_process_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Written(tmp_path / "out", monkeypatch)
    worker: Any = SimpleNamespace(
        invocation_params=SimpleNamespace(dir=tmp_path), workerinput={"workerid": "gw1"}
    )
    of_worker = TimelineFiles(worker, str(tmp_path / "out"), is_for_all=True)
    assert of_worker._list.name == "tests-gw1.jsonl"
    session: Any = SimpleNamespace(config=worker)
    of_worker.pytest_sessionfinish(session)
    assert not written.folder.exists()
    session.config = written.config
    written.files.pytest_sessionfinish(session)
    assert (written.folder / "index.html").exists()
    written.report("passed")
    (written.folder / "tests-gw1.jsonl").write_text(
        (written.folder / "tests-master.jsonl").read_text().replace("test_b", "test_c")
    )
    of_worker.pytest_configure(worker)
    assert (written.folder / "tests-gw1.jsonl").exists()
    written.files.pytest_sessionfinish(session)
    index = (written.folder / "index.html").read_text()
    assert index.index("test_a.py/test_c/timeline.html") < index.index("test_a.py/test_b/timeline.html")
    assert written.files._error == ""
    written.files.pytest_configure(written.config)
    assert not [*written.folder.glob("tests-*.jsonl")]


def test_what_could_not_be_written_is_said_at_the_end(written: Written) -> None:
    lines: list[tuple[str, bool]] = []
    reporter: Any = SimpleNamespace(write_line=lambda text, red: lines.append((text, red)))
    written.files.pytest_terminal_summary(reporter)
    assert lines == []
    written.folder.mkdir()
    (written.folder / "tests-gw0.jsonl").write_text('{"nodeid": ')
    written.files.pytest_sessionfinish(SimpleNamespace(config=written.config))  # type: ignore[arg-type]
    written.files.pytest_terminal_summary(reporter)
    ((line, is_red),) = lines
    assert is_red
    assert line.startswith("timeline: cannot be written: Expecting value")
    (written.folder / "test_a.py").touch()
    assert written.report("passed", "failed")[1].startswith("cannot be written: ")
    written.files.pytest_terminal_summary(reporter)
    assert "test_a.py" in lines[1][0]


@pytest.mark.parametrize(
    ("timeline", "output", "folder", "is_for_all"),
    [("pages", None, "/base/pages", True), (None, "out", "/base/out", False), ("/a", "out", "/a", True)],
)
def test_timelines_go_to_the_folder_that_was_asked_for(
    timeline: str | None, output: str | None, folder: str, is_for_all: bool
) -> None:
    registered: list[Any] = []
    config: Any = SimpleNamespace(
        option=SimpleNamespace(timeline=timeline, rank_output_dir=output),
        invocation_params=SimpleNamespace(dir=Path("/base")),
        pluginmanager=SimpleNamespace(register=registered.append),
    )
    register(config)
    (made,) = registered
    assert (str(made._folder), made._is_for_all, made._base) == (folder, is_for_all, "/base")


def test_a_process_has_what_its_half_needs(tmp_path: Path) -> None:
    registered: list[object] = []
    session = SimpleNamespace(rank=SimpleNamespace(status="status"))
    plugins: dict[str, object] = {}

    def configure(timeline: str | None, output: str | None = None) -> list[str]:
        registered.clear()
        plugin.pytest_configure(
            SimpleNamespace(  # type: ignore[arg-type]
                option=SimpleNamespace(timeline=timeline, rank_output_dir=output),
                invocation_params=SimpleNamespace(dir=tmp_path),
                pluginmanager=SimpleNamespace(get_plugin=plugins.get, register=registered.append),
            )
        )
        return [type(each).__name__ for each in registered]

    assert configure(None) == []
    assert configure("x") == configure(None, "y") == ["TimelineFiles"]
    (tmp_path / "file").touch()
    with pytest.raises(pytest.UsageError, match="--timeline"):
        configure(str(tmp_path / "file"))
    plugins[RANK_PLUGIN] = session
    assert configure(None, "y") == []
    assert configure("x") == ["FlightRecords"]


def test_a_rank_sends_its_record_at_the_end_with_stacks_from_the_begin() -> None:
    status = Mock()
    status.record.return_value = "record"
    records = FlightRecords(status)
    records.pytest_runtest_protocol()
    status.keep_stacks.assert_called_once_with()
    ending: Any = SimpleNamespace(parts={})
    records.pytest_ranks_finished(ending)
    assert ending.parts == {FEATURE: "record"}


def test_records_of_ranks_that_ended_are_requested_after_a_fault() -> None:
    run: Any = Mock()
    run.request_statuses.return_value = {1: SimpleNamespace(record="record")}
    ranks = [SimpleNamespace(rank=3), SimpleNamespace(rank=5)]
    outcome: Any = SimpleNamespace(has_fault=lambda: False, ended=lambda: "ended", ranks=ranks, parts={})
    plugin.pytest_ranks_outcome(run, outcome)
    assert (run.mock_calls, outcome.parts) == ([], {})
    outcome.has_fault = lambda: True
    plugin.pytest_ranks_outcome(run, outcome)
    run.request_statuses.assert_called_once_with("ended")
    assert outcome.parts == {FEATURE: {5: "record"}}


@pytest.mark.parametrize(
    ("has_fault", "report", "is_mismatch", "diagnosis", "is_drawn"),
    [
        (False, None, True, "x", False),
        (True, None, False, None, True),
        (True, "report", False, None, False),
        (True, "report", True, None, True),
        (True, "report", False, "x", True),
    ],
)
def test_the_last_collectives_are_drawn_of_ranks_that_parted(
    monkeypatch: pytest.MonkeyPatch,
    has_fault: bool,
    report: str | None,
    is_mismatch: bool,
    diagnosis: str | None,
    is_drawn: bool,
) -> None:
    asked: list[tuple[object, ...]] = []
    found: list[object] = ["timeline"]
    monkeypatch.setattr(
        "lockstep.features.timeline.reader.read_timeline", lambda *given: asked.append(given) or found[0]
    )
    monkeypatch.setattr("lockstep.features.timeline.text.as_text", lambda drawn: f"text of {drawn}")
    outcome = SimpleNamespace(has_fault=lambda: has_fault)
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=Path("/base")))
    item = SimpleNamespace(nodeid="test_a.py::test_b", config=config)
    context: Any = SimpleNamespace(outcome=outcome, diagnosis=diagnosis, item=item)
    cause: Any = SimpleNamespace(report=report, is_mismatch=is_mismatch)
    section = ("timeline: the last collectives of each rank", "text of timeline")
    assert plugin.pytest_ranks_sections(context, cause, None) == (section if is_drawn else None)
    if is_drawn:
        whole = pytest.TestReport("x", ("x", 0, ""), {}, "failed", None, "call", stop=3.0)
        case: Any = type("SubtestReport", (pytest.TestReport,), {})(
            "x", ("x", 0, ""), {}, "failed", None, "call", stop=2.5
        )
        plugin.pytest_ranks_sections(context, cause, whole)
        plugin.pytest_ranks_sections(context, cause, case)
        head = ("test_a.py::test_b", outcome, "/base")
        assert asked == [(*head, None), (*head, None), (*head, 2_500_000_000)]
        found[0] = None
        assert plugin.pytest_ranks_sections(context, cause, None) is None
