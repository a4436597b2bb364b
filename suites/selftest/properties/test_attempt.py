"""An attempt at one example on one rank: its draws, its outcome and its vote."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from hypothesis.database import choices_from_bytes
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData, DataObserver, Status

from lockstep.features.properties.attempt import Attempt
from lockstep.features.properties.crashed import CrashGuard
from lockstep.features.properties.messages import (
    Drawn,
    ExampleResult,
    RunningExampleFile,
    read_running_example,
)
from suites.selftest.properties import stand_ins
from suites.selftest.properties.stand_ins import begin_attempt, raising


class Box:
    """Something that can be referred to weakly."""


def test_an_attempt_keeps_drawn_numbers_and_no_drawn_objects(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    data = ConjectureData.for_choices([1, 4])
    boxes = st.sampled_from([Box(), Box()])
    attempt = Attempt(data, running, CrashGuard(running))
    attempt.run(lambda data, _: (data.draw(boxes), data.draw(st.integers(0, 9))), print)
    data.freeze()
    values = [span.recorded_value for span in data.spans]
    assert attempt.error is None
    assert 4 in values
    assert not any(isinstance(value, Box) for value in values)


def test_the_draws_of_the_slowest_rank_and_the_best_targets_count(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    attempt = Attempt(ConjectureData.for_choices([1]), running, CrashGuard(running))
    results = [
        ExampleResult(b"", 1, {"a": 0.5, "b": 0.2}, {"loss": 1.0}),
        ExampleResult(b"", 1, {"a": 0.1, "b": 0.9}, {"loss": 2.0, "norm": 3.0}),
        ExampleResult(b"", 1, {"a": 0.6}, {}),
    ]
    attempt.share(results)
    assert attempt.data.draw_times == {"a": 0.1, "b": 0.9}
    assert attempt.data.target_observations == {"loss": 2.0, "norm": 3.0}


@pytest.mark.parametrize(
    ("run", "outcome", "reason"),
    [
        (lambda data, _: data.draw_integer(0, 9), "passed", ""),
        (lambda data, _: [data.draw_integer(0, 9) for _ in range(3)], "gave up on", "too much data drawn"),
        (lambda data, _: data.mark_invalid(), "rejected", ""),
        (raising(UnsatisfiedAssumption()), "rejected", ""),
        (raising(UnsatisfiedAssumption("odd")), "rejected", "odd"),
        (raising(pytest.skip.Exception("no GPU")), "skipped", "no GPU"),
        (raising(unittest.SkipTest("no file")), "skipped", "no file"),
    ],
)
def test_an_example_that_does_not_fail_ends_with_its_reason(
    tmp_path: Path, run: Callable[[ConjectureData, object], object], outcome: str, reason: str
) -> None:
    attempt = begin_attempt(tmp_path, 4)
    attempt.run(run, print)
    vote = attempt.vote("example 1", 1.5)
    result = ExampleResult.unpack(vote.more)
    assert (vote.case, vote.outcome, vote.reason, vote.renews_deadline) == (
        "example 1",
        outcome,
        reason,
        True,
    )
    assert (result.seconds, result.origin, result.lost_connection) == (1.5, None, False)
    assert attempt.result == (4 if outcome == "passed" else None)


@pytest.mark.parametrize(
    ("words", "lost"), [("no such value", False), ("[gloo] Connection closed by peer", True)]
)
def test_a_failing_example_is_identified_and_a_lost_connection_is_known(
    tmp_path: Path, words: str, lost: bool
) -> None:
    attempt = begin_attempt(tmp_path)
    attempt.run(raising(RuntimeError(words)), print)
    vote = attempt.vote("example 1", 0.0)
    result = ExampleResult.unpack(vote.more)
    assert (vote.outcome, vote.reason, result.lost_connection) == ("failed", "", lost)
    assert result.origin is not None
    assert (result.origin.exception, result.origin.filename) == ("RuntimeError", stand_ins.__file__)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.exit.Exception("enough")])
def test_an_example_that_ends_the_run_does_so_at_once(tmp_path: Path, error: BaseException) -> None:
    attempt = begin_attempt(tmp_path)
    with pytest.raises(type(error)):
        attempt.run(raising(error), print)
    assert attempt.error is None


def test_the_engine_sees_draws_and_their_end_only_when_they_are_handed_over(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    attempt = begin_attempt(tmp_path, 4, True, 0.5, engine=engine)

    def run(data: ConjectureData, _: object) -> None:
        data.draw_integer(0, 9)
        data.draw_boolean(forced=True)
        data.observer.kill_branch()
        data.draw_float(0.0, 1.0)

    attempt.run(run, print)
    attempt.data.freeze()
    assert engine.mock_calls == []
    read = read_running_example(str(tmp_path / "running"))
    assert read is not None
    assert choices_from_bytes(read.choices) == (4, True, 0.5)
    attempt.recorder.hand_over()
    names = ["draw_integer", "draw_boolean", "kill_branch", "draw_float", "conclude_test"]
    assert [name for name, _, _ in engine.mock_calls] == names
    integer, boolean, _, real, end = engine.mock_calls
    assert (integer.args, integer.kwargs["was_forced"], integer.kwargs["constraints"]["max_value"]) == (
        (4,),
        False,
        9,
    )
    assert (boolean.args, boolean.kwargs["was_forced"], real.args) == ((True,), True, (0.5,))
    assert end.args == (Status.VALID, None)
    assert attempt.data.observer is engine


def test_an_example_that_has_no_end_yet_is_handed_over_without_one(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    attempt = begin_attempt(tmp_path, 4, engine=engine)
    attempt.data.draw_integer(0, 9)
    attempt.recorder.hand_over()
    assert [name for name, _, _ in engine.mock_calls] == ["draw_integer"]


def test_draws_in_words_have_their_bounds_and_their_argument(tmp_path: Path) -> None:
    attempt = begin_attempt(tmp_path, 4, 0.5, 7, b"x" * 100)
    data = attempt.data
    data.draw(st.integers(0, 9), observe_as="generate:x")
    data.draw(st.floats(0, 1), observe_as="generate:y")
    data.observer.kill_branch()
    data.draw_integer(0, None)
    data.draw_bytes()
    found = attempt.recorder.describe()
    assert found[:3] == [
        Drawn("4 (integer of 0 to 9)", "x"),
        Drawn("0.5 (float)", "y"),
        Drawn("7 (integer)", ""),
    ]
    assert len(found) == 4
    assert len(found[3].value) < 100


def test_draws_are_the_same_if_values_bounds_and_structure_are(tmp_path: Path) -> None:
    def digest(draw: Callable[[ConjectureData], object]) -> bytes:
        attempt = begin_attempt(tmp_path, 4, 5)
        draw(attempt.data)
        return attempt.recorder.digest()

    def draw_in_span(data: ConjectureData) -> None:
        data.start_span(1)
        data.draw_integer(0, 9)
        data.stop_span()

    draws: list[Callable[[ConjectureData], object]] = [
        lambda data: data.draw_integer(0, 9),
        lambda data: data.draw_integer(0, 8),
        lambda data: data.draw_integer(0, None),
        lambda data: [data.draw_integer(0, 9), data.draw_integer(0, 9)],
        draw_in_span,
    ]
    found = [digest(draw) for draw in draws]
    assert found == [digest(draw) for draw in draws]
    assert len(set(found)) == len(draws)
    assert {len(each) for each in found} == {16}


def test_an_example_takes_over_the_draws_of_another_up_to_where_it_stopped(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    of_other, mine = begin_attempt(tmp_path, 4), begin_attempt(tmp_path, 4, 5, engine=engine)
    of_other.data.draw_integer(0, 9)
    for _ in range(2):
        mine.data.draw_integer(0, 9)
    mine.data.freeze()
    mine.take_over(of_other.keep())
    assert (mine.recorder.events, mine.data.choices) == (of_other.recorder.events, (4,))
    assert mine.recorder.digest() == of_other.recorder.digest()
    mine.recorder.hand_over()
    assert [name for name, _, _ in engine.mock_calls] == ["draw_integer"]


def test_an_example_that_marks_itself_invalid_is_rejected_with_its_reason(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    attempt = Attempt(ConjectureData.for_choices([]), running, CrashGuard(running))
    attempt.run(lambda data, _: data.mark_invalid("no such number"), print)
    vote = attempt.vote("example 1", 0.0)
    assert (vote.outcome, vote.reason) == ("rejected", "no such number")
