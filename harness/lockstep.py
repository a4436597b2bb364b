"""Subtests that all ranks of a world run, pass and fail together. Runs inside a rank."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import pytest

from harness.exceptions import PeerFailed
from harness.protocol import VICTIM_OF_A_CASE, Vote


class Lockstep(Protocol):
    """What subtests need of a rank."""

    def agree(self, vote: Vote) -> tuple[Vote, ...]: ...
    def begin_point(self, name: str) -> None: ...
    def end_point(self) -> None: ...
    def sever(self) -> None: ...
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


class RunSubtests:
    """The fixture `run_subtests`: one subtest for each point of a product of settings, on all ranks alike.

    A point that fails on one rank fails on all; the ranks then meet in a new process group, and the points
    that remain run. Groups and meshes made before `run_subtests` do not outlive a failed point: make them
    inside it.
    """

    def __init__(
        self,
        rank: Lockstep,
        subtests: pytest.Subtests,
        selected: Mapping[str, str],
        expected_failures: Sequence[ExpectedFailure] = (),
    ) -> None:
        self._rank = rank
        self._subtests = subtests
        self._selected = selected
        self._expected_failures = expected_failures
        self._settings: dict[str, Sequence[Any]] = {}
        self._num_run = 0

    def __call__(
        self, settings: Mapping[str, Sequence[Any]], fn: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        """Call `fn(*args, **kwargs, **point)` for every point of the product of `settings`.

        Args:
            settings: for each keyword of `fn` the values it takes; the last one varies fastest.
            fn: the claim; every generator is seeded anew before each call.

        Raises:
            ValueError: a setting has no values, or is given in `kwargs` too; no point would be run.
        """
        __tracebackhide__ = True
        _check(settings, kwargs)
        points = [
            dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())
        ]
        chosen = [point for point in points if self._is_selected(point)]
        self._settings.update(settings)
        self._num_run += len(chosen)
        for point in chosen:
            call = partial(fn, *args, **kwargs, **point)
            name = describe_point(point)
            expected = next((found for found in self._expected_failures if found.is_about_case(name)), None)
            if expected is None:
                self._run_point(name, call)
            else:
                self._run_failing_point(name, call, expected)
            self._rank.end_point()

    def skip_if_nothing_ran(self) -> None:
        """Skip the test that used this fixture if `--subtest` chose none of its points."""
        if self._settings and not self._num_run:
            wanted = ",".join(f"{name}={value}" for name, value in self._selected.items())
            pytest.skip(f"no case of {', '.join(self._settings)} matches --subtest {wanted}")

    def _is_selected(self, point: Mapping[str, Any]) -> bool:
        return all(
            name in point and describe_value(point[name]) == value for name, value in self._selected.items()
        )

    def _run_point(self, name: str, call: Callable[[], object]) -> None:
        __tracebackhide__ = True
        outcome = "failed"
        votes: tuple[Vote, ...] | None = None
        with self._subtests.test(name):
            skip: BaseException | None = None
            try:
                self._rank.begin_point(name)
                call()
                outcome = "passed"
            except pytest.skip.Exception as error:
                outcome, skip = "skipped", error
            # Inside the subtest, so that it fails here too if another rank has failed.
            votes = self._rank.agree(Vote(name, outcome, str(skip or "")))
            _expect_all(votes, outcome)
            if skip is not None:
                raise skip
        if votes is None:  # it raised, and its own report is out already
            self._rank.sever()  # frees the ranks that wait for this one
            votes = self._rank.agree(Vote(name, outcome))
        if any(vote.outcome == "ended" for vote in votes):
            pytest.fail(_tell(votes), pytrace=False)
        if {vote.outcome for vote in votes} not in ({"passed"}, {"skipped"}):
            self._rank.repair()

    def _run_failing_point(self, name: str, call: Callable[[], object], expected: ExpectedFailure) -> None:
        """Run a point that is expected to fail, on one rank at least; it fails if all ranks pass."""
        with self._subtests.test(name):
            if not expected.run:
                raise pytest.xfail.Exception(f"[NOTRUN] {expected.reason}")
            outcome, skip = "passed", None
            try:
                self._rank.begin_point(name)
                call()
            except pytest.skip.Exception as error:
                outcome, skip = "skipped", error
            except (Exception, pytest.fail.Exception):
                outcome = "failed"
                self._rank.sever()
            votes = self._rank.agree(Vote(name, outcome, str(skip or "")))
            if any(vote.outcome == "failed" for vote in votes):
                self._rank.repair()
                raise pytest.xfail.Exception(expected.reason)
            _expect_all(votes, outcome)
            if skip is not None:
                raise skip
            pytest.fail(f"[XPASS(strict)] {expected.reason}", pytrace=False)


def _expect_all(votes: tuple[Vote, ...], outcome: str) -> None:
    """Raise PeerFailed unless every rank was at the same point and fared alike."""
    __tracebackhide__ = True
    if any(vote.outcome != outcome or vote.case != votes[0].case for vote in votes):
        raise PeerFailed(_tell(votes))


def _tell(votes: tuple[Vote, ...]) -> str:
    ended = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "ended"]
    if ended:
        return f"{VICTIM_OF_A_CASE}rank {', '.join(ended)} had already ended the test"
    if len({vote.case for vote in votes}) > 1:
        where = "; ".join(f"rank {rank} at [{vote.case}]" for rank, vote in enumerate(votes))
        return f"ranks disagree on which subtest comes next: {where}"
    if any(vote.outcome == "failed" for vote in votes):
        culprits = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "failed"]
        return f"{VICTIM_OF_A_CASE}rank {', '.join(culprits)}"
    return "ranks disagree: " + "; ".join(f"rank {rank} {_word(vote)}" for rank, vote in enumerate(votes))


def _word(vote: Vote) -> str:
    return f"{vote.outcome} ({vote.reason})" if vote.reason else vote.outcome


def _check(settings: Mapping[str, Sequence[Any]], kwargs: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
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


def describe_point(point: Mapping[str, Any]) -> str:
    """Name a point: `key=value, key=value`."""
    return ", ".join(f"{name}={describe_value(value)}" for name, value in point.items())


def describe_value(value: Any) -> str:
    """Name a setting's value in one word that can be typed on a command line."""
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        told = (f"{field.name}={describe_value(getattr(value, field.name))}" for field in _set_fields(value))
        return f"{type(value).__name__}({';'.join(told)})"
    if isinstance(value, type) or callable(value):
        text = getattr(value, "__name__", None) or type(value).__name__
    else:
        text = str(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", text).removeprefix("torch.")
    return re.sub(r"[\s,]+", "_", text) or "''"


def _set_fields(value: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass instance that differ from their defaults."""
    return [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]


def parse_selection(texts: Sequence[str]) -> dict[str, str]:
    """Read `--subtest KEY=VALUE,...`.

    Raises:
        ValueError: a part is not of the form KEY=VALUE, or a key is given twice.
    """
    selection: dict[str, str] = {}
    for part in _parts(texts):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"--subtest {part!r}: write KEY=VALUE,KEY=VALUE")
        if name in selection:
            raise ValueError(f"--subtest: {name!r} is given twice")
        selection[name] = value
    return selection


def _parts(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from filter(None, (part.strip() for part in text.split(",")))
