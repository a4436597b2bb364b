"""The second try of a test runs the session of its module again."""

from __future__ import annotations

from pathlib import Path

from suites.selftest.project import run_pytest

SAMPLE = """
import pytest
tries = []

@pytest.fixture(scope="module")
def environment():
    tries.append("environment")
    yield
    tries.append("left")

@pytest.fixture(scope="module")
def session(environment):
    tries.append("session")
    return len(tries)

def test_first(session):
    assert session == 2

def test_fails_once(session):
    assert session == 5, tries

def test_last(session):
    assert tries == ["environment", "session", "left", "environment", "session"]
"""


def test_fixtures_of_the_module_are_made_again(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    plugin = ("-p", "suites.selftest.second_tries", "--reruns", "1")
    run = run_pytest(tmp_path, *plugin, PYTHONPATH=str(Path(__file__).parents[2]))
    assert run.count() == "3 passed, 1 rerun", run.output
