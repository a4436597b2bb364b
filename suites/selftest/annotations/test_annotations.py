"""Annotations of failures in GitHub Actions."""

from __future__ import annotations

import re

import pytest

from suites.selftest.project import WITHOUT_PLUGINS, Run, copy_project, line_of, run_pytest


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("ci", tmp_path_factory.mktemp("faults"))
    options = ("-p", "no:cacheprovider", "-k", "not 100_megabytes")
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(path.parent)}
    return run_pytest(path, *options, **WITHOUT_PLUGINS, **environ)


def annotations(session: Run) -> list[str]:
    return [line for line in session.lines if line.startswith("::")]


def test_a_failure_is_annotated_with_rank_cause_and_command(faults: Run) -> None:
    lineno = line_of("def test_dies(", faults.path / "test_faults.py") - 1  # the mark's line
    assert [line for line in annotations(faults) if "title=test_dies" in line] == [
        f"::error file={faults.path.name}/test_faults.py,line={lineno},title=test_dies"
        "::rank 1: died: SIGKILL%0Are-run: pytest test_faults.py::test_dies -p no:cacheprovider"
    ]


def test_every_failure_is_annotated_once(faults: Run) -> None:
    titles = [re.findall("title=(.*?)::", line)[0] for line in annotations(faults)]
    assert titles == [
        *("test_fails", "test_fails_elsewhere", "test_dies", "test_cases [n=2]"),
        *("test_fails_twice", "test_fails_twice", "test_says_too_much", "test_says_too_much_in_lines"),
        "test_without_ranks",
    ]
    [line] = [line for line in annotations(faults) if "title=test_without_ranks" in line]
    assert line.split("::")[-1].startswith("AssertionError: not as expected")


def test_an_annotation_is_at_the_innermost_line_of_the_checkout(faults: Run) -> None:
    [line] = [line for line in annotations(faults) if "title=test_fails_elsewhere" in line]
    lineno = line_of("assert", faults.path / "checks.py")
    assert line.startswith(f"::error file={faults.path.name}/checks.py,line={lineno},")


def test_an_annotation_is_escaped_as_github_reads_it(faults: Run) -> None:
    [line] = [line for line in annotations(faults) if "title=test_fails::" in line]
    assert "::rank 1: AssertionError: 100%25, at 1:2%0A" in line


def test_a_long_message_does_not_flood_the_annotation(faults: Run) -> None:
    assert max(map(len, annotations(faults))) < 12_000
    [line] = [line for line in annotations(faults) if "title=test_says_too_much::" in line]
    message, _ = line.split("::", 2)[2].split("%0Are-run: ")
    assert len(message.replace("%0A", "\n")) == 4000


def test_without_a_checkout_annotations_start_at_the_root(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    pytester.makepyfile(test_it="def test_x(): assert 0")
    result = pytester.runpytest_subprocess(timeout=180)
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
def test_annotations_are_written_in_github_actions_by_one_plugin(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, environ: str, plugin: str, annotates: bool
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", environ)
    pytester.makepyfile(none="", pytest_github_actions_annotate_failures="")
    pytester.syspathinsert()
    config = pytester.parseconfigure("-p", plugin)
    assert config.pluginmanager.hasplugin(plugin)
    assert config.pluginmanager.hasplugin("harness-annotations") == annotates
