"""What CI systems read: pytest's XML report, annotations in GitHub Actions, and reports as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest

FAULTS = """
    import os, signal, sys
    import pytest
    from checks import expect

    on_two_ranks = pytest.mark.ranks(2)

    @on_two_ranks
    def test_passes(world, record_property, record_testsuite_property, record_xml_attribute):
        record_testsuite_property("backend", world.backend)
        record_testsuite_property("of rank", world.rank)
        record_property("bad\\x00name", "bad\\x01value")

    @on_two_ranks
    def test_fails(world, record_testsuite_property):
        record_testsuite_property("backend", world.backend)
        print("bell \\a, escape \\x1b[0m, null \\0, half a pair \\ud800, not utf-8:", flush=True)
        os.write(1, b"\\xff\\xfe\\n")
        assert world.rank == 0, "100%, at 1:2\\n\\ud800 and \\0"

    @on_two_ranks
    def test_fails_elsewhere(world):
        expect(world.rank == 0)

    @on_two_ranks
    def test_dies(world):
        print("dying")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @on_two_ranks
    def test_cases(world, run_subtests):
        run_subtests({"n": [1, 2]}, lambda n: expect(n == 1))

    @on_two_ranks
    def test_fails_twice(world, request):
        request.addfinalizer(lambda: expect(world.rank == 0))
        assert world.rank == 1

    @on_two_ranks
    def test_prints_100_megabytes(world):
        line = b"x" * 99 + b"\\n"
        for _ in range(100):
            os.write(1, line * 10_000)

    @on_two_ranks
    def test_says_too_much(world):
        raise ValueError("boom " * 2_000_000)

    @on_two_ranks
    def test_says_too_much_in_lines(world):
        raise ValueError(("boom " * 19 + "\\n") * 100_000)

    def test_without_ranks():
        expect(False)
"""
CHECKS = """
    def expect(claim):
        __tracebackhide__ = False
        assert claim, "not as expected"
"""
# Notes every report as JSON, and how much memory the controller has taken by the end.
NOTES = """
    import json, os
    import pytest

    def pytest_runtest_logreport(report):
        if "RANK" in os.environ:
            return
        hook = report_config.hook
        data = hook.pytest_report_to_serializable(config=report_config, report=report)
        data = json.loads(json.dumps(data, default=lambda value: "not JSON"))
        whole = "not JSON" not in str(data)
        again = hook.pytest_report_from_serializable(config=report_config, data=data)
        same = again.longreprtext == report.longreprtext and len(again.sections) == len(report.sections)
        same = same and whole
        with open("reports.txt", "a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome, same]) + "\\n")

    def pytest_configure(config):
        global report_config
        report_config = config

    def pytest_unconfigure():
        if "RANK" in os.environ:
            os.write(1, b"closing\\n")
        else:
            status = open("/proc/self/status").read()  # getrusage tells of the process that was forked, too
            open("peak.txt", "w").write(str(int(status.split("VmHWM:")[1].split()[0]) // 1024))
"""


@dataclass(frozen=True)
class Session:
    path: Path
    output: str

    def annotations(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("::")]

    def suite(self) -> ElementTree.Element:
        [suite] = ElementTree.parse(self.path / "report.xml").getroot()
        return suite

    def cases(self, name: str) -> list[ElementTree.Element]:
        return [case for case in self.suite().iter("testcase") if case.get("name") == name]


def properties(node: ElementTree.Element) -> list[tuple[str | None, str | None]]:
    return [(each.get("name"), each.get("value")) for each in node.findall("properties/property")]


def run(path: Path, *args: str) -> Session:
    (path / "pytest.ini").write_text("[pytest]\nranks_preload =\n")
    for name, text in {"test_faults": FAULTS, "checks": CHECKS, "conftest": NOTES}.items():
        (path / f"{name}.py").write_text(dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=report.xml", *args],
        cwd=path,
        env={**os.environ, "GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(path.parent)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    return Session(path, done.stdout)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return run(tmp_path_factory.mktemp("faults"), "-o", "junit_logging=all")


# The XML report


def test_the_cause_the_rank_and_the_command_are_properties_of_a_failed_case(faults: Session) -> None:
    again = "pytest test_faults.py::test_dies -o junit_logging=all -p no:cacheprovider"
    assert [properties(case) for case in faults.cases("test_dies")] == [
        [("rank", "1"), ("cause", "died: SIGKILL"), ("rerun", again)]
    ]
    [case] = faults.cases("test_dies")
    assert [node.get("message") for node in case.findall("failure")] == ["rank 1: died: SIGKILL"]


def test_the_properties_of_a_point_name_the_point(faults: Session) -> None:
    [case] = faults.cases("test_cases")
    again = "pytest test_faults.py::test_cases -o junit_logging=all -p no:cacheprovider --subtest n=2"
    told = dict(properties(case))
    assert (told["rank"], told["cause"], told["rerun"]) == ("0, 1", "AssertionError: not as expected", again)


def test_a_test_that_fails_twice_has_the_properties_of_each_failure(faults: Session) -> None:
    told = [properties(case) for case in faults.cases("test_fails_twice")]
    assert [each[:-1] for each in told] == [
        [("rank", "0"), ("cause", "assert 0 == 1")],
        [("rank", "1"), ("cause", "AssertionError: not as expected")],
    ]
    assert [each[-1][0] for each in told] == ["rerun", "rerun"]


def test_every_item_is_one_case_and_one_more_where_its_teardown_failed_too(faults: Session) -> None:
    names = [case.get("name") for case in faults.suite().iter("testcase")]
    assert names.count("test_fails_twice") == 2
    assert len(names) == 11
    assert {key: faults.suite().get(key) for key in ("failures", "errors", "skipped")} == {
        "failures": "9",  # a subtest counts beside its test, as pytest has it
        "errors": "1",
        "skipped": "0",
    }


def test_what_ranks_record_of_the_whole_run_is_in_the_report_each_value_once(faults: Session) -> None:
    assert sorted(properties(faults.suite())) == [("backend", "gloo"), ("of rank", "0"), ("of rank", "1")]


def test_characters_that_xml_cannot_hold_are_written_out(faults: Session) -> None:
    [passed], [failed] = faults.cases("test_passes"), faults.cases("test_fails")
    assert properties(passed) == [("bad#x00name", "bad#x01value")]
    message = failed.findall("failure")[0].get("message", "")
    assert message.splitlines()[:2] == ["rank 1: AssertionError: 100%, at 1:2", "  #xD800 and #x00"]
    printed = failed.findtext("system-out", "")
    assert "bell #x07, escape #x1B[0m, null #x00, half a pair ?, not utf-8:" in printed


def test_output_in_the_xml_report_names_its_rank(faults: Session) -> None:
    lines = faults.cases("test_fails")[0].findtext("system-out", "").splitlines()
    assert [line for line in lines if line.startswith("rank ")] == ["rank 0:", "rank 1:"]


# What is too much


def test_100_megabytes_from_each_rank_pass_by_the_controller(faults: Session) -> None:
    [case] = faults.cases("test_prints_100_megabytes")
    printed = case.findtext("system-out", "")
    assert len(printed) < 500_000
    notes = re.findall(r"^\[\.\.\. (.*) \.\.\.\]$", printed, re.M)
    assert notes == ["99,800,200 characters left out; --rank-output-dir DIR keeps all of it"] * 2
    assert int((faults.path / "peak.txt").read_text()) < 150  # MiB; it was 610 when all of it travelled


@pytest.mark.parametrize("name", ["test_says_too_much", "test_says_too_much_in_lines"])
def test_a_message_of_10_megabytes_is_cut_with_a_note(faults: Session, name: str) -> None:
    [failure] = faults.cases(name)[0].findall("failure")
    assert "ValueError: boom" in (failure.text or "")
    assert "boom" in (failure.text or "").split("left out")[-1]
    assert 10_000 < len(failure.text or "") < 250_000
    assert len(dict(properties(faults.cases(name)[0]))["cause"] or "") < 501


# Annotations


def test_a_failure_on_ranks_is_annotated_with_rank_cause_and_command(faults: Session) -> None:
    lineno = dedent(FAULTS).splitlines().index("def test_dies(world):")  # the mark's line
    assert [line for line in faults.annotations() if "title=test_dies" in line] == [
        f"::error file={faults.path.name}/test_faults.py,line={lineno},title=test_dies"
        "::rank 1: died: SIGKILL%0Are-run: pytest test_faults.py::test_dies -o junit_logging=all "
        "-p no:cacheprovider"
    ]


def test_every_failure_is_annotated_once_and_without_ranks_too(faults: Session) -> None:
    titles = [re.findall("title=(.*?)::", line)[0] for line in faults.annotations()]
    assert titles == [
        *("test_fails", "test_fails_elsewhere", "test_dies", "test_cases [n=2]"),
        *("test_fails_twice", "test_fails_twice", "test_says_too_much", "test_says_too_much_in_lines"),
        "test_without_ranks",
    ]
    [line] = [line for line in faults.annotations() if "title=test_without_ranks" in line]
    assert line.split("::")[-1].startswith("AssertionError: not as expected")


def test_an_annotation_stands_at_the_innermost_line_of_the_checkout(faults: Session) -> None:
    [line] = [line for line in faults.annotations() if "title=test_fails_elsewhere" in line]
    lineno = next(n for n, text in enumerate(dedent(CHECKS).splitlines(), 1) if "assert" in text)
    assert line.startswith(f"::error file={faults.path.name}/checks.py,line={lineno},")


def test_an_annotation_is_escaped_as_github_reads_it(faults: Session) -> None:
    [line] = [line for line in faults.annotations() if "title=test_fails::" in line]
    assert "::rank 1: AssertionError: 100%25, at 1:2%0A" in line


def test_a_long_message_does_not_flood_the_annotation(faults: Session) -> None:
    assert max(map(len, faults.annotations())) < 12_000


def test_a_failure_outside_of_a_known_checkout_is_annotated_from_the_root(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    pytester.makepyfile(test_it="def test_x(): assert 0")
    result = pytester.runpytest_subprocess(timeout=60)
    annotations = [line for line in result.outlines if line.startswith("::error")]
    assert annotations == ["::error file=test_it.py,line=1,title=test_x::assert 0"]


@pytest.mark.parametrize(
    ("environ", "plugin", "annotates"),
    [
        ("true", "none", True),
        ("false", "none", False),
        ("true", "pytest_github_actions_annotate_failures", False),
    ],
)
def test_annotations_are_written_in_github_actions_and_by_one_plugin(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, environ: str, plugin: str, annotates: bool
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", environ)
    pytester.makepyfile(none="", pytest_github_actions_annotate_failures="")
    pytester.syspathinsert()
    config = pytester.parseconfigure("-p", plugin)
    assert config.pluginmanager.hasplugin(plugin)
    assert config.pluginmanager.hasplugin("harness-annotations") == annotates


# Other readers


def test_merged_reports_can_be_written_as_json_and_read_again(faults: Session) -> None:
    told = [json.loads(line) for line in (faults.path / "reports.txt").read_text().splitlines()]
    assert len(told) == 10 * 3 + 2  # two cases
    assert [each for each in told if each[3] is not True] == []
