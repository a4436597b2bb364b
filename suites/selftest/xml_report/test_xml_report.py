"""Reports for CI systems: pytest's XML report, and reports as JSON."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest

from lockstep.features.xml_report.notes import NOTES, NotesSender
from suites.selftest.project import Run, copy_project, run_pytest


def properties(node: ElementTree.Element) -> list[tuple[str | None, str | None]]:
    return [(each.get("name"), each.get("value")) for each in node.findall("properties/property")]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("ci", tmp_path_factory.mktemp("faults"))
    options = ("-p", "no:cacheprovider", "-o", "junit_logging=all")
    return run_pytest(path, *options, fresh=True)  # its peak of memory is looked at


def test_rank_cause_and_command_are_properties_of_a_failure(faults: Run) -> None:
    again = "pytest test_faults.py::test_dies -o junit_logging=all -p no:cacheprovider"
    assert [properties(case) for case in faults.cases["test_dies"]] == [
        [("rank", "1"), ("cause", "died: SIGKILL"), ("rerun", again)]
    ]
    case = faults.case("test_dies")
    assert [node.get("message") for node in case.findall("failure")] == ["rank 1: died: SIGKILL"]


def test_the_properties_of_a_subtest_name_its_case(faults: Run) -> None:
    case = faults.case("test_cases")
    again = "pytest test_faults.py::test_cases -o junit_logging=all -p no:cacheprovider --subtest n=2"
    found = dict(properties(case))
    assert (found["rank"], found["cause"], found["rerun"]) == (
        "0, 1",
        "AssertionError: not as expected",
        again,
    )


def test_a_test_that_fails_twice_has_properties_of_each_failure(faults: Run) -> None:
    found = [properties(case) for case in faults.cases["test_fails_twice"]]
    assert [each[:-1] for each in found] == [
        [("rank", "0"), ("cause", "assert 0 == 1")],
        [("rank", "1"), ("cause", "AssertionError: not as expected")],
    ]
    assert [each[-1][0] for each in found] == ["rerun", "rerun"]


def test_every_item_is_one_case_or_two_if_its_teardown_failed(faults: Run) -> None:
    names = [case.get("name") for case in faults.suite.iter("testcase")]
    assert names.count("test_fails_twice") == 2
    assert len(names) == 11
    assert {key: faults.suite.get(key) for key in ("failures", "errors", "skipped")} == {
        "failures": "9",  # a subtest counts in addition to its test, as in pytest
        "errors": "1",
        "skipped": "0",
    }


def test_equal_properties_of_the_suite_are_recorded_once(faults: Run) -> None:
    assert sorted(properties(faults.suite)) == [("backend", "gloo"), ("of rank", "0"), ("of rank", "1")]


def test_characters_that_xml_cannot_hold_are_written_out(faults: Run) -> None:
    passed, failed = faults.case("test_passes"), faults.case("test_fails")
    assert properties(passed) == [("bad#x00name", "bad#x01value")]
    message = failed.findall("failure")[0].get("message", "")
    assert message.splitlines()[:2] == ["rank 1: AssertionError: 100%, at 1:2", "  #xD800 and #x00"]
    printed = failed.findtext("system-out", "")
    assert "bell #x07, escape #x1B[0m, null #x00, half a pair ?, not utf-8:" in printed


def test_output_in_the_xml_report_names_its_rank(faults: Run) -> None:
    lines = faults.case("test_fails").findtext("system-out", "").splitlines()
    assert [line for line in lines if line.startswith("rank ")] == ["rank 0:", "rank 1:"]


@pytest.mark.parametrize("data", [None, {"outcome": "passed"}])
@pytest.mark.parametrize("notes", [[], [("attribute", "name", "value")]])
def test_notes_go_with_the_next_report_that_can_be_sent(
    data: dict[str, object] | None, notes: list[tuple[str, str, str]]
) -> None:
    sender = NotesSender()
    sender.notes = [*notes]
    hook = sender.pytest_report_to_serializable()
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(data)
    expected = {"outcome": "passed", NOTES: notes} if notes else {"outcome": "passed"}
    assert ended.value.value == (data and expected)
    assert sender.notes == (notes if data is None else [])


# What is too much


def test_100_megabytes_of_output_do_not_fill_the_controller(faults: Run) -> None:
    case = faults.case("test_prints_100_megabytes")
    printed = case.findtext("system-out", "")
    assert len(printed) < 500_000
    notes = re.findall(r"^\[\.\.\. (.*) \.\.\.\]$", printed, re.M)
    assert notes == ["99,800,200 characters left out; --rank-output-dir DIR keeps all of it"] * 2
    assert int((faults.path / "peak.txt").read_text()) < 150  # MiB; it was 610 when all of it travelled


@pytest.mark.parametrize("name", ["test_says_too_much", "test_says_too_much_in_lines"])
def test_a_message_of_10_megabytes_is_truncated_with_a_note(faults: Run, name: str) -> None:
    [failure] = faults.case(name).findall("failure")
    assert "ValueError: boom" in (failure.text or "")
    assert "boom" in (failure.text or "").split("left out")[-1]
    assert 10_000 < len(failure.text or "") < 250_000
    assert len(dict(properties(faults.case(name)))["cause"] or "") < 501


# Other readers


def test_merged_reports_can_be_written_as_json_and_read_again(faults: Run) -> None:
    reports = [json.loads(line) for line in (faults.path / "reports.txt").read_text().splitlines()]
    assert len(reports) == 10 * 3 + 2  # two cases
    assert [each for each in reports if each[3] is not True] == []
