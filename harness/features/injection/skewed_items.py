"""A plugin of the rank's pytest session: tests under a schedule of `--skew`, or under several of the mark."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.bounds import is_number, is_whole, shown
from lockstep.features.injection.pytest_internals import fixture_value
from lockstep.features.injection.schedule import LONGEST, MILLISECONDS, Schedule, is_seed
from lockstep.features.injection.skew import Skew
from lockstep.subtests import RunSubtests, describe_case, parse_selection

if TYPE_CHECKING:
    from lockstep.rank.process import Rank

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback

MOST_CASES = 10_000
"""Seeds of one test."""
SETTING = "skew"
"""The setting of the subtests of the mark: each is one seed."""


class SkewedItems:
    """Runs items under schedules.

    Args:
        rank: this rank.
        option: of `--skew`.
    """

    def __init__(self, rank: Rank, option: str | None) -> None:
        self._rank, self._number = rank, rank.spec.rank
        self._schedule = None if option is None else Schedule.parse(option)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_ranks_run_item(self, item: pytest.Item) -> Generator[None, object, object]:
        """Disturb the collectives of an item, if the user wants that of all."""
        if self._schedule is None or _is_exempt(item.get_closest_marker("skew")):
            return (yield)
        with Skew(self._schedule, self._number).on():
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Run a marked test once for each seed; under `--skew` it runs once, by that."""
        mark = pyfuncitem.get_closest_marker("skew")
        schedules = None if mark is None or _is_exempt(mark) else schedules_of(mark)
        if schedules is None or self._schedule is not None:
            return (yield)
        selected = parse_selection(pyfuncitem.config.getoption("subtest"))
        chosen = {SETTING: selected.pop(SETTING)} if SETTING in selected else {}
        given = pyfuncitem.funcargs.get("run_subtests")
        own = given if isinstance(given, RunSubtests) else None
        if own is not None:
            own.select(selected)
        runner = RunSubtests(self._rank, fixture_value(pyfuncitem, "subtests"), chosen)
        test = pyfuncitem.obj
        pyfuncitem.obj = self._under_each(test, schedules, runner, own)
        try:
            result = yield
        finally:
            pyfuncitem.obj = test
        runner.skip_if_nothing_ran()
        return result

    def _under_each(
        self,
        test: Callable[..., object],
        schedules: Mapping[int, Schedule],
        runner: RunSubtests,
        own: RunSubtests | None,
    ) -> Callable[..., None]:
        def under_each(**arguments: Any) -> None:
            __tracebackhide__ = True

            def run(skew: int) -> None:
                __tracebackhide__ = True
                if own is not None:
                    own.outer = describe_case({SETTING: skew})
                with Skew(schedules[skew], self._number).on():
                    test(**arguments)

            runner({SETTING: list(schedules)}, run)

        return under_each


def _is_exempt(mark: pytest.Mark | None) -> bool:
    """Return whether a test has the mark `skew(seeds=[])`: it touches tensors too early on purpose."""
    seeds = None if mark is None else mark.kwargs.get("seeds")
    return isinstance(seeds, list | tuple) and not seeds


def schedules_of(mark: pytest.Mark) -> dict[int, Schedule]:
    """Return the schedules of a mark `skew(seeds=5, milliseconds=3)`, by seed.

    Raises:
        pytest.fail.Exception: its arguments make no sense.
    """
    given = {"seeds": 5, "milliseconds": MILLISECONDS, **mark.kwargs}
    seeds, longest = given.pop("seeds"), given.pop("milliseconds")
    if mark.args or given:
        wrong = f"{next(iter(given))}=..." if given else shown(mark.args[0])
        pytest.fail(f"skew({wrong}): write skew(seeds=5) or skew(seeds=[3], milliseconds=20)", pytrace=False)
    listed = range(1, seeds + 1) if is_whole(seeds) else seeds
    is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
    # In this order: a range may be longer than `len` can return.
    if not is_list or not listed or listed[MOST_CASES:] or not all(map(is_seed, listed)):
        allowed = f"a number from 1 to {MOST_CASES}, or a list of at most as many seeds from 0 to 2**64 - 1"
        pytest.fail(f"skew(seeds={shown(seeds)}): {allowed}", pytrace=False)
    if not is_number(longest) or not 0 < longest <= LONGEST:
        pytest.fail(f"skew(milliseconds={shown(longest)}): above 0 and at most {LONGEST}", pytrace=False)
    return {seed: Schedule(seed, longest) for seed in listed}
