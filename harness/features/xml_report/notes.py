"""Notes for pytest's XML report: taken in a rank, written in the controller. Must not import torch."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.xml_report.pytest_internals import bin_xml_escape, forget_closed_cases, xml_report

if TYPE_CHECKING:
    from lockstep.world.outcome import ItemOutcome

NOTES = "xml_notes"
"""The attribute of a report that has them."""
Note = tuple[str, ...]
"""Either "property" or "attribute"; name; value."""


class XmlNotes:
    """A stand-in for pytest's XML report in a rank: what it notes is sent with the next report.

    It takes what the fixtures `record_testsuite_property` and `record_xml_attribute` record.
    """

    # Under any other one pytest's fixtures warn, on every rank, that it has no place for what they record.
    family = "xunit1"

    def __init__(self, plugins: pytest.PytestPluginManager) -> None:
        self._plugins = plugins
        self._sender = NotesSender()

    def _note(self, *note: str) -> None:
        if not self._plugins.is_registered(self._sender):  # most tests record nothing, and need no hook
            self._plugins.register(self._sender)
        self._sender.notes.append(note)

    def add_global_property(self, name: str, value: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name parameter needs to be a string, but {type(name).__name__} given")
        self._note("property", bin_xml_escape(name), str(value))

    def node_reporter(self, nodeid: object) -> XmlNotes:
        return self  # one test at a time runs in a rank

    def add_attribute(self, name: str, value: object) -> None:
        self._note("attribute", str(name), str(value))


class NotesSender:
    """Adds to each report what was recorded since the last one."""

    def __init__(self) -> None:
        self.notes: list[Note] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(
        self,
    ) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
        data = yield
        if data is not None and self.notes:
            data[NOTES], self.notes = self.notes, []
        return data


def write_notes(item: pytest.Item, notes: Iterable[Note]) -> None:
    """Replay calls of `record_testsuite_property` and such in pytest's XML report, if there is one."""
    xml = xml_report(item.config)
    if xml is None:
        return
    for note, name, value in notes:
        if note == "attribute":
            xml.node_reporter(item.nodeid).add_attribute(name, value)
        elif (name, bin_xml_escape(value)) not in xml.global_properties:
            xml.add_global_property(name, value)


class XmlCases:
    """Writes what ranks note, and lets a tear-down be reported after that of its test.

    A world may fail as it closes, for example. pytest's XML report keeps all failures but one of a test that
    had several, those of subtests, as those of an open case. The next tear-down of the test would close it,
    and raise KeyError.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_ranks_reported(
        self, item: pytest.Item, outcome: ItemOutcome, reports: list[pytest.TestReport]
    ) -> None:
        notes = [note for rank in outcome.ranks for data in rank.reports for note in data.get(NOTES, ())]
        if notes:
            write_notes(item, notes)
            for report in reports:
                vars(report).pop(NOTES, None)

    @pytest.hookimpl(trylast=True)  # after the XML report's own
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            forget_closed_cases(self._config)
