"""Notes for pytest's XML report: taken in a rank, written in the controller. Must not import torch."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import pytest

from lockstep.features.xml_report.pytest_internals import bin_xml_escape, forget_closed_cases, xml_report

NOTES = "xml_notes"
"""The attribute of a report that has them."""
Note = tuple[str, str, str]
"""Either "property" or "attribute"; name; value."""


class XmlNotes:
    """A stand-in for pytest's XML report in a rank, which sends the notes with its next report.

    It takes what the fixtures `record_testsuite_property` and `record_xml_attribute` record.
    """

    # Under any other one pytest's fixtures warn, on every rank, that it has no place for what they record.
    family = "xunit1"

    def __init__(self) -> None:
        self._notes: list[Note] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(
        self,
    ) -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
        """Add what was recorded since the last report."""
        data = yield
        if data is not None and self._notes:
            data[NOTES], self._notes = self._notes, []
        return data

    def add_global_property(self, name: str, value: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name parameter needs to be a string, but {type(name).__name__} given")
        self._notes.append(("property", bin_xml_escape(name), str(value)))

    def node_reporter(self, nodeid: object) -> XmlNotes:
        return self  # one test at a time runs in a rank

    def add_attribute(self, name: str, value: object) -> None:
        self._notes.append(("attribute", str(name), str(value)))


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
    """Lets a tear-down be reported after that of its test: where a world fails as it closes, for example.

    pytest's XML report keeps all failures but one of a test that had several, those of subtests, as those of
    an open case. The next tear-down of the test would close it, and raise KeyError.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the XML report's own
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            forget_closed_cases(self._config)
