"""The run of one item on the ranks of a world, to the last rank's end, its deadline, or a standstill.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from pluggy import HookRelay

from lockstep.exceptions import WorldError
from lockstep.launch.multiprocessing_internals import pickle_message
from lockstep.protocol import (
    DEFAULT_GROUP,
    REBUILT,
    TRIAL,
    AbortGroup,
    Agreed,
    Collecting,
    Finished,
    FromRank,
    ItemStarted,
    Part,
    Probe,
    Progress,
    RankStatus,
    Ready,
    Reported,
    RunItem,
    StartFailed,
    Vote,
    Warned,
)
from lockstep.world.diagnosis import Diagnosis, diagnose, find_mismatch, in_flight, name_of
from lockstep.world.handle import ANSWER_WITHIN, RankHandle, receive
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck, is_of_phase, label_of
from lockstep.world.standstill import Standstill

GRACE = 0.4
"""Seconds that the other ranks get once a rank has failed: enough to see a broken connection."""
MAX_GRACE = 3.0
"""Seconds that a rank gets at most which writes its report, or does not answer: a busy machine
takes long."""
PROBE_EVERY = 0.3
"""Seconds between looks at ranks that have nothing to say."""
_BEFORE_TEARDOWN = 2
"""Phases of an item."""
COLLECT_WITHIN = 60.0
"""Seconds, at least, that importing a test file may take; it counts for no test."""


@dataclass(frozen=True, slots=True)
class Moment:
    """An item that runs, when its ranks are about to be probed again."""

    label: str
    elapsed: float
    """Seconds since it began."""
    limit: float
    """Seconds from its beginning to its deadline; infinite where a person may take part."""
    importing: str
    """The file that a rank imports, else ""."""
    silent: set[int]
    """Ranks that run it and have not answered the last probe."""
    outcomes: Sequence[RankOutcome]
    """What the ranks have sent so far."""


class ItemRun:
    """Runs one item on all ranks.

    Once a rank has failed or died the others get a moment to notice. A rank that still runs then, or when
    time is over, or when no rank can get on any more, is asked for its status and counts as stuck.

    Args:
        timeout: seconds for the item, without collection; infinity where a person may take part.
        hook: calls what features do during an item.

    Attributes:
        paused: Ranks that wait for a person, as a feature has found: nothing is over until they run again.
        may_pause: Ranks that may come to that: they are not ended because another has failed.
    """

    def __init__(self, order: RunItem, timeout: float, hook: HookRelay) -> None:
        self.order = order
        self.label = label_of(order.nodeid, order.preparation)
        self.paused: set[int] = set()
        self.may_pause: set[int] = set()
        self._hook = hook
        self._timeout = timeout
        self._begun = self._deadline = 0.0
        self._grace = self._last_grace = float("inf")
        self._collecting: dict[int, str] = {}
        self._answers: dict[int, RankStatus] = {}
        self._next_probe = 0.0
        self._unanswered: set[int] = set()
        self._standstill = Standstill()
        self.parts: dict[str, Any] = {}
        """What features note of the run, by the name of each; that of its outcome, too."""

    def run(self, handles: Sequence[RankHandle], meanwhile: Callable[[], None] | None = None) -> ItemOutcome:
        """Send the ranks the order, and wait for the end of the item; return what each rank said of it.

        Args:
            handles: the ranks, in rank order.
            meanwhile: called once the ranks have the order; must be short.

        Raises:
            WorldError: a rank has left its session.
        """
        self._handles = handles
        self._outcomes = [RankOutcome(handle.rank, host=handle.host, spec=handle.spec) for handle in handles]
        self._begun = now = time.monotonic()
        self._deadline, self._next_probe = now + self._timeout, now + PROBE_EVERY
        packed = pickle_message(self.order)
        self._hook.pytest_ranks_run_begins(run=self)
        for handle in handles:
            handle.send_packed(packed)
        if meanwhile is not None:
            meanwhile()
        try:
            while pending := self._pending():
                grace = self._grace if self._without_failure(pending) else float("inf")
                self._listen(min(self._deadline, self._next_probe, grace) - time.monotonic())
                self._end_what_is_over(self._pending())
        finally:
            if self._next_probe > self._begun + PROBE_EVERY or self._answers:  # its ranks were probed
                self._hook.pytest_ranks_run_ended(run=self)
        if all(isinstance(outcome.fate, Died) for outcome in self._outcomes):
            for each in self._outcomes:
                each.excuse = ""  # no rank is left that could say how the test went on
        now = time.monotonic()
        timed_out = now >= self._deadline
        self._look_for_work_in_flight()
        self._standstill.compare_failed_cases(self._size())
        seconds = now - self._begun
        found = self._standstill.diagnosis = self._find_diagnosis()
        self._collect_records()
        before, cases, ranks = self.order.preparation, self._standstill.cases, tuple(self._outcomes)
        outcome = ItemOutcome(ranks, self._timeout, timed_out, seconds, found, cases, before, self.parts)
        self._hook.pytest_ranks_outcome(outcome=outcome, order=self.order)
        return outcome

    def send(self, rank: int, part: Part) -> None:
        """Send a rank what a feature has for its half there."""
        self._handles[rank].send(part)

    @property
    def outcomes(self) -> Sequence[RankOutcome]:
        """Outcomes of the ranks so far, in rank order."""
        return self._outcomes

    def signal(self, rank: int, number: int) -> bool:
        """Send the process of a rank a signal; return False if it has ended."""
        if self._handles[rank].died is None:
            self._handles[rank].started.signal(number)
        return self._handles[rank].died is None

    def _pending(self) -> set[int]:
        return {outcome.rank for outcome in self._outcomes if outcome.fate is None}

    def _without_failure(self, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if not self._outcomes[rank].has_failed()}

    def _end_what_is_over(self, pending: set[int]) -> None:
        now = time.monotonic()
        if self.paused & pending:
            # Forget what would end a rank early: whatever waits, waits for the person.
            self._grace = self._last_grace = float("inf")
            self._next_probe = now + PROBE_EVERY
            self._standstill.forget_suspicion()
            self._answers.clear()
            return
        failed = any(outcome.has_failed() and not outcome.has_xpassed() for outcome in self._outcomes)
        if failed and not self.may_pause & self._without_failure(pending):
            self._grace = min(self._grace, now + GRACE)
            self._last_grace = min(self._last_grace, now + MAX_GRACE)
        if now >= self._deadline:
            self._give_up(pending)
        elif now >= self._grace:
            # What has come by now counts: a rank that has failed itself may tear down in peace.
            self._end_grace(self._without_failure(pending))
        elif now >= self._next_probe:
            self._probe(pending)

    # Messages of ranks

    def _listen(self, timeout: float) -> None:
        for rank, message in receive(self._handles, timeout):
            self._handle(rank, message)

    def _handle(self, rank: int, message: FromRank | Died) -> None:
        outcome = self._outcomes[rank]
        match message:
            case Reported(data, doing):
                outcome.reports.append(data)
                if is_of_phase(data):
                    outcome.status = outcome.status or doing
                elif doing is not None and doing.case:
                    self._standstill.note_failure(doing.case, rank, doing)
            case Part():
                self._hook.pytest_ranks_message(run=self, rank=rank, part=message)
            case Warned():
                outcome.warnings.append(message)
            case Vote():
                outcome.vote = message
                self._count_votes()
            case Finished() | Died():
                if isinstance(message, Died):
                    message = replace(message, importing=self._collecting.get(rank, ""))
                else:
                    outcome.status = outcome.status or message.status
                outcome.fate = outcome.fate or message  # a rank may die after it has ended the item
                if outcome.fate is message and isinstance(message, Died):
                    outcome.excuse = self._hook.pytest_ranks_died(run=self, rank=rank, death=message) or ""
                self._count_votes()
            case Collecting(path):
                self._collecting[rank] = path
                self._deadline = time.monotonic() + max(self._timeout, COLLECT_WITHIN)
            case ItemStarted():
                self._collecting.pop(rank, None)
                if not self._collecting:
                    self._deadline = time.monotonic() + self._timeout
            case RankStatus():
                self._unanswered.discard(rank)
                self._answers[rank] = message
                self._hook.pytest_ranks_answer(run=self, rank=rank, answer=message)
            case Progress():
                self._unanswered.discard(rank)
                self._hook.pytest_ranks_answer(run=self, rank=rank, answer=message)
            case Ready():
                pass
            case StartFailed(text):
                raise WorldError(f"rank {rank} ended its session: {text}\n{self._handles[rank].log()}")
            case _:
                assert_never(message)

    def _count_votes(self) -> None:
        """Once no rank is on its way to the end of the case, send all votes to those that wait there.

        Where ranks meet inside of a case that others have left, they alone are answered: they leave it too.
        """
        voters = [outcome for outcome in self._outcomes if outcome.vote is not None]
        if not voters or any(outcome.vote is None and outcome.fate is None for outcome in self._outcomes):
            return
        voters = [each for each in voters if each.vote is not None and each.vote.inside] or voters
        votes = []
        for outcome in self._outcomes:
            vote = outcome.vote or Vote("the end of the test", "died" if outcome.excuse else "ended")
            if (vote.case, vote.outcome) == (self._standstill.aborted, "passed"):
                # A case that stood still has failed, though the test caught the error that freed it.
                vote = replace(vote, outcome="failed")
            votes.append(vote)
        if any(outcome.vote and not outcome.vote.inside for outcome in voters):
            self._standstill.aborted = ""
        if all(outcome.vote and outcome.vote.outcome == REBUILT for outcome in voters):
            for each in self._outcomes:
                each.has_left_world = bool(each.excuse)
            self._standstill.forget_suspicion()  # it was of the earlier groups
        if all(vote.renews_deadline for vote in votes):
            self._deadline = time.monotonic() + self._timeout
        parts: dict[str, Any] = {}
        self._hook.pytest_ranks_agreed(run=self, votes=votes, parts=parts)
        agreed = pickle_message(Agreed(tuple(votes), parts))
        for outcome in voters:
            outcome.vote = None
            self._handles[outcome.rank].send_packed(agreed)

    # Standstill

    def _probe(self, pending: set[int]) -> None:
        """Look at what came of the last probe, and send the next one.

        A standstill must be seen twice: a rank may have been met on its way.
        """
        self._next_probe = time.monotonic() + PROBE_EVERY
        for rank in pending - self._answers.keys():
            if self._handles[rank].is_stopped():
                self._answers[rank] = answer = self._handles[rank].describe_silent()
                self._hook.pytest_ranks_answer(run=self, rank=rank, answer=answer)
        names_place = any(self._hook.pytest_ranks_probe(moment=self._moment(pending)))
        for rank in pending & self._answers.keys():
            if self._answers[rank].state == "idle":
                del self._answers[rank]  # it has not begun this item: it would have sent the end of it before
        found = None
        if pending & self._answers.keys() and not self._has_lost():
            found = diagnose(self._answers, self._size(), self._timeout)
        if self._standstill.confirm(found) and found is not None:
            lost = self._hook.pytest_ranks_standstill(run=self, found=found, pending=pending)
            for rank in lost or ():
                self._handles[rank].started.kill()  # the others notice its death, and go on
            if lost is None and found.is_hopeless:
                self._end_standstill(found, pending)
            if lost or (lost is None and found.is_hopeless):
                # The answers to the next probe may come before a rank has noticed.
                self._standstill.forget_suspicion()
        self._answers.clear()
        for handle in self._handles:
            if handle.rank not in self._unanswered:  # a write to a full wire would wait until the rank reads
                self._unanswered.add(handle.rank)
                handle.send(Probe(names_place=names_place))

    def _has_lost(self) -> bool:
        """Whether a rank has died, with an excuse, and the others are still in its world, and differ."""
        return any(each.excuse and not each.has_left_world for each in self._outcomes)

    def _size(self) -> int:
        """Return how many ranks the world has now."""
        return sum(not each.has_left_world for each in self._outcomes)

    def _moment(self, pending: set[int]) -> Moment:
        silent = (self._unanswered & pending) - self._answers.keys()
        elapsed, limit = time.monotonic() - self._begun, self._deadline - self._begun
        importing = min(self._collecting.values(), default="")
        return Moment(self.label, elapsed, limit, importing, silent, self._outcomes)

    def _end_standstill(self, found: Diagnosis, pending: set[int]) -> None:
        """Fail a case of `run_subtests` so that the others can run, once; give up anything else."""
        cases = {self._answers[rank].case for rank in pending if rank in self._answers}
        if len(cases) > 1 and all(case.startswith(TRIAL) for case in cases):
            return  # no rank is in a trial before all have ended the one before: one is on its way
        case = cases.pop() if len(cases) == 1 else ""
        if not self._standstill.abort(case, found):
            self._give_up(pending)
            return
        for rank in pending:
            self._handles[rank].send(AbortGroup(case))

    def _give_up(self, ranks: set[int]) -> None:
        phases = {rank: self._handles[rank].phases_over() for rank in ranks}  # asking may wake a rank
        self._end(ranks, self._request_statuses(ranks), phases)

    def _end(self, ranks: set[int], answers: dict[int, RankStatus], phases: dict[int, int]) -> None:
        for rank in ranks & self._pending():
            outcome = self._outcomes[rank]
            outcome.status = outcome.status or answers[rank]
            handle = self._handles[rank]
            printed = handle.log(), handle.output().captured()
            importing = self._collecting.get(rank, "")
            outcome.fate = Stuck(answers[rank], time.time(), phases[rank], *printed, importing)

    def _end_grace(self, late: set[int]) -> None:
        """Give up ranks that others wait for without result, but none that reports, tears down or is slow."""
        self._next_probe = time.monotonic() + PROBE_EVERY  # so that the loop waits for something
        phases = {rank: self._handles[rank].phases_over() for rank in late}
        answers = self._request_statuses(late)
        late = self._without_failure(late & self._pending())  # some may have reported a failure by now
        may_report = {rank for rank in late if answers[rank].state in ("reports", "silent")}
        if time.monotonic() >= self._last_grace:
            may_report = set()
        # Its test is over, and it waits for no other rank: it has until the deadline.
        tearing_down = {rank for rank in late if phases[rank] >= _BEFORE_TEARDOWN}
        clearing = {rank for rank in tearing_down if in_flight(answers[rank]) is None}
        if may_report | clearing:
            self._grace = time.monotonic() + GRACE
        if not may_report:
            self._end(late - clearing, answers, phases)

    def _request_statuses(self, ranks: set[int]) -> dict[int, RankStatus]:
        """Request the status of ranks; return the answers of those that have not died."""
        self._answers.clear()
        for rank in ranks:
            self._handles[rank].send(Probe(full=True))
        until = time.monotonic() + ANSWER_WITHIN
        while (silent := self._without_full_answer(ranks)) and time.monotonic() < until:
            self._listen(until - time.monotonic())
        for rank in silent - self._answers.keys():
            self._answers[rank] = self._handles[rank].describe_silent()
        return {rank: answer for rank, answer in self._answers.items() if rank in ranks}

    def _without_full_answer(self, ranks: set[int]) -> set[int]:
        """Return the living ranks without one: what has come may answer an earlier probe, and say less."""
        full = {rank for rank, answer in self._answers.items() if answer.record is not None}
        return {rank for rank in ranks - full if self._handles[rank].died is None}

    def _find_diagnosis(self) -> Diagnosis | None:
        """Return what was wrong between ranks that were ended or that failed, as far as is known."""
        if self._standstill.diagnosis is not None or self._has_lost():
            return self._standstill.diagnosis
        statuses = {outcome.rank: outcome.status for outcome in self._outcomes if outcome.status is not None}
        if not statuses:
            return None
        stuck = [outcome for outcome in self._outcomes if isinstance(outcome.fate, Stuck)]
        if stuck and not any(outcome.has_failed() for outcome in self._outcomes):
            statuses |= self._request_statuses({handle.rank for handle in self._handles} - statuses.keys())
            return diagnose(statuses, self._size())
        return find_mismatch(statuses, self._size(), include_ended=not stuck)

    def _collect_records(self) -> None:
        """Take the flight records that ranks have sent; request the others where ranks may have parted."""
        for outcome in self._outcomes:
            if isinstance(outcome.fate, Stuck):
                outcome.record = outcome.fate.status.record
        ended = {each.rank for each in self._outcomes if isinstance(each.fate, Finished)}
        if not self._standstill.was_found() and len(ended) == len(self._outcomes):
            return
        for rank, status in self._request_statuses(ended).items():
            self._outcomes[rank].record = status.record

    def _look_for_work_in_flight(self) -> None:
        """Find out what is still in flight on ranks that ended after unequal numbers of collectives.

        The number alone proves nothing: it counts sends and receives too.
        """
        if self._has_lost():
            return
        finished = {each.rank: each.fate for each in self._outcomes if isinstance(each.fate, Finished)}
        if len({fate.collectives for fate in finished.values()}) < 2:
            return
        for rank, status in self._request_statuses(set(finished)).items():
            issued = in_flight(status)
            if issued is not None and issued.group == DEFAULT_GROUP:
                left = f"{name_of(issued)} in flight: not every rank has joined it"
                self._outcomes[rank].left_in_flight = left
