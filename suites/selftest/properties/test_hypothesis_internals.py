"""The changes of Hypothesis that keep ranks in step."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import core, stateful
from hypothesis.errors import DeadlineExceeded
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import engine, providers
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.escalation import InterestingOrigin
from hypothesis.strategies._internal.core import DataObject

from lockstep.exceptions import PeerFailed
from lockstep.features.properties.hypothesis_internals import (
    call_after_draws,
    call_before_rules,
    constants_by_kind,
    constants_from,
    count_spans,
    exclude_from_explanations,
    explicit_seed,
    generated_seed,
    hold_constants,
    origin_of,
    release_constants,
    replace_engine_clock,
    replace_execution,
    respect_set_origins,
    restore_structure,
    set_origin,
    stop_shrinking,
    structure_of,
)
from lockstep.features.properties.messages import Origin
from suites.selftest.properties.stand_ins import ORIGIN


def test_each_rule_is_checked_once_however_many_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine(stateful.RuleBasedStateMachine):
        @stateful.initialize()
        def begin(self) -> None:
            called.append("begin")

        @stateful.rule()
        def step(self) -> None:
            called.append("step")

    called: list[str] = []
    monkeypatch.setattr(
        stateful.RuleBasedStateMachine, "setup_state", stateful.RuleBasedStateMachine.setup_state
    )
    call_before_rules(lambda: called.append("check"))
    for _ in range(3):
        state = Machine.setup_state()
    for rule in (*state.initializers, *state.rules):
        rule.function(Machine)
    assert called == ["check", "begin", "check", "step"]


def test_a_structure_that_was_sent_is_that_of_the_example_it_came_from() -> None:
    data, other = (ConjectureData.for_choices(choices) for choices in ([4, True], [5]))
    data.draw_integer(0, 9)
    data.start_span(1)
    data.draw_boolean(0.5, forced=True)
    data.stop_span()
    other.draw_integer(0, 9)
    restore_structure(other, pickle.loads(pickle.dumps(structure_of(data))))
    assert (other.choices, other.length, count_spans(other)) == ((4, True), data.length, count_spans(data))
    data.freeze()
    other.freeze()
    assert other.as_result().choices == (4, True)
    assert len(other.spans) == len(data.spans)


def test_the_state_of_a_generator_goes_with_a_structure() -> None:
    random_of = [random.Random(seed) for seed in (1, 2)]
    first, second = (
        ConjectureData(prefix=(), random=each, max_choices=9, provider=providers.HypothesisProvider)
        for each in random_of
    )
    restore_structure(second, structure_of(first))
    assert random_of[1].getstate() == random_of[0].getstate()
    without = ConjectureData.for_choices([])
    assert structure_of(without)[1] is None
    restore_structure(second, structure_of(without))
    restore_structure(without, structure_of(first))


def test_a_failure_keeps_the_origin_that_ranks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterestingOrigin, "from_exception", InterestingOrigin.from_exception)
    respect_set_origins()
    errors = [ValueError("here"), PeerFailed("there"), PeerFailed("elsewhere")]
    own = origin_of(errors[0])
    for error in errors[1:]:
        set_origin(error, ORIGIN)
    found = [InterestingOrigin.from_exception(error) for error in errors]
    assert found[1] == found[2] != found[0]
    assert own.exception == "ValueError"
    assert origin_of(errors[1]) == Origin(
        f"ValueError at elsewhere.py:{ORIGIN.lineno}", "PeerFailed", "elsewhere.py", ORIGIN.lineno
    )


def test_a_deadline_stays_one_on_all_ranks() -> None:
    error = PeerFailed("there")
    set_origin(error, replace(ORIGIN, exception="DeadlineExceeded"))
    assert vars(error)["_lockstep_origin"].exc_type is DeadlineExceeded


def test_constants_are_held_until_they_are_released() -> None:
    constants = providers.Constants(integers=[1, 2], floats=[0.5], bytes=[b"x"], strings=["s"])
    by_kind = constants_by_kind(constants)
    assert by_kind == {"integers": [1, 2], "floats": [0.5], "bytes": [b"x"], "strings": ["s"]}
    assert constants_by_kind(constants_from(constants, by_kind)) == by_kind
    before = providers._get_local_constants
    hold_constants(constants)
    try:
        assert providers._get_local_constants() is constants
    finally:
        release_constants()
    assert providers._get_local_constants is before


def test_folders_are_left_out_of_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrutineer, "should_trace_file", lambda filename: filename.endswith(".py"))
    exclude_from_explanations("/of/us", "/of/them")
    names = ["/of/us/a.py", "/of/them/a.py", "/a.py", "/a.so"]
    assert [scrutineer.should_trace_file(name) for name in names] == [False, False, True, False]


def test_classes_clock_and_seeds_of_hypothesis_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (core, "StateForActualGivenExecution"),
        (core, "ConjectureRunner"),
        (engine, "time"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    execution, runner, clock = (type(name, (), {}) for name in ("Execution", "Runner", "Clock"))
    replace_execution(execution, runner)
    replace_engine_clock(clock)
    assert (core.StateForActualGivenExecution, core.ConjectureRunner) == (execution, runner)
    assert engine.time is clock
    test = SimpleNamespace(_hypothesis_internal_use_seed=3, _hypothesis_internal_use_generated_seed=4)
    assert (explicit_seed(test), generated_seed(test)) == (3, 4)
    ended = Mock()
    stop_shrinking(ended)
    ended.exit_with.assert_called_once_with(engine.ExitReason.very_slow_shrinking)


def test_a_draw_of_a_body_is_followed_by_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataObject, "draw", lambda data, strategy, label=None: (data, strategy, label))
    checks: list[int] = []
    call_after_draws(lambda: checks.append(1))
    given: Any = "data"
    assert DataObject.draw(given, "strategy", label="x") == ("data", "strategy", "x")  # type: ignore[arg-type]
    assert checks == [1]
