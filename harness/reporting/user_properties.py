"""What a report says in pairs of name and value, for CI systems: whose fault, what, and how to run it again.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest._code.code import ExceptionChainRepr
from _pytest.junitxml import bin_xml_escape, xml_key

from harness.output import truncate
from harness.reporting.problems import Problem
from harness.reporting.rank_reports import Context, RankReports

MOST_OF_A_CAUSE = 500
"""Characters."""
Property = tuple[str, object]


def properties_of_failure(
    context: Context, causes: list[Problem], told: ExceptionChainRepr
) -> list[Property]:
    """Return `rank` (of those to blame), `cause` (a line) and `rerun` (a command).

    Args:
        told: how the failure is shown.
    """
    message = (
        "" if told.reprcrash is None else told.reprcrash.message.removeprefix(f"rank {causes[0].rank}: ")
    )
    return [
        ("rank", ", ".join(map(str, sorted({cause.rank for cause in causes})))),
        ("cause", truncate(next(iter(message.splitlines()), causes[0].title), MOST_OF_A_CAUSE)),
        ("rerun", context.rerun()),
    ]


def merge_properties(reports: Iterable[pytest.TestReport]) -> list[Property]:
    """Return what tests have recorded on any rank, equal pairs once."""
    found: list[Property] = []
    for report in reports:
        # pytest's XML has no care for characters in names that XML cannot hold.
        named = ((bin_xml_escape(name), value) for name, value in report.user_properties)
        found.extend(pair for pair in named if pair not in found)
    return found


def hand_down(merged: list[pytest.TestReport]) -> None:
    """Repeat what is said of failures in the later reports of the item that passed.

    XML reports take the properties of a test from the report that comes last.
    """
    said: list[Property] = []
    for report in merged:
        if report.failed:
            said.extend(pair for pair in report.user_properties if pair not in said)
        else:
            report.user_properties.extend(pair for pair in said if pair not in report.user_properties)


def pass_on_xml_notes(context: Context, ranks: list[RankReports]) -> None:
    """Give pytest's XML report, if there is one, what `record_testsuite_property` and such noted on ranks."""
    xml = context.config.stash.get(xml_key, None)
    for rank in ranks:
        for report in (*rank.phases.values(), *rank.subtests.values()):
            for note, name, value in vars(report).pop("xml_notes", ()):
                if xml is None:
                    continue
                if note == "attribute":
                    xml.node_reporter(context.item.nodeid).add_attribute(name, value)
                elif (name, bin_xml_escape(value)) not in xml.global_properties:
                    xml.add_global_property(name, value)
