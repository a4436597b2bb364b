"""Pairs of name and value in reports, for CI systems: the rank to blame, the cause, the re-run line.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from harness.output import truncate
from harness.reporting.problems import Problem
from harness.reporting.pytest_internals import ExceptionChainRepr, bin_xml_escape, xml_report
from harness.reporting.rank_reports import Context, RankReports

MAX_CAUSE = 500
"""Characters."""
Property = tuple[str, object]


def properties_of_failure(
    context: Context, causes: list[Problem], shown: ExceptionChainRepr
) -> list[Property]:
    """Return `rank` (of those to blame), `cause` (a line) and `rerun` (a command) of a failure."""
    crash = shown.reprcrash
    message = "" if crash is None else crash.message.removeprefix(f"rank {causes[0].rank}: ")
    return [
        ("rank", ", ".join(map(str, sorted({cause.rank for cause in causes})))),
        ("cause", truncate(next(iter(message.splitlines()), causes[0].title), MAX_CAUSE)),
        ("rerun", context.rerun()),
    ]


def merge_properties(reports: Iterable[pytest.TestReport]) -> list[Property]:
    """Return the properties that tests have recorded on any rank, equal pairs once."""
    found: list[Property] = []
    for report in reports:
        # pytest's XML escapes values, but not names.
        named = ((bin_xml_escape(name), value) for name, value in report.user_properties)
        found.extend(pair for pair in named if pair not in found)
    return found


def repeat_in_later_reports(merged: list[pytest.TestReport]) -> None:
    """Repeat the properties of failures in the later reports of the item that passed.

    XML reports take the properties of a test from its last report.
    """
    of_failures: list[Property] = []
    for report in merged:
        if report.failed:
            of_failures.extend(pair for pair in report.user_properties if pair not in of_failures)
        else:
            report.user_properties.extend(pair for pair in of_failures if pair not in report.user_properties)


def pass_on_xml_notes(context: Context, ranks: list[RankReports]) -> None:
    """Replay calls of `record_testsuite_property` and such in pytest's XML report, if there is one."""
    xml = xml_report(context.config)
    for rank in ranks:
        for report in (*rank.phases.values(), *rank.subtests.values()):
            for note, name, value in vars(report).pop("xml_notes", ()):
                if xml is None:
                    continue
                if note == "attribute":
                    xml.node_reporter(context.item.nodeid).add_attribute(name, value)
                elif (name, bin_xml_escape(value)) not in xml.global_properties:
                    xml.add_global_property(name, value)
