"""run_subtests: cases that all ranks run, pass and fail together."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_CASE, Vote
from lockstep.subtests import (
    RunSubtests,
    _disagreement,
    describe_case,
    describe_value,
    only_cases,
    parse_selection,
)
from suites.selftest.project import copy_project


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Options:
    dtype: torch.dtype | None = None
    offload: bool = False
    level: int = 0


class AloneInTheWorld:
    """The rank that subtests need, alone: it always agrees with itself."""

    def __init__(self) -> None:
        self.votes: list[Vote] = []
        self.seeded = 0

    def agree(self, vote: Vote) -> tuple[Vote, ...]:
        self.votes.append(vote)
        return (vote,)

    def begin_case(self, name: str, count: str = "") -> None:
        self.seeded += 1

    def end_case(self) -> None: ...
    def abort(self) -> None: ...
    def repair(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("", "''"),
        (print, "print"),
        (functools.partial(print), "partial"),
        (Options, "Options"),
        (" a,  b ", "_a_b_"),
        ("<object object at 0x7f2198e54b70>", "<object_object>"),
        (torch.float16, "float16"),
        (None, "None"),
        (True, "True"),
        (Colour.RED, "RED"),
        (torch.nn.Linear, "Linear"),
        ((1, 2), "(1_2)"),
        ("two words", "two_words"),
        (Options(), "Options()"),
        (Options(dtype=torch.float16, level=2), "Options(dtype=float16;level=2)"),
    ],
)
def test_a_value_is_named_in_one_word(value: object, word: str) -> None:
    assert describe_value(value) == word


def test_a_case_is_named_by_its_settings() -> None:
    assert describe_case({"dtype": torch.bfloat16, "offload": False}) == "dtype=bfloat16, offload=False"


def test_a_selection_reads_the_name_of_a_case() -> None:
    assert parse_selection([" a = 1 ,,", ""]) == {"a": "1"}
    assert parse_selection(["dtype=bfloat16, offload=False", "a=1"]) == {
        "dtype": "bfloat16",
        "offload": "False",
        "a": "1",
    }


@pytest.mark.parametrize("text", ["offload", "=1", "offload=", "a=1,a=2"])
def test_an_invalid_selection_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--subtest"):
        parse_selection([text])


def test_the_product_runs_with_the_last_setting_fastest(subtests: pytest.Subtests) -> None:
    rank, seen = AloneInTheWorld(), []
    run = RunSubtests(rank, subtests, {})
    run({"a": [1, 2], "b": ["x", "y"]}, lambda *args, **kwargs: seen.append((args, kwargs)), 0, c=3)
    cases = [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert seen == [((0,), {"a": a, "b": b, "c": 3}) for a, b in cases]
    assert [vote.case for vote in rank.votes] == [f"a={a}, b={b}" for a, b in cases]
    assert rank.seeded == 4


def test_a_selection_runs_only_the_cases_it_names(subtests: pytest.Subtests) -> None:
    seen: list[int] = []
    run = RunSubtests(AloneInTheWorld(), subtests, {"a": "2"})
    run({"a": [1, 2], "b": [0, 1]}, lambda a, b: seen.append(a * 10 + b))
    assert seen == [20, 21]
    run({"a": [1]}, seen.append)
    run.skip_if_nothing_ran()  # does not: another call of the same test has run something
    alone = RunSubtests(AloneInTheWorld(), subtests, {"a": "2"})
    alone({"a": [1], "b": [3]}, print)
    with pytest.raises(pytest.skip.Exception, match="no case of a, b matches --subtest a=2"):
        alone.skip_if_nothing_ran()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no settings"),
        ({"a": []}, "'a' has no values"),
        ({"a": "text"}, "must be a list"),
        ({"c": [1]}, "both a setting and a keyword"),
        ({"a": [1, "1"]}, "two values that read the same"),
    ],
)
def test_empty_or_ambiguous_settings_are_refused(
    subtests: pytest.Subtests, settings: dict[str, list[object]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RunSubtests(AloneInTheWorld(), subtests, {})(settings, print, c=1)


@dataclasses.dataclass
class Expected:
    """A failure that is expected of every case."""

    run: bool = True
    reason: str = "not yet"

    def is_about_case(self, case: str) -> bool:
        return True


class Raised:
    """pytest's subtests, which keep what a case has raised."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    @contextlib.contextmanager
    def test(self, name: str) -> Iterator[None]:
        self.errors.append(None)
        try:
            yield
        except BaseException as error:
            self.errors[-1] = error


@pytest.mark.parametrize(
    ("body", "expected", "kind", "words"),
    [
        (lambda n: pytest.fail("as expected"), Expected(), pytest.xfail.Exception, "not yet"),
        (
            lambda n: pytest.fail("as expected"),
            Expected(run=False),
            pytest.xfail.Exception,
            "[NOTRUN] not yet",
        ),
        (lambda n: pytest.skip("no"), Expected(), pytest.skip.Exception, "no"),
        (lambda n: None, Expected(), pytest.fail.Exception, "[XPASS(strict)] not yet"),
    ],
    ids=["fails", "not-run", "skips", "passes"],
)
def test_a_case_that_is_expected_to_fail(
    body: Callable[[int], object], expected: Expected, kind: type[BaseException], words: str
) -> None:
    rank, raised = AloneInTheWorld(), Raised()
    RunSubtests(rank, cast(Any, raised), {}, [expected])({"n": [1]}, body)
    assert [(type(error), str(error)) for error in raised.errors] == [(kind, words)]
    assert rank.seeded == expected.run


class Voter:
    """A rank whose peer votes as it does, or as is said here, and that notes what is called."""

    def __init__(self, *peers: Vote | None) -> None:
        self.peers = list(peers)
        self.calls: list[str] = []

    def agree(self, vote: Vote) -> tuple[Vote, ...]:
        self.calls.append(f"agrees: {vote.outcome}")
        return vote, (self.peers.pop(0) if self.peers else None) or vote

    def begin_case(self, name: str, count: str = "") -> None:
        self.calls.append(f"begins {name} ({count})")

    def end_case(self) -> None:
        self.calls.append("ends")

    def abort(self) -> None:
        self.calls.append("aborts")

    def repair(self) -> None:
        self.calls.append("repairs")


def test_cases_are_counted_over_all_calls_and_named_within_those_outside() -> None:
    rank, raised = Voter(), Raised()
    run = RunSubtests(rank, cast(Any, raised), {})
    run({"a": [1, 2]}, lambda a: None)
    run.outer = "seed=1"
    run.select({"b": "4"})
    run({"b": [3, 4]}, lambda b: None)
    assert rank.calls == [
        *("begins a=1 (subtest 1 of 2)", "agrees: passed", "ends"),
        *("begins a=2 (subtest 2 of 2)", "agrees: passed", "ends"),
        *("begins seed=1, b=4 (subtest 3 of 3)", "agrees: passed", "ends"),
    ]
    assert raised.errors == [None] * 3


def fails(n: int) -> None:
    raise ValueError(n)


@pytest.mark.parametrize(
    ("body", "peer", "calls", "error"),
    [
        (fails, None, ["aborts", "agrees: failed", "repairs"], "ValueError: 1"),
        (print, Vote("n=1", "failed"), ["agrees: passed", "repairs"], "PeerFailed: {case}rank 1"),
        (
            print,
            Vote("n=1", "skipped", "no"),
            ["agrees: passed", "repairs"],
            "PeerFailed: ranks disagree: rank 0 passed; rank 1 skipped (no)",
        ),
        (lambda n: pytest.skip("no"), None, ["agrees: skipped"], "Skipped: no"),
    ],
    ids=["fails", "peer-fails", "peer-skips", "skips"],
)
def test_ranks_meet_again_after_a_case_that_has_not_passed_on_all(
    body: Callable[[int], object], peer: Vote | None, calls: list[str], error: str
) -> None:
    rank, raised = Voter(peer), Raised()
    RunSubtests(rank, cast(Any, raised), {})({"n": [1]}, lambda n: body(n))
    assert rank.calls == ["begins n=1 (subtest 1 of 1)", *calls, "ends"]
    words = error.format(case=VICTIM_OF_A_CASE)
    assert [f"{type(each).__name__}: {each}" for each in raised.errors] == [words]


def test_a_rank_that_has_ended_the_test_ends_it_for_all() -> None:
    ended = Vote("", "ended")
    rank, raised = Voter(ended), Raised()
    words = f"{VICTIM_OF_A_CASE}rank 1 {HAS_ENDED}"
    with pytest.raises(pytest.fail.Exception) as caught:
        RunSubtests(rank, cast(Any, raised), {})({"n": [1, 2]}, lambda n: None)
    assert str(caught.value) == words
    assert [str(each) for each in raised.errors] == [words]
    assert rank.calls == ["begins n=1 (subtest 1 of 2)", "agrees: passed"]


def test_the_expected_failure_of_one_rank_is_that_of_all() -> None:
    class OfSecond(Expected):
        def is_about_case(self, case: str) -> bool:
            return case == "n=2"

    rank, raised = Voter(None, Vote("n=2", "failed")), Raised()
    run = RunSubtests(rank, cast(Any, raised), {}, [OfSecond(), Expected(reason="never")])
    run.outer = "m=1"
    run({"n": [2]}, lambda n: None)
    assert rank.calls == ["begins m=1, n=2 (subtest 1 of 1)", "agrees: passed", "ends"]
    rank.calls.clear()
    run({"n": [2]}, lambda n: None)
    assert rank.calls[1:] == ["agrees: passed", "repairs", "ends"]
    rank.calls.clear()
    run({"n": [2]}, lambda n: fails(n))
    assert rank.calls[1:] == ["aborts", "agrees: failed", "repairs", "ends"]
    run({"n": [1]}, lambda n: None)
    words = ["[XPASS(strict)] not yet", "not yet", "not yet", "[XPASS(strict)] never"]
    assert [str(each) for each in raised.errors] == words


@pytest.mark.parametrize(
    ("votes", "words"),
    [
        ("a ended, b failed, c ended", "{case}rank 0, 2 {ended}"),
        ("a failed, b passed", "ranks disagree on which subtest comes next: rank 0 at [a]; rank 1 at [b]"),
        ("a passed, a failed, a failed", "{case}rank 1, 2"),
        ("a passed, a skipped", "ranks disagree: rank 0 passed; rank 1 skipped"),
    ],
)
def test_votes_that_differ_are_put_into_words(votes: str, words: str) -> None:
    given = tuple(Vote(*vote.split()) for vote in votes.split(", "))
    assert _disagreement(given) == words.format(case=VICTIM_OF_A_CASE, ended=HAS_ENDED)


def test_only_some_cases_run_within_a_block() -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(subtest=["a=1"]))
    with only_cases(config, ()):
        assert config.option.subtest == ["a=1"]
    with contextlib.suppress(ValueError), only_cases(config, ("b=2", "c=3")):
        assert config.option.subtest == ["b=2", "c=3"]
        raise ValueError
    assert config.option.subtest == ["a=1"]


@pytest.mark.parametrize(("backend", "how"), [("gloo", "Connection closed by peer"), ("shm", "aborted")])
def test_cases_fail_on_all_ranks_by_name_and_the_rest_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, backend: str, how: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    copy_project("subtests", pytester.path)
    result = pytester.runpytest_subprocess("-rA", "-v", "-W", "ignore", "--backend", backend, timeout=120)
    result.assert_outcomes(passed=2, failed=18, skipped=2)
    result.stdout.fnmatch_lines_random(
        [
            "SUBFAILED[[]a=2, b=x[]] test_cases.py::test_one_bad_case - rank 1: *assert *",
            "FAILED test_cases.py::test_one_bad_case - contains 1 failed subtest",
            "SUBFAILED[[]a=0[]] *::test_work_in_flight - rank 1: ValueError: left work in flight",
            "SUBFAILED[[]a=1[]] *::test_skips_must_agree - *: rank 0 passed; rank 1 skipped (no)",
            "*ranks disagree on which subtest comes next: rank 0 at [[]a=0[]]; rank 1 at [[]a=1[]]*",
            "FAILED *::test_a_rank_leaves_early - rank 0: *rank 1 had already ended the test",
            "SUBFAILED[[]a=2[]] *::test_death_in_a_case - rank 1: exited with code 5",
            "FAILED test_cases.py::test_death_in_a_case - rank 1: exited with code 5",
            "FAILED test_cases.py::test_the_same_settings_twice - contains 2 failed subtests",
            "SUBFAILED[[]a=1[]] *::test_all_meet_before_the_next_case - *",
            "FAILED *::test_all_meet_before_the_next_case - contains 1 failed subtest",
            "*::test_skipped_cases_are_skipped SUBSKIPPED[[]all=0[]] (not today)*",
            f"rank 0: lost its connection to rank 1 at test_cases.py:* ({how})",
            f"pytest test_cases.py::test_one_bad_case --backend {backend} -W ignore --subtest a=2,b=x",
        ]
    )
    for rank in (0, 1):
        reached = (pytester.path / f"reached-{rank}.txt").read_text().splitlines()
        assert reached == ["1 x", "1 y", "2 y", "3 x", "3 y"]


GROUPS = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

@pytest.fixture(scope="session")
def group():
    made = dist.new_group([0, 1])
    yield made
    dist.destroy_process_group(made)

def test_does_not_use_it(world, group, run_subtests):
    def claim(a):
        assert a == 1 or world.rank == 0
    run_subtests({"a": [1, 2, 3]}, claim)

def test_uses_it(world, group, run_subtests):
    def claim(a):
        assert a != 2
        dist.all_reduce(torch.ones(1), group=group)
    run_subtests({"a": [1, 2, 3]}, claim)

def test_makes_its_own(world, run_subtests):
    def claim(a):
        group = dist.new_group([0, 1])
        if a == 2:
            dist.destroy_process_group(group)
            dist.destroy_process_group(group)
        assert a != 1
    run_subtests({"a": [1, 2]}, claim)

def test_later(world, group):
    dist.all_reduce(torch.ones(1), group=group)
"""


def test_groups_that_end_with_a_failed_case_are_named_and_may_be_destroyed_again(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(GROUPS)
    result = pytester.runpytest_subprocess()
    text = result.stdout.str()
    failed = re.findall(r"^SUBFAILED\[(a=\d)\] test_\w+.py::(\w+)", text, re.MULTILINE)
    assert failed == [
        *(("a=2", "test_does_not_use_it"), ("a=3", "test_does_not_use_it")),
        *(("a=2", "test_uses_it"), ("a=3", "test_uses_it")),
        *(("a=1", "test_makes_its_own"), ("a=2", "test_makes_its_own")),
    ]
    assert "ERROR" not in text
    assert "1 passed" in text
    errors = [line for line in text.splitlines() if line.startswith("E ") and "before case" in line]
    # On both ranks, of one test alone.
    assert [line.removeprefix("E").strip().partition(":")[0] for line in errors] == [
        "process groups and meshes that were made before case [a=2] ended when it failed"
    ] * 2


def test_values_of_subtests_are_shown_as_without_ranks(pytester: pytest.Pytester) -> None:
    body = (
        "    for n in (1, 2):\n"
        "        with subtests.test(n=n, name='x', size=(1, 2)):\n"
        "            assert n == 1\n"
    )
    pytester.makepyfile(
        f"import pytest\n\ndef test_plain(subtests):\n{body}\n"
        f"@pytest.mark.ranks(2)\ndef test_on_ranks(world, subtests):\n{body}"
    )
    result = pytester.runpytest_subprocess()
    found = re.findall(r"SUBFAILED(.*?) test_\w+.py::(\w+)", result.stdout.str())
    assert found == [("(n=2, name='x', size=(1, 2))", name) for name in ("test_plain", "test_on_ranks")]


def test_the_re_run_line_of_a_failed_case_runs_it_alone(pytester: pytest.Pytester) -> None:
    copy_project("subtests", pytester.path)
    names = ("test_one_bad_case", "test_skipped_cases_are_skipped", "test_work_in_flight")
    tests = [f"test_cases.py::{name}" for name in names]
    result = pytester.runpytest_subprocess(*tests, "--subtest", "a=2,b=x", "-v", "-W", "ignore", timeout=180)
    result.assert_outcomes(passed=1, failed=2, skipped=1)  # of the last one no case has a `b`
    result.stdout.fnmatch_lines(["*::test_one_bad_case SUBFAILED[[]a=2, b=x[]]*"])
    cases = re.findall(r"::(test_\w+) SUB(\w+)\[(.*?)\]", result.stdout.str())
    assert cases == [
        ("test_one_bad_case", "FAILED", "a=2, b=x"),
        ("test_skipped_cases_are_skipped", "PASSED", "a=2, b=x"),
    ]


def test_a_selection_of_no_case_is_no_success(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_cases="""
            import pytest

            @pytest.mark.ranks(1)
            def test_n(run_subtests):
                run_subtests({"n": [1, 2]}, lambda n: None)
        """,
        test_plain="def test_passes(): pass",
    )
    found = pytester.runpytest_subprocess("test_cases.py", "--subtest", "n=3")
    found.assert_outcomes(skipped=1)
    found.stdout.fnmatch_lines(["no case of n matches --subtest n=3: no test ran"])
    assert found.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    beside = pytester.runpytest_subprocess("--subtest", "n=3")
    beside.assert_outcomes(skipped=1, passed=1)
    assert beside.ret == pytest.ExitCode.OK


def test_an_invalid_selection_is_a_usage_error(pytester: pytest.Pytester) -> None:
    message = re.escape("--subtest 'offload': write KEY=VALUE,KEY=VALUE")
    with pytest.raises(pytest.UsageError, match=f"^{message}$"):
        pytester.parseconfigure("--subtest", "offload")
