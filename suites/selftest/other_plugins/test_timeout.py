"""pytest-timeout: its limit is the deadline of the world, in tests on ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.project import Project

pytest.importorskip("pytest_timeout", reason="needs the extra `test`")
PLUGIN = ("-p", "pytest_timeout")


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    shared_project.copy("timeout")
    return shared_project.run(*PLUGIN, "--timeout=0.7")


def section(output: str, name: str) -> str:
    return output.split(f"_ {name} _")[1].split("\n____")[0]


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("test_option", 0.7), ("test_mark", 0.5), ("test_both", 0.4), ("test_of_the_function", 0.5)],
)
def test_the_nearest_limit_is_the_deadline_of_the_world(output: str, name: str, seconds: float) -> None:
    shown = section(output, name).splitlines()
    assert shown[1].startswith("rank 0 waits in barrier #1, which rank 1 never reached: it is at test_limits")
    assert shown[2].startswith(f"rank 1 of 2 timed out after {seconds} s, in test_limits.py:")
    assert "pytest-timeout" not in "\n".join(shown)


def test_starting_ranks_counts_for_no_test(output: str) -> None:
    assert "_ test_first _" not in output
    assert "5 failed, 2 passed" in output


def test_a_mark_of_zero_is_no_limit(output: str) -> None:
    assert "_ test_without_a_limit _" not in output


def test_a_plain_test_keeps_the_plugin_s_limit(output: str) -> None:
    assert "Failed: Timeout (>0.5s) from pytest-timeout." in section(output, "test_plain")


@pytest.mark.parametrize(
    ("options", "ini", "seconds"),
    [
        (["--timeout=60", "--world-timeout=0.5"], "", "0.5"),
        ([], "timeout = 0.6", "0.6"),
        (["--timeout=0"], "", ""),
    ],
)
def test_options_of_both(project: Project, options: list[str], ini: str, seconds: str) -> None:
    project.copy("timeout", ini)
    name = "test_option" if seconds else "test_first"
    output = project.run(*PLUGIN, *options, f"test_limits.py::{name}")
    assert f"rank 1 of 2 timed out after {seconds} s" in output if seconds else "1 passed" in output


def test_a_limit_of_the_session_stops_it(project: Project) -> None:
    project.write("def test_a(world): pass\n\ndef test_b(world): pass\n")
    output = project.run(*PLUGIN, "--session-timeout=0.001")
    assert "session-timeout: 0.001 sec exceeded" in output
    assert "1 passed" in output
    project.assert_nothing_is_left()
