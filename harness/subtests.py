"""The fixture `run_subtests`: subtests that all ranks of a world run, pass and fail together.

Runs inside a rank; the controller reads `--subtest` here. Imports nothing of `harness` but the protocol.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_CASE, Vote

NO_CASE_OF = "no case of"
"""The beginning of the reason for which a test is skipped whose cases `--subtest` has not chosen."""


class VotingRank(Protocol):
    """The part of a rank that subtests need."""

    def agree(self, vote: Vote) -> tuple[Vote, ...]: ...
    def begin_case(self, name: str, count: str = "") -> None: ...
    def end_case(self) -> None: ...
    def abort(self) -> None: ...
    def repair(self) -> None: ...


class ExpectedFailure(Protocol):
    """A failure that is expected of some cases, and strictly: a case that passes on all ranks then fails."""

    @property
    def reason(self) -> str: ...
    @property
    def run(self) -> bool:
        """Whether to try the case at all."""
        ...

    def is_about_case(self, case: str) -> bool: ...


@contextmanager
def only_cases(config: pytest.Config, cases: Sequence[str]) -> Iterator[None]:
    """Run only these cases, named as `--subtest` names them; where there are none, those that it selects."""
    selected = config.option.subtest
    config.option.subtest = list(cases) or selected
    try:
        yield
    finally:
        config.option.subtest = selected


class RunSubtests:
    """The fixture `run_subtests`: one subtest for each case of a product of settings, on all ranks alike.

    A case that fails on one rank fails on all; the ranks then meet in a new process group, and the remaining
    cases run. Groups and meshes made before `run_subtests` do not outlive a failed case: make them inside it.

    Args:
        rank: this rank.
        subtests: pytest's fixture.
        selected: of `--subtest`, the value of each setting that a case must have to be run.
        expected_failures: the first one that is about a case counts.

    Attributes:
        outer: the case of other subtests that these run in, such as "seed=1"; "" in none.
    """

    def __init__(
        self,
        rank: VotingRank,
        subtests: pytest.Subtests,
        selected: Mapping[str, str],
        expected_failures: Sequence[ExpectedFailure] = (),
    ) -> None:
        self._rank = rank
        self._subtests = subtests
        self._selected = selected
        self._expected_failures = expected_failures
        self.outer = ""
        self._settings: dict[str, Sequence[Any]] = {}
        self._num_run = 0
        self._count = ""

    def __call__(
        self, settings: Mapping[str, Sequence[Any]], fn: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        """Call `fn(*args, **kwargs, **case)` for every case of the product of `settings`.

        Args:
            settings: for each keyword of `fn` the values it takes; the last one varies fastest.
            fn: the claim; every generator is seeded again before each call.

        Raises:
            ValueError: there are no settings, or one has no values or is given in `kwargs` too.
        """
        __tracebackhide__ = True
        _check(settings, kwargs)
        cases = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
        chosen = [case for case in cases if self._is_selected(case)]
        self._settings.update(settings)
        before, self._num_run = self._num_run, self._num_run + len(chosen)
        for number, case in enumerate(chosen, before + 1):
            self._count = f"subtest {number} of {self._num_run}"
            call = partial(fn, *args, **kwargs, **case)
            name = describe_case(case)
            expected = next((found for found in self._expected_failures if found.is_about_case(name)), None)
            if self.outer:
                name = f"{self.outer}, {name}"
            if expected is None:
                self._run_case(name, call)
            else:
                self._run_failing_case(name, call, expected)
            self._rank.end_case()

    def select(self, selected: Mapping[str, str]) -> None:
        """Run only cases with these settings, in the place of those of `--subtest`."""
        self._selected = selected

    def skip_if_nothing_ran(self) -> None:
        """Skip the test that used this fixture if `--subtest` chose none of its cases."""
        if self._settings and not self._num_run:
            wanted = ",".join(f"{name}={value}" for name, value in self._selected.items())
            pytest.skip(f"{NO_CASE_OF} {', '.join(self._settings)} matches --subtest {wanted}")

    def _is_selected(self, case: Mapping[str, Any]) -> bool:
        return all(
            name in case and describe_value(case[name]) == value for name, value in self._selected.items()
        )

    def _run_case(self, name: str, call: Callable[[], object]) -> None:
        __tracebackhide__ = True
        outcome = "failed"
        votes: tuple[Vote, ...] | None = None
        with self._subtests.test(name):
            skip: BaseException | None = None
            try:
                self._rank.begin_case(name, self._count)
                call()
                outcome = "passed"
            except pytest.skip.Exception as error:
                outcome, skip = "skipped", error
            # Inside the subtest, so that it fails here too if another rank has failed.
            votes = self._rank.agree(Vote(name, outcome, str(skip or "")))
            _expect_all(votes, outcome)
            if skip is not None:
                raise skip
        if votes is None:  # it raised, and its own report has been sent already
            self._rank.abort()  # frees the ranks that wait for this one
            votes = self._rank.agree(Vote(name, outcome))
        if any(vote.outcome == "ended" for vote in votes):
            pytest.fail(_disagreement(votes), pytrace=False)
        if {vote.outcome for vote in votes} not in ({"passed"}, {"skipped"}):
            self._rank.repair()

    def _run_failing_case(self, name: str, call: Callable[[], object], expected: ExpectedFailure) -> None:
        """Run a case that is expected to fail on one rank at least; it fails if all ranks pass."""
        with self._subtests.test(name):
            if not expected.run:
                raise pytest.xfail.Exception(f"[NOTRUN] {expected.reason}")
            outcome, skip = "passed", None
            try:
                self._rank.begin_case(name, self._count)
                call()
            except pytest.skip.Exception as error:
                outcome, skip = "skipped", error
            except (Exception, pytest.fail.Exception):
                outcome = "failed"
                self._rank.abort()
            votes = self._rank.agree(Vote(name, outcome, str(skip or "")))
            if any(vote.outcome == "failed" for vote in votes):
                self._rank.repair()
                raise pytest.xfail.Exception(expected.reason)
            _expect_all(votes, outcome)
            if skip is not None:
                raise skip
            pytest.fail(f"[XPASS(strict)] {expected.reason}", pytrace=False)


def _expect_all(votes: tuple[Vote, ...], outcome: str) -> None:
    """Raise PeerFailed unless every rank was at the same case and fared alike."""
    __tracebackhide__ = True
    if any(vote.outcome != outcome or vote.case != votes[0].case for vote in votes):
        raise PeerFailed(_disagreement(votes))


def _disagreement(votes: tuple[Vote, ...]) -> str:
    ended = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "ended"]
    if ended:
        return f"{VICTIM_OF_A_CASE}rank {', '.join(ended)} {HAS_ENDED}"
    if len({vote.case for vote in votes}) > 1:
        where = "; ".join(f"rank {rank} at [{vote.case}]" for rank, vote in enumerate(votes))
        return f"ranks disagree on which subtest comes next: {where}"
    if any(vote.outcome == "failed" for vote in votes):
        culprits = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "failed"]
        return f"{VICTIM_OF_A_CASE}rank {', '.join(culprits)}"
    outcomes = [f"{vote.outcome} ({vote.reason})" if vote.reason else vote.outcome for vote in votes]
    return "ranks disagree: " + "; ".join(f"rank {rank} {outcome}" for rank, outcome in enumerate(outcomes))


def _check(settings: Mapping[str, Sequence[Any]], kwargs: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    if not settings:
        raise ValueError("run_subtests: no settings, so there is no case to name; call the function itself")
    for name, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"run_subtests: setting {name!r} is {values!r}; it must be a list of values")
        if not values:
            raise ValueError(f"run_subtests: setting {name!r} has no values, so nothing would run")
        if name in kwargs:
            raise ValueError(f"run_subtests: {name!r} is both a setting and a keyword argument")
        names = [describe_value(value) for value in values]
        if len(set(names)) != len(names):
            raise ValueError(f"run_subtests: setting {name!r} has two values that read the same: {names}")


def describe_case(case: Mapping[str, Any]) -> str:
    """Name a case: `key=value, key=value`."""
    return ", ".join(f"{name}={describe_value(value)}" for name, value in case.items())


def describe_value(value: Any) -> str:
    """Name a setting's value in one word that can be typed on a command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        words = (f"{field.name}={describe_value(getattr(value, field.name))}" for field in fields)
        return f"{type(value).__name__}({';'.join(words)})"
    if isinstance(value, type) or callable(value):
        text = getattr(value, "__name__", None) or type(value).__name__
    else:
        text = str(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", text).removeprefix("torch.")
    return re.sub(r"[\s,]+", "_", text) or "''"


def parse_selection(texts: Sequence[str]) -> dict[str, str]:
    """Read `--subtest KEY=VALUE,...`.

    Raises:
        ValueError: a part is not of the form KEY=VALUE, or a key is given twice.
    """
    selection: dict[str, str] = {}
    parts = (part.strip() for text in texts for part in text.split(","))
    for part in filter(None, parts):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"--subtest {part!r}: write KEY=VALUE,KEY=VALUE")
        if name in selection:
            raise ValueError(f"--subtest: {name!r} is given twice")
        selection[name] = value
    return selection
