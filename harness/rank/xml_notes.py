"""A rank's stand-in for pytest's XML report, which the controller writes: it notes what tests tell it."""

from __future__ import annotations

from typing import cast

import pytest
from _pytest.junitxml import bin_xml_escape, xml_key


class XmlNotes:
    """Takes what the fixtures `record_testsuite_property` and `record_xml_attribute` record."""

    family = "xunit1"  # of any other one pytest's fixtures say, on every rank, that it has no place for them

    def __init__(self) -> None:
        self._notes: list[tuple[str, str, str]] = []

    def attach(self, config: pytest.Config) -> None:
        """Take the place of the report in a session. pytest takes both away when the session ends."""
        config.stash[cast("pytest.StashKey[object]", xml_key)] = self
        config.pluginmanager.register(self, "harness-xml-notes")

    def take(self) -> list[tuple[str, str, str]]:
        """Return what was noted since the last time: "property" or "attribute", name, value."""
        notes, self._notes = self._notes, []
        return notes

    def add_global_property(self, name: str, value: object) -> None:
        if not isinstance(name, str):
            raise TypeError(f"name parameter needs to be a string, but {type(name).__name__} given")
        self._notes.append(("property", bin_xml_escape(name), str(value)))

    def node_reporter(self, nodeid: object) -> XmlNotes:
        return self  # one test at a time runs in a rank

    def add_attribute(self, name: str, value: object) -> None:
        self._notes.append(("attribute", str(name), str(value)))
