"""The plugin of the XML report: ranks note what tests record, the controller writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.world.outcome import ItemOutcome


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.xml_report.notes import XmlNotes
        from lockstep.features.xml_report.pytest_internals import put_in_place_of_report

        put_in_place_of_report(config, XmlNotes())
    elif getattr(config.option, "xmlpath", None):
        from lockstep.features.xml_report.notes import XmlCases

        config.pluginmanager.register(XmlCases(config), "harness-xml-cases")


def pytest_ranks_reported(item: pytest.Item, outcome: ItemOutcome, reports: list[pytest.TestReport]) -> None:
    from lockstep.features.xml_report.notes import NOTES, write_notes

    notes = [note for rank in outcome.ranks for data in rank.reports for note in data.get(NOTES, ())]
    if notes:
        write_notes(item, notes)
        for report in reports:
            vars(report).pop(NOTES, None)
