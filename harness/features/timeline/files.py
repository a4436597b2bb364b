"""Files of timelines: page, trace and flight records of each test. A plugin of the controller."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.features.timeline import PICTURES
from lockstep.features.timeline.flight_files import remove_flight_files, write_flight_files
from lockstep.features.timeline.page import index_of, page_of
from lockstep.features.timeline.reader import read_timeline
from lockstep.features.timeline.timeline import Timeline
from lockstep.features.timeline.trace import can_write_trace, write_trace
from lockstep.output import OutputDirectory, write_text
from lockstep.world.outcome import ItemOutcome, label_of

PAGE, TRACE = "timeline.html", "timeline.pftrace"
_NO_CALL = "none: no rank has a record of a call in this test"
_FAKE = "none: a fake world keeps no record of what its ranks call, and no rank of it waits for another"


def register(config: pytest.Config) -> None:
    """Write timelines to the folder of `--timeline`, else those of faults to that of `--rank-output-dir`."""
    option = "timeline" if config.option.timeline else "rank_output_dir"
    folder = config.invocation_params.dir / getattr(config.option, option)
    config.pluginmanager.register(TimelineFiles(config, str(folder), is_for_all=option == "timeline"))


class TimelineFiles:
    """Writes the timelines of tests.

    Args:
        folder: folder of `--timeline`, or of `--rank-output-dir`, which has those of faults alone.
        is_for_all: true if it is the former, and each test has a page.
    """

    def __init__(self, config: pytest.Config, folder: str, is_for_all: bool) -> None:
        self._base = str(config.invocation_params.dir)
        self._folder = Path(folder)
        self._directory = OutputDirectory(folder)
        self._is_for_all = is_for_all
        self._has_perfetto: bool | None = None
        self._error = ""
        worker = getattr(config, "workerinput", {"workerid": "master"})["workerid"]
        self._list = self._folder / f"tests-{worker}.jsonl"

    def pytest_configure(self, config: pytest.Config) -> None:
        """Forget which tests an earlier run has listed."""
        if self._is_for_all and not hasattr(config, "workerinput"):
            for path in self._folder.glob("tests-*.jsonl"):
                path.unlink()

    def pytest_ranks_reported(
        self, item: pytest.Item, outcome: ItemOutcome, reports: list[pytest.TestReport]
    ) -> None:
        """Write the files of a test that has any; failures point to them, or say why there is none."""
        if not (self._is_for_all or outcome.has_fault()):
            return
        sentence = outcome.diagnosis.sentence if outcome.diagnosis is not None else ""
        timeline = read_timeline(str(item.nodeid), outcome, self._base, sentence=sentence)
        pictures = outcome.parts.get(PICTURES, ())
        if timeline is None and pictures:  # they may be of other worlds than that of the last run
            timeline = Timeline(str(item.nodeid), (), begun=0, end=0, sentence=sentence)
        if timeline is None:
            _say(reports, _FAKE if outcome.ranks[0].world else _NO_CALL)
            return
        folder = self._directory.of_test(label_of(str(item.nodeid), outcome.preparation))
        place = str(folder / PAGE)
        try:
            self._write(timeline, folder, reports, pictures)
        except OSError as error:  # the report of the test must not be lost for its picture
            place = self._error = f"cannot be written: {error}"
        _say(reports, place)

    def _write(
        self,
        timeline: Timeline,
        folder: Path,
        reports: list[pytest.TestReport],
        pictures: Sequence[tuple[str, str]],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        failed = [report for report in reports if report.failed]
        verdict = "failed" if failed else "skipped" if any(each.skipped for each in reports) else "passed"
        text = "\n\n".join(report.longreprtext for report in failed)
        write_text(folder / PAGE, page_of(timeline, verdict, text, pictures))
        remove_flight_files(folder)
        if failed:
            write_flight_files(timeline, folder)
        if self._has_perfetto is None:
            self._has_perfetto = can_write_trace()
        if self._has_perfetto:
            write_trace(timeline, folder / TRACE)
        if self._is_for_all:
            summary = {
                "nodeid": timeline.nodeid,
                "page": str((folder / PAGE).relative_to(self._folder)),
                "outcome": verdict,
                "ranks": len(timeline.lanes),
                "calls": sum(len(lane.bars) for lane in timeline.lanes),
                "ms": (timeline.end - timeline.begun) / 1e6,
            }
            with self._list.open("a") as file:
                file.write(json.dumps(summary) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the index, in the process that the user started."""
        if not self._is_for_all or hasattr(session.config, "workerinput"):
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # no worker may have written
            lines = [
                line
                for path in sorted(self._folder.glob("tests-*.jsonl"))
                for line in path.read_text().splitlines()
            ]
            write_text(self._folder / "index.html", index_of(map(json.loads, lines)))
        except (OSError, ValueError) as error:  # a line is written in part where the disk was full
            self._error = f"cannot be written: {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Report that a file is missing, where no failure does."""
        if self._error:
            terminalreporter.write_line(f"timeline: {self._error}", red=True)


def _say(reports: list[pytest.TestReport], text: str) -> None:
    """Say in each failure where its timeline is, or why there is none."""
    for report in reports:
        if report.failed:
            report.sections.append(("timeline", text))
