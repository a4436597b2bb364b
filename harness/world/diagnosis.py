"""Diagnosis of ranks that do not get on, from the status of each: one sentence, and the ranks to blame.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import MEETING, TRIAL, Issued, RankStatus

# In these every rank passes as many elements as the others.
_EQUAL_SIZES = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "allgather_base"}
    | {"reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "all_gather_into_tensor"}
    | {"all_gather_single", "reduce_scatter_single"}
)
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_EQUAL_DTYPES = _EQUAL_SIZES | {"all_to_all", "alltoall", "alltoall_base"}

_MOST_RUNS = 6
_MOST_PARTS = 4
"""Number of ranks that a sentence lists one by one, of hundreds perhaps."""

PATIENT = 600.0
"""Seconds: the shortest of torch's own timeouts. A test that sets a shorter one may be waiting for it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The error between ranks: a mismatch or a deadlock."""

    sentence: str
    blame: frozenset[int]
    """The ranks that did not do the same as the others, as far as is known."""
    is_hopeless: bool
    """True if no rank can get on any more without help."""
    mismatch: Issued | None = None
    """The collective that ranks called differently, as one of them did; its number is that in the test."""


def diagnose(
    statuses: Mapping[int, RankStatus],
    size: int,
    deadline: float = math.inf,
    waits: Mapping[int, str] = MappingProxyType({}),
) -> Diagnosis | None:
    """Return what is wrong between the ranks, None if nothing is found.

    Args:
        statuses: of ranks that stand still, or of the moment they failed or were ended; a rank that gets on
            must be missing, or the answer may be wrong.
        size: how many ranks the world has.
        deadline: seconds that the test has: no collective with a longer timeout will end by itself.
        waits: ranks that wait for something else than a collective, which no rank has begun, in words.
    """
    ranks = _Ranks(_renumber(statuses), size, waits)
    return ranks.mismatch() or ranks.standstill(min(deadline, PATIENT))


def find_mismatch(
    statuses: Mapping[int, RankStatus], size: int, *, include_ended: bool = False
) -> Diagnosis | None:
    """Return the collective in which ranks have not done the same, None if there is none.

    Args:
        statuses, size: as for `diagnose`.
        include_ended: whether to compare collectives, too, that have ended on all ranks.
    """
    return _Ranks(_renumber(statuses), size, {}).mismatch(include_ended=include_ended)


def in_flight(status: RankStatus) -> Issued | None:
    """Return the oldest collective of a rank that has not ended, with its number in the test."""
    (renumbered,) = _renumber({0: status}).values()
    return next((issued for issued in renumbered.issued if issued.in_flight), None)


def name_of(issued: Issued) -> str:
    """Name a collective: `all_reduce #3 (float [4])`, and the group unless it is the default one."""
    if issued.group == MEETING:
        return issued.op if issued.number == 1 else f"{issued.op} #{issued.number}"
    tensors = ", ".join(
        f"{dtype} {list(shape)}" for dtype, shape in zip(issued.dtypes, issued.shapes, strict=False)
    )
    text = f"{issued.op} #{issued.number}" + (f" ({tensors})" if tensors else "")
    if issued.group == DEFAULT_GROUP:
        return text
    members = f" ({named(issued.ranks)})" if issued.ranks else ""
    return f"{text} of group {issued.group}{members}"


def place_of(status: RankStatus) -> str:
    """Name the collective that a rank has in flight, else what it has called, and its line."""
    if status.state == "votes":
        return f"the wait for other ranks {f'after [{status.case}]' if status.case else f'in {status.call}'}"
    case = f" [{status.case}]" if status.case else ""
    issued = in_flight(status)
    call = name_of(issued) if issued is not None else status.call
    return f"{call}{' at ' if call else ''}{status.where}{case}"


class _Ranks:
    """The statuses of all ranks of a world, compared."""

    def __init__(self, statuses: Mapping[int, RankStatus], size: int, waits: Mapping[int, str]) -> None:
        self._statuses = statuses
        self._waits = waits
        self._size = size
        self._issued: dict[int, dict[tuple[str, int], Issued]] = {
            rank: {(issued.group, issued.number): issued for issued in each.issued}
            for rank, each in statuses.items()
        }

    def mismatch(self, *, include_ended: bool = False) -> Diagnosis | None:
        """Find a collective that ranks have begun as different ones."""
        for issued in (each for rank in self._issued.values() for each in rank.values()):
            key = issued.group, issued.number
            # torch may give groups of other ranks the same name.
            begun = {
                rank: found[key]
                for rank, found in self._issued.items()
                if key in found and found[key].ranks in ((), issued.ranks)
            }
            kinds: dict[object, list[int]] = defaultdict(list)
            for rank, each in begun.items():
                kinds[_kind(each, begun.values())].append(rank)
            if len(kinds) > 1 and (include_ended or any(each.in_flight for each in begun.values())):
                parties = sorted(kinds.values(), key=len)
                parts = " while ".join(
                    f"{named(ranks)} {self._verb(ranks, begun)} {name_of(begun[ranks[0]])}"
                    for ranks in parties[:_MOST_PARTS]
                )
                more = sum(map(len, parties[_MOST_PARTS:]))
                parts += f", and {more} ranks more did otherwise" if more else ""
                few = frozenset(parties[0]) if len(parties[0]) < len(parties[-1]) else frozenset[int]()
                return Diagnosis(f"mismatch: {parts}", few, is_hopeless=True, mismatch=issued)
        return None

    def _verb(self, ranks: list[int], begun: Mapping[int, Issued]) -> str:
        if all(self._statuses[rank].state == "idle" for rank in ranks):
            return "called"
        waits = any(begun[rank].in_flight for rank in ranks)
        return ("is in" if waits else "was in") if len(ranks) == 1 else ("are in" if waits else "were in")

    def standstill(self, patience: float) -> Diagnosis | None:
        """Find ranks that wait in a collective which others have not begun.

        Args:
            patience: seconds; a collective with a shorter timeout ends by itself.
        """
        waiting: dict[int, Issued] = {}
        for rank, issued in self._issued.items():
            in_vain = [each for each in issued.values() if each.in_flight and self._missing(each)]
            if in_vain:
                waiting[rank] = in_vain[0]  # the oldest
        stopped = [rank for rank, each in self._statuses.items() if each.state == "stopped"]
        if not waiting and not stopped:
            return self._all_wait() or self._unknown_root() or self._late_for_a_vote()
        missing = {rank: self._missing(issued) for rank, issued in waiting.items()}
        culprits = {rank for ranks in missing.values() for rank in ranks if rank not in waiting}
        stuck = {*waiting, *stopped, *self._in_state("votes"), *self._in_state("idle"), *self._waits}
        sentence = self._describe_waiting(waiting, missing) if waiting else f"{named(stopped)} is stopped"
        ends_by_itself = any(issued.timeout < patience for issued in waiting.values())
        is_hopeless = len(stuck) == self._size and not ends_by_itself
        return Diagnosis(sentence, frozenset(culprits or stopped), is_hopeless)

    def _all_wait(self) -> Diagnosis | None:
        """Find ranks that wait for what no rank has begun when no other rank can begin it."""
        ended, voters = self._in_state("idle"), self._in_state("votes")
        if not self._waits or len({*self._waits, *ended, *voters}) < self._size:
            return None
        said = _few([f"rank {rank} waits {text}" for rank, text in sorted(self._waits.items())], "ranks")
        if not ended and not voters:
            return Diagnosis(f"deadlock: {said}", frozenset(), is_hopeless=True)
        others = [f"{named(ended)} {'has' if len(ended) == 1 else 'have'} ended the test"] if ended else []
        others += [f"rank {rank} is in {place_of(self._statuses[rank])}" for rank in voters]
        return Diagnosis(
            f"{said}, and {_few(others, 'ranks')}", frozenset({*ended, *voters}), is_hopeless=True
        )

    def _unknown_root(self) -> Diagnosis | None:
        """Suspect different roots, which are not recorded, where all ranks are in the same collective."""
        first = [
            next((each for each in rank.values() if each.in_flight), None) for rank in self._issued.values()
        ]
        alike = {name_of(each) if each is not None else "" for each in first}
        if len(first) < self._size or len(alike) > 1 or first[0] is None or first[0].op not in _ROOTED:
            return None
        sentence = f"all ranks wait in {name_of(first[0])}: do all name the same source or destination?"
        return Diagnosis(sentence, frozenset(), is_hopeless=False)

    def _late_for_a_vote(self) -> Diagnosis | None:
        """Find ranks that wait at the end of a case for others that wait in no collective."""
        voters = self._in_state("votes")
        late = [rank for rank in self._statuses if rank not in voters]
        if not voters or not late or len(self._statuses) < self._size:
            return None
        waits = "waits" if len(voters) == 1 else "wait"
        where = _few([f"rank {rank} is at {self._statuses[rank].where}" for rank in late], "ranks")
        status = self._statuses[voters[0]]
        at = f"at the end of [{status.case}]" if status.case else f"in {status.call}"
        sentence = f"{named(voters)} {waits} {at} for {named(late)}: {where}"
        return Diagnosis(sentence, frozenset(late), is_hopeless=False)

    def _in_state(self, state: str) -> list[int]:
        return [rank for rank, each in self._statuses.items() if each.state == state]

    def _missing(self, issued: Issued) -> list[int]:
        """Return the members of its group that have begun neither this collective nor a later one."""
        latest = {
            rank: max((each.number for each in status.issued if each.group == issued.group), default=0)
            for rank, status in self._statuses.items()
        }
        members = issued.ranks or latest
        return [rank for rank in members if rank in latest and latest[rank] < issued.number]

    def _describe_waiting(self, waiting: Mapping[int, Issued], missing: Mapping[int, list[int]]) -> str:
        """Return which rank keeps the others waiting, and where it is instead."""
        rank = min(waiting, key=lambda rank: (any(other in waiting for other in missing[rank]), rank))
        absent = missing[rank]
        alike = [r for r in waiting if name_of(waiting[r]) == name_of(waiting[rank])]
        if any(other in waiting for other in absent):
            alike_by: dict[str, list[int]] = defaultdict(list)
            for r in sorted(waiting):
                alike_by[f"in {name_of(waiting[r])} for {named(missing[r])}"].append(r)
            parts = [f"{named(of)} wait{'s' * (len(of) == 1)} {what}" for what, of in alike_by.items()]
            return f"deadlock: {_few(parts, 'collectives')}"
        where = _few([self._place(other) for other in absent], "ranks")
        waits = "waits" if len(alike) == 1 else "wait"
        return f"{named(alike)} {waits} in {name_of(waiting[rank])}, which {where}"

    def _place(self, rank: int) -> str:
        status = self._statuses[rank]
        match status.state:
            case "idle":
                return f"rank {rank} never reached: it has ended the test"
            case "votes" if not status.case:
                return f"rank {rank} never reached: it waits for others in {status.call}"
            case "votes":
                what = "" if status.case.startswith(TRIAL) else "the subtest "
                return f"rank {rank} never reached: it has ended {what}[{status.case}]"
            case "stopped":
                return f"rank {rank} did not reach: it is stopped"
            case "silent":
                return f"rank {rank} did not reach: it is not responding, at {status.where}"
            case "runs" if rank in self._waits:
                return f"rank {rank} never reached: it waits {self._waits[rank]}"
            case "runs" | "reports":
                call = f"in {status.call} " if status.call else ""
                return f"rank {rank} never reached: it is {call}at {status.where}"


def _kind(issued: Issued, others: Iterable[Issued]) -> object:
    """Return what has to be equal in one collective on all ranks."""
    ops = {each.op for each in others}
    if len(ops) > 1:
        return issued.op
    return (
        issued.dtypes if issued.op in _EQUAL_DTYPES else (),
        tuple(map(math.prod, issued.shapes)) if issued.op in _EQUAL_SIZES else (),
    )


def named(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 2-7"; of many that do not follow each other, the first and a count."""
    runs: list[list[int]] = []
    for rank in (numbers := sorted(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    if len(words) > _MOST_RUNS:
        more = sum(map(len, runs[_MOST_RUNS - 1 :]))
        words[_MOST_RUNS - 1 :] = [f"{more} more"]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(words)}"


def _few(parts: list[str], of: str) -> str:
    """Join what is said of several ranks; of many the first, and how many there are besides."""
    more = len(parts) - _MOST_PARTS
    return "; ".join(parts[:_MOST_PARTS] + ([f"and so on, {more} more {of}"] if more > 0 else []))


def _renumber(statuses: Mapping[int, RankStatus]) -> dict[int, RankStatus]:
    """Count the collectives of each group from the test's beginning, where any rank knows when that was.

    All ranks had seen equally many then, or the world would not have got the test.
    """
    before: dict[str, int] = {}
    for each in statuses.values():
        before |= each.before
    return {
        rank: replace(
            each,
            issued=tuple(
                replace(issued, number=issued.number - (before | each.before).get(issued.group, 0))
                for issued in each.issued
            ),
        )
        for rank, each in sorted(statuses.items())  # they answer in any order
    }
