"""The plugin of the XML report: ranks note what tests record, the controller writes it."""

from __future__ import annotations

import pytest

from lockstep.hookspecs import RANK_PLUGIN


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.extend(("lockstep.features.xml_report.notes", "lockstep.features.xml_report.pytest_internals"))


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.xml_report.notes import XmlNotes
        from lockstep.features.xml_report.pytest_internals import put_in_place_of_report

        put_in_place_of_report(config, XmlNotes(config.pluginmanager))
    elif getattr(config.option, "xmlpath", None):
        from lockstep.features.xml_report.notes import XmlCases

        config.pluginmanager.register(XmlCases(config), "harness-xml-cases")
