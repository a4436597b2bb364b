"""Agreement of ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.assertions import agreement
from lockstep.exceptions import Diverged
from suites.selftest.assertions.test_divergence_words import event


class Ranks:
    """Three ranks; `gathers` counts what they exchange objects by."""

    def __init__(self) -> None:
        self.gathers, self.paused = 0, 0
        self.logs: dict[int, Any] = {}
        self._here = threading.local()
        self._values: dict[int, Any] = {}
        self._barrier = threading.Barrier(3, timeout=20)

    def gathered(self, value: Any, group: object = None) -> dict[int, Any]:
        found = self._exchange(value)
        self.gathers += self._here.rank == 0
        return found

    def _exchange(self, value: Any) -> dict[int, Any]:
        self._values[self._here.rank] = value
        self._barrier.wait()
        found = dict(sorted(self._values.items()))
        self._barrier.wait()
        return found

    def largest(self, values: torch.Tensor, group: object) -> torch.Tensor:
        return torch.stack(list(self._exchange(values).values())).amax(0)

    def log(self) -> Any:
        return self.logs.get(self._here.rank)

    def run(self, act: Callable[[int], object]) -> list[str]:
        """Return what a function raises on each rank, "" if nothing."""

        def on(rank: int) -> str:
            self._here.rank = rank
            try:
                act(rank)
            except AssertionError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(on, range(3)))

    def compare(self, *held: Mapping[str, torch.Tensor]) -> str:
        """Return what is wrong with the tensors of ranks; all say the same."""
        (found,) = set(self.run(lambda rank: agreement.assert_same_across_ranks(held[rank])))
        return found


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    for name in ("gathered", "largest"):
        monkeypatch.setattr(agreement, name, getattr(made, name))
    monkeypatch.setattr(agreement, "active_log", made.log)
    fake = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda group: 3)
    monkeypatch.setattr(agreement, "dist", fake)
    return made


def test_findings_of_one_rank_are_raised_by_all(ranks: Ranks) -> None:
    found = ranks.run(lambda rank: agreement.fail_together(["a", "b"] if rank == 1 else []))
    assert found == ["rank 1: a\nrank 1: b"] * 3
    assert ranks.gathers == 1
    assert (
        ranks.run(lambda rank: agreement.fail_together([str(rank)]))
        == ["rank 0: 0\nrank 1: 1\nrank 2: 2"] * 3
    )


def test_ranks_that_agree_gather_nothing(ranks: Ranks) -> None:
    assert ranks.run(lambda rank: agreement.fail_together([])) == [""] * 3
    assert ranks.compare(*({"w": torch.ones(2), "v": torch.tensor(torch.nan)} for _ in range(3))) == ""
    assert ranks.gathers == 0


def test_the_names_that_differ_are_compared_with_the_first_rank(ranks: Ranks) -> None:
    same = {"same": torch.ones(2)}
    found = ranks.compare(
        {**same, "w": torch.tensor([0.0]), "z": torch.tensor([0.0]), "half": torch.ones(1)},
        {**same, "w": torch.tensor([0.0]), "z": torch.tensor([-0.0]), "half": torch.ones(1).half()},
        {**same, "w": torch.tensor([2.0]), "z": torch.tensor([-0.0]), "more": torch.ones(1)},
    )
    assert found.splitlines() == [
        "rank 2 differs from rank 0 in w: Mismatched elements: 1 / 1 (100.0%); "
        "Greatest absolute difference: 2.0 at index (0,); Greatest relative difference: inf at index (0,)",
        "rank 1 differs from rank 0 in z: in the sign of a zero only",
        "rank 2 differs from rank 0 in z: in the sign of a zero only",
        "half: missing on ranks [2]",
        "more: missing on ranks [0, 1]",
    ]
    assert ranks.gathers == 5


def test_shapes_and_dtypes_are_compared_too(ranks: Ranks) -> None:
    one = {"w": torch.zeros(2)}
    text = "rank 1 differs from rank 0 in w: The values for attribute '{}' do not match"
    assert ranks.compare(one, {"w": torch.zeros(2, 1)}, one).startswith(text.format("shape"))
    assert ranks.compare(one, {"w": torch.zeros(2).int()}, one).startswith(text.format("dtype"))


@pytest.mark.parametrize("count", [5, 6, 7])
def test_five_of_many_names_are_compared(ranks: Ranks, count: int) -> None:
    found = ranks.compare(*({f"w{n}": torch.tensor(float(rank)) for n in range(count)} for rank in range(3)))
    lines = found.splitlines()
    assert len(lines) == 10 + (count > 5)
    assert lines[10:] == ["and more names"] * (count > 5)
    assert ranks.gathers == 6


def test_ranks_without_tensors_are_named(ranks: Ranks) -> None:
    assert ranks.compare({}, {"w": torch.ones(1)}, {}) == "no tensors to compare on ranks [0, 2]"
    assert ranks.compare({}, {}, {}) == "no tensors to compare on ranks [0, 1, 2]"


class Log:
    def __init__(self, *events: Any) -> None:
        self.events, self.pauses = list(events), 0

    def paused(self) -> Any:
        self.pauses += 1
        return nullcontext()


def test_a_recorded_run_shows_where_ranks_parted(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.logs[rank] = Log(
            event("cast", "of none"),
            event("gradient", "w", [1.0]),
            event("updated parameter", "w", [2.0 + (rank == 2)]),
            *([event("race", "sum")] if rank == 1 else []),
        )
    held = [{"w": torch.tensor([2.0 + (rank == 2)]), "v": torch.tensor(rank)} for rank in range(3)]
    assert ranks.compare(*held).splitlines() == [
        "first divergence between ranks: step 0, optimizer step: parameter `w` after the optimizer's step",
        "  rank 0 2, rank 1 2, rank 2 3 at (0,), (float32 [1])",
        "  last agreement: step 0, after backward: gradient of `w` that the optimizer reads",
        "  race: sum (rank 1)",
        "rank 2 differs from rank 0 in w: Mismatched elements: 1 / 1 (100.0%); "
        "Greatest absolute difference: 1.0 at index (0,); Greatest relative difference: 0.5 at index (0,)"
        " (and 2 lines more)",
    ]
    assert [log.pauses for log in ranks.logs.values()] == [1, 1, 1]


def test_a_record_without_a_difference_says_so(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.logs[rank] = Log(*([event("race", "sum")] if rank == 1 else []))
    found = ranks.compare(*({"w": torch.tensor(float(rank == 2))} for rank in range(3)))
    assert found.splitlines()[:2] == [
        "first divergence: nothing that was recorded differs beyond the tolerance before this",
        "  race: sum (rank 1)",
    ]


def test_what_diverges_is_an_error_of_its_kind(ranks: Ranks) -> None:
    def act(rank: int) -> None:
        with pytest.raises(Diverged):
            agreement.assert_same_across_ranks({"w": torch.tensor(rank)})

    assert ranks.run(act) == [""] * 3
