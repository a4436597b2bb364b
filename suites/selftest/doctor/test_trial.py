"""A trial that runs no test is one finding, which says what pytest has printed."""

from __future__ import annotations

import pytest

from lockstep.doctor import trial
from lockstep.doctor.configuration import Configuration

PROJECT = Configuration(None, {})


def test_a_trial_that_does_not_end_is_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "WITHIN", 0.01)
    with trial.Trial(PROJECT, None) as run:
        (found,) = run.findings()
        assert (found.level, found.what) == ("problem", "pytest has not ended within 0.01 s")
        path = run.path
    assert not path.exists()


def test_the_end_of_the_output_of_a_trial_without_tests_is_shown() -> None:
    with trial.Trial(PROJECT, "no_such_plugin") as run:
        (found,) = run.findings()
    first, *output = found.what.splitlines()
    assert (found.level, first) == ("problem", "pytest has run no test: exit status 4")
    assert len(output) <= 8
    assert "no_such_plugin" in output[-1]
