"""Installed plugins beside tests on ranks: verdicts are as without them, and each plugin does its part.

Plugins that do not meet share a session.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from suites.selftest.project import Run, copy_project, run_pytest

IN_A_RANK = r"(?s)rank 1 of 2 failed.{,500}"
# By session: the options of each plugin, and what it alone writes, to the output or to its files.
REPORTERS = {
    "pytest-html": ("-p metadata -p html -p html_fixtures --html=it.html", IN_A_RANK, "it.html"),
    "pytest-json-report": ("-p pytest_jsonreport --json-report", "rank 1 of 2 exited", ".report.json"),
    "pytest-reportlog": ("-p pytest_reportlog --report-log=it.jsonl", "rank 1 of 2 exited", "it.jsonl"),
    "allure-pytest": (
        "-p allure_pytest --alluredir=allure",
        "on each rank",
        "allure/*-result.json",
    ),
    "teamcity-messages": ("-p pytest-teamcity --teamcity", r"##teamcity\[testFailed .*test_fails_on_one"),
    "pytest-metadata": ("--metadata key value", "key&#34;: &#34;value", "it.html"),
    "pytest-instafail": (
        "-p instafail --instafail",
        r"(?s)\A(?:(?!= FAILURES =|short test summary).)*rank 1 of 2 failed",
    ),
    "pytest-icdiff": ("-p icdiff", IN_A_RANK + "assert equals failed"),
    "pytest-randomly": ("-p randomly", "Using --randomly-seed="),
}
FIRST_LOOK = {
    "pytest-sugar": ("-p sugar --force-sugar", r"(?m)^Results \("),
    "pytest-random-order": ("-p random_order --random-order", "Using --random-order-bucket"),
    "pytest-split": ("-p pytest-split --splits=1 --group=1", r"\[pytest-split\] Running group 1/1"),
}
SECOND_LOOK = {
    "pytest-rich": ("-p as_terminal -p rich --rich", "Total Tests"),
    "pytest-testmon": ("-p pytest-testmon --testmon", r"test_ranks\.py", ".testmondata*"),
}
THIRD_LOOK = {
    "pytest-pretty": ("-p pretty", "Summary of Failures"),
    "pytest-flakefinder": ("-p flakefinder --flake-finder --flake-runs=2", "20 passed"),
    "pytest-clarity": ("-p clarity -vv", IN_A_RANK + "pytest-clarity diff shown"),
}
SESSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "reporters": REPORTERS,
    "sugar": FIRST_LOOK,
    "rich": SECOND_LOOK,
    "pretty": THIRD_LOOK,
    "none": {},
}
OF_REPORTS = [(session, plugin) for session, plugins in SESSIONS.items() for plugin in plugins]

WITH_FIXTURES = (
    "pytest_mock asyncio anyio pytest_repeat pytest_order socket freezer pytest_lazyfixture dependency env "
    "check subtests pytest-bdd"
)
ON_RANKS = ("fails_on_one", "fails_on_all", "fails_in_set_up", "cases", "dies")
FAILED = {"test_fails", *(f"test_{what}" for what in ON_RANKS)}


@pytest.fixture(scope="module")
def run_session(
    tmp_path_factory: pytest.TempPathFactory, plugin_path: dict[str, str]
) -> Callable[[str], Run]:
    """Return a function that runs a session once and returns it."""

    @cache
    def run_once(name: str) -> Run:
        path = tmp_path_factory.mktemp(name)
        if name == "fixtures":
            copy_project("beside_fixtures", path)
            options = [part for module in WITH_FIXTURES.split() for part in ("-p", module)]
        else:
            copy_project("beside_plugins", path)
            (path / "pytest.ini").write_text("[pytest]\n")
            options = [part for text, *_ in SESSIONS[name].values() for part in text.split()]
        return run_pytest(path, "-p", "lockstep", *options, **plugin_path)

    return run_once


@pytest.mark.parametrize(("session", "plugin"), OF_REPORTS, ids=[plugin for _, plugin in OF_REPORTS])
def test_verdicts_are_the_same_beside(run_session: Callable[[str], Run], session: str, plugin: str) -> None:
    done = run_session(session)
    assert (done.path / "report.xml").exists(), done.output
    assert "INTERNALERROR" not in done.output, done.output
    failed = {
        name.partition("[")[0]
        for name, cases in done.cases.items()
        if any(case.find("failure") is not None for case in cases)
    }
    assert failed == FAILED, done.output
    assert does_its_part(done, session, plugin), done.output
    assert not does_its_part(run_session("none"), session, plugin)


def does_its_part(done: Run, session: str, plugin: str) -> bool:
    """Return whether what the plugin alone writes is in the output, or in one of its files."""
    _, written, *files = SESSIONS[session][plugin]
    texts = [path.read_text(errors="replace") for name in files for path in done.path.glob(name)]
    return any(re.search(written, text) for text in (texts if files else [done.output]))


OF_FIXTURES = {
    "pytest-mock": ["test_mock"],
    "pytest-asyncio": ["test_asyncio"],
    "anyio": ["test_anyio"],
    "pytest-repeat": ["test_repeat[1-2]", "test_repeat[2-2]"],
    "pytest-order": ["test_order_first", "test_order_second"],
    "pytest-socket": ["test_socket"],
    "pytest-freezer": ["test_freezer"],
    "pytest-lazy-fixtures": ["test_lazy_fixtures[one]"],
    "pytest-env": ["test_env"],
    "pytest-subtests": ["test_subtests"],
    "pytest-bdd": ["test_bdd", "test_last"],
}


@pytest.mark.parametrize(("plugin", "names"), list(OF_FIXTURES.items()), ids=list(OF_FIXTURES))
def test_fixtures_and_marks_work_on_ranks(
    run_session: Callable[[str], Run], plugin: str, names: list[str]
) -> None:
    done = run_session("fixtures")
    assert {name: done.outcome(name) for name in names} == dict.fromkeys(names, "passed"), done.output


def test_a_dependency_that_fails_on_one_rank_skips(run_session: Callable[[str], Run]) -> None:
    done = run_session("fixtures")
    assert done.outcome("test_dependency_fails") == "failure"
    assert done.outcome("test_dependency_skips").startswith("skipped: "), done.output


def test_a_check_that_fails_on_one_rank_fails(run_session: Callable[[str], Run]) -> None:
    done = run_session("fixtures")
    assert done.outcome("test_check") == "failure", done.output
    assert "rank 1 of 2 failed" in done.output


def test_the_page_of_plugins_has_the_versions_that_are_tested() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/plugins.md").read_text()
    pins = (Path(__file__).parent / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", pins, re.MULTILINE))
    rows = dict(re.findall(r"^\| ([\w-]+) ([\d.]+) \|", page, re.MULTILINE))
    both = rows.keys() & pinned.keys()
    assert {plugin: rows[plugin] for plugin in both} == {plugin: pinned[plugin] for plugin in both}
    assert {*(plugin for _, plugin in OF_REPORTS), *OF_FIXTURES} <= both
    of_other_sessions = {"pytest-benchmark", "pytest-regressions", "inline-snapshot", "syrupy"}
    assert of_other_sessions | {"pytest-check", "pytest-dependency"} <= both
