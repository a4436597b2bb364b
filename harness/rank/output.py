"""What a rank's tests print: kept in full where that was asked for, and cut before it is sent."""

from __future__ import annotations

import contextlib

import pytest

from harness.output import KEEP_ALL, MAX_TEXT, OutputDirectory, truncate


class TestOutput:
    """The captured sections of the test that runs.

    Args:
        directory: of `--rank-output-dir`, "" for none.
    """

    def __init__(self, rank: int, directory: str) -> None:
        self._rank = rank
        self._directory = OutputDirectory(directory) if directory else None
        self._num_settled = 0

    def begin(self, item: pytest.Item) -> None:
        self._num_settled = len(item._report_sections)

    def settle(self, item: pytest.Item) -> None:
        """Take on what a phase has printed, before its report is made.

        In place: an item keeps its sections for the rest of the session.
        """
        sections = item._report_sections
        for i in range(self._num_settled, len(sections)):
            when, kind, text = sections[i]
            sections[i] = (when, kind, self._take(item.nodeid, kind, text))
        self._num_settled = len(sections)

    def settle_subtest(self, report: pytest.TestReport) -> None:
        """Take on what a subtest has printed; before it stands what the test had printed in set-up."""
        for i, (title, text) in enumerate(report.sections[self._num_settled :], self._num_settled):
            report.sections[i] = (title, self._take(report.nodeid, _kind(title), text))

    def keep_of_file(self, report: pytest.CollectReport) -> None:
        """Keep what a file printed when it was imported, in place of what it printed in a world before."""
        if self._directory is not None:
            for title, text in report.sections:
                with contextlib.suppress(OSError):  # the controller looked whether it can be written
                    self._directory.replace(report.nodeid, self._rank, _kind(title), text)

    def _take(self, nodeid: str, kind: str, text: str) -> str:
        remedy = KEEP_ALL
        if self._directory is not None:
            try:
                remedy = f"all of it is in {self._directory.add(nodeid, self._rank, kind, text)}"
            except OSError as error:
                text += f"\n(could not be kept: {error})"
        return truncate(text, MAX_TEXT, remedy)


def _kind(title: str) -> str:
    """Read the "stdout" out of "Captured stdout call"; plugins may add titles of their own."""
    words = title.split()
    return words[1] if len(words) > 1 and words[0] == "Captured" else title
