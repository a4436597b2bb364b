"""`schedules`: what it draws, what it shrinks to on ranks, and that faults end with their example."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, find, settings

from lockstep import Fault, schedules
from suites.selftest.project import PROJECTS, Run, line_of

PROJECT = "schedules"
OPTIONS = ("test_schedules.py",)
INI = ""
ENVIRON = {"PYTEST_PLUGINS": "lockstep.plugin,_hypothesis_pytestplugin"}
FILE = PROJECTS / "schedules" / "test_schedules.py"
# No clock: a busy machine may take long for a draw.
QUICK = settings(database=None, derandomize=True, deadline=None, phases=[Phase.generate, Phase.shrink])


def test_a_bug_of_order_shrinks_to_one_delay(run: Run) -> None:
    text = run.failure("test_saved_counts")
    assert 'schedule=(faults.delay(rank=1, before="any", nth=4, seconds=0.002),),' in text
    place = f"test_schedules.py:{line_of('self.counts[place] +=', FILE) - 1}"
    struck = f"rank 1 waits 2 ms before all_reduce #4 (float32[1], 2 ranks) at {place}"
    assert [line for line in text.splitlines() if "injected by" in line] == [
        f"injected by the test: {struck}"
    ]


def test_a_fault_ends_with_its_example(run: Run) -> None:
    assert run.outcome("test_no_leak") == "passed", run.output
    assert run.outcome("test_after_it") == "passed", run.output


def test_a_fault_that_never_struck_fails_its_example(run: Run) -> None:
    text = run.failure("test_never")
    assert 'faults.fail(before="barrier", nth=1) never struck: no collective has matched' in text
    assert "number=5," in text
    assert "injected by the test" not in text  # those that have struck are of other examples


@pytest.mark.parametrize(
    ("kind", "call", "line"),
    [
        ("fail", 'fail(rank=0, before="any", nth=1)', "raises InjectedFault before"),
        ("corrupt", 'corrupt(rank=0, op="any", nth=1)', "gets a flipped bit from"),
        ("drop", 'drop(rank=0, op="any", nth=1)', "leaves out"),
    ],
)
def test_other_kinds_shrink_to_one_fault(run: Run, kind: str, call: str, line: str) -> None:
    text = run.failure(f"test_sums[{kind}]")
    assert f"Draw 1: (faults.{call},)" in text
    place = f"test_schedules.py:{line_of('dist.all_reduce(value)', FILE)}"
    assert f"injected by the test: rank 0 {line} all_reduce #1 (float32[1], 2 ranks) at {place}" in text


def test_a_death_that_is_expected_ends_the_search(run: Run) -> None:
    text = run.failure("test_death")
    assert "rank 1 died, as the test expects, and the next example needs all ranks" in text


def test_a_schedule_has_faults_in_places_of_their_own() -> None:
    def is_full(schedule: tuple[Fault, ...]) -> bool:
        places = {(fault.rank, fault.nth) for fault in schedule}
        assert places <= {(rank, nth) for rank in (0, 1) for nth in (1, 2)}
        assert len(places) == len(schedule)
        return len(schedule) == 4

    smallest = find(schedules(2, 2), is_full, settings=QUICK)
    assert {fault.seconds for fault in smallest} == {0.002}


KINDS: dict[Any, str] = {
    "delay": '(faults.delay(rank=0, before="any", nth=1, seconds=0.005),)',
    "fail": '(faults.fail(rank=0, before="any", nth=1),)',
    "corrupt": '(faults.corrupt(rank=0, op="any", nth=1),)',
    "drop": '(faults.drop(rank=0, op="any", nth=1),)',
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_has_the_kinds_that_are_asked_for(kind: Any) -> None:
    strategy = schedules(3, 9, kinds=[kind], milliseconds=[5])
    assert repr(find(strategy, bool, settings=QUICK)) == KINDS[kind]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"ranks": 0, "collectives": 3}, "ranks and collectives are 1 or more"),
    "kinds": (
        {"ranks": 2, "collectives": 3, "kinds": ["fail", "sleep"]},
        r"kinds=\['fail', 'sleep'\]\): the kinds of faults are delay, fail, corrupt, drop$",
    ),
    "none": (
        {"ranks": 2, "collectives": 3, "kinds": []},
        r"kinds=\[\]\): the kinds of faults are delay, fail",
    ),
    "deadly": (
        {"ranks": 2, "collectives": 3, "kinds": ["delay", "kill"]},
        r"an example has to leave all ranks to the next one.*faults.kill\(rank=1, before=.any., nth=nth\)$",
    ),
    "text": ({"ranks": "2", "collectives": 3}, r"schedules\('2', 3\): ranks and collectives are 1 or more"),
    "kind": ({"ranks": 2, "collectives": 3, "kinds": "delay"}, "kinds='delay', .*: each is a list"),
    "number": ({"ranks": 2, "collectives": 3, "milliseconds": 5}, "milliseconds=5.: each is a list"),
    "time": ({"ranks": 2, "collectives": 3, "milliseconds": [0, 5]}, "one or more numbers above 0"),
    "nan": ({"ranks": 2, "collectives": 3, "milliseconds": [float("nan")]}, r"nan\]\): one or more numbers"),
    "overflow": ({"ranks": 10**5000, "collectives": 3}, r"<int .*, 3\): ranks and collectives are 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_strategy_of_no_schedules_is_refused(name: str) -> None:
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        schedules(**arguments)
