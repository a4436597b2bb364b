"""Private names of pytest's XML report, as seen in 9.2. Used on both sides; must not import torch."""

from __future__ import annotations

from typing import cast

import pytest
from _pytest.junitxml import LogXML, bin_xml_escape, xml_key

__all__ = ["bin_xml_escape", "forget_closed_cases", "put_in_place_of_report", "xml_report"]


def put_in_place_of_report(config: pytest.Config, notes: object) -> None:
    """Let `record_testsuite_property` and `record_xml_attribute` find an object, until the session ends."""
    config.stash[cast("pytest.StashKey[object]", xml_key)] = notes
    config.pluginmanager.register(notes, "harness-xml-notes")


def xml_report(config: pytest.Config) -> LogXML | None:
    """Return what writes the file of `--junitxml`, if this process does."""
    return config.stash.get(xml_key, None)


def forget_closed_cases(config: pytest.Config) -> None:
    """Drop the failures that the XML report takes for those of open cases, and whose cases are closed.

    If it moves: what `LogXML.finalize` closes, and the list that it is called for at a failed tear-down.
    """
    xml = xml_report(config)
    if xml is not None and hasattr(xml, "open_reports"):
        xml.open_reports[:] = [
            # The first part of a key was `nodeid` before 9.2.
            report
            for report in xml.open_reports
            if (getattr(report, "id", report.nodeid), getattr(report, "node", None)) in xml.node_reporters
        ]
