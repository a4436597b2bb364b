"""The run of one item on the ranks of a world, to the last rank's end, its deadline, or a standstill.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

from pluggy import HookRelay

from lockstep.exceptions import WorldError
from lockstep.launch.multiprocessing_internals import pickle_message
from lockstep.protocol import (
    REBUILT,
    TRIAL,
    AbortGroup,
    Agreed,
    Collecting,
    Finished,
    FromRank,
    ItemStarted,
    Part,
    Progress,
    RankStatus,
    Ready,
    Reported,
    RunItem,
    StartFailed,
    ToRank,
    Vote,
    Warned,
)
from lockstep.world.clock import Clock
from lockstep.world.diagnosis import Diagnosis, diagnose, find_mismatch, in_flight
from lockstep.world.handle import RankHandle, receive, request_statuses
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck, is_of_phase, label_of
from lockstep.world.standstill import Probes, Standstill

_BEFORE_TEARDOWN = 2
"""Phases of an item."""


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
        outcomes: What the ranks have sent so far, in rank order.
        parts: What features note of the run, by the name of each; also of its outcome.
    """

    def __init__(self, order: RunItem, timeout: float, hook: HookRelay) -> None:
        self.order = order
        self.label = label_of(order.nodeid, order.preparation)
        self.paused: set[int] = set()
        self.may_pause: set[int] = set()
        self.parts: dict[str, Any] = {}
        self.outcomes: Sequence[RankOutcome] = ()
        self._hook = hook
        self.clock = Clock(timeout)
        self._standstill = Standstill()

    def run(self, handles: Sequence[RankHandle]) -> ItemOutcome:
        """Send the ranks the order, and wait for the end of the item; return what each rank said of it.

        Args:
            handles: the ranks, in rank order.

        Raises:
            WorldError: a rank has left its session.
        """
        self._handles = handles
        self._probes = Probes(handles)
        self.outcomes = [RankOutcome(handle.rank, host=handle.host, spec=handle.spec) for handle in handles]
        _send(self.order, handles)
        self._hook.pytest_ranks_run_begins(run=self)
        clock = self.clock
        try:
            while pending := self._pending():
                grace = clock.grace if self._without_failure(pending) else math.inf
                until = min(clock.deadline, self._probes.due, grace)
                for rank, message in receive(handles, until - time.monotonic()):
                    self._handle(rank, message)
                self._end_what_is_over(self._pending())
        finally:
            self._hook.pytest_ranks_run_ended(run=self)
        return self._outcome()

    def _outcome(self) -> ItemOutcome:
        if all(isinstance(outcome.fate, Died) for outcome in self.outcomes):
            for each in self.outcomes:
                each.excuse = ""  # no rank is left that could say how the test went on
        clock, now = self.clock, time.monotonic()
        self._standstill.compare_failed_cases(self._size())
        found = self._standstill.diagnosis = self._find_diagnosis()
        outcome = ItemOutcome(
            ranks=tuple(self.outcomes),
            timeout=clock.timeout,
            timed_out=now >= clock.deadline,
            seconds=now - clock.begun,
            diagnosis=found,
            diagnoses=self._standstill.cases,
            preparation=self.order.preparation,
            parts=self.parts,
        )
        has_parts = self.order.parts or any(rank.parts() for rank in outcome.ranks)
        if has_parts or not (outcome.has_passed() and outcome.is_clean()):
            self._hook.pytest_ranks_outcome(run=self, outcome=outcome)
        return outcome

    def send(self, rank: int, part: Part) -> None:
        """Send a rank what a feature has for its half there."""
        self._handles[rank].send(part)

    def signal(self, rank: int, number: int) -> bool:
        """Send the process of a rank a signal; return False if it has ended."""
        if self._handles[rank].died is None:
            self._handles[rank].started.signal(number)
        return self._handles[rank].died is None

    def _pending(self) -> set[int]:
        return {outcome.rank for outcome in self.outcomes if outcome.fate is None}

    def _without_failure(self, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if not self.outcomes[rank].has_failed()}

    def _end_what_is_over(self, pending: set[int]) -> None:
        clock, late = self.clock, self._without_failure(pending)
        if self.paused & pending:
            # Forget what would end a rank early: whatever waits, waits for the person.
            clock.end_grace()
            self._probes.postpone()
            self._probes.answers.clear()
            self._standstill.forget_suspicion()
            return
        failed = any(outcome.has_failed() and not outcome.has_xpassed() for outcome in self.outcomes)
        if failed and not self.may_pause & late:
            clock.begin_grace()
        now = time.monotonic()
        if now >= clock.deadline:
            self._give_up(pending)
        elif now >= clock.grace:
            # What has come by now counts: a rank that has failed itself may tear down in peace.
            self._end_grace(late)
        elif now >= self._probes.due:
            self._probe(pending)

    # Messages of ranks

    def _handle(self, rank: int, message: FromRank | Died) -> None:
        outcome = self.outcomes[rank]
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
                    message = replace(message, importing=self.clock.importing.get(rank, ""))
                else:
                    outcome.status = outcome.status or message.status
                outcome.fate = outcome.fate or message  # a rank may die after it has ended the item
                if outcome.fate is message and isinstance(message, Died):
                    outcome.excuse = self._hook.pytest_ranks_died(run=self, rank=rank, death=message) or ""
                self._count_votes()
            case Collecting(path):
                self.clock.begin_import(rank, path)
            case ItemStarted():
                self.clock.end_import(rank)
            case RankStatus() | Progress():
                self._probes.take(rank, message)
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
        voters = [outcome for outcome in self.outcomes if outcome.vote is not None]
        if not voters or any(outcome.vote is None and outcome.fate is None for outcome in self.outcomes):
            return
        voters = [each for each in voters if each.vote is not None and each.vote.inside] or voters
        votes = []
        for outcome in self.outcomes:
            vote = outcome.vote or Vote("the end of the test", "died" if outcome.excuse else "ended")
            if (vote.case, vote.outcome) == (self._standstill.aborted, "passed"):
                # A case that stood still has failed, though the test caught the error that freed it.
                vote = replace(vote, outcome="failed")
            votes.append(vote)
        if any(outcome.vote and not outcome.vote.inside for outcome in voters):
            self._standstill.aborted = ""
        if all(outcome.vote and outcome.vote.outcome == REBUILT for outcome in voters):
            for each in self.outcomes:
                each.has_left_world = bool(each.excuse)
            self._standstill.forget_suspicion()  # it was of the earlier groups
        if all(vote.renews_deadline for vote in votes):
            self.clock.restart()
        parts: dict[str, Any] = {}
        self._hook.pytest_ranks_agreed(run=self, votes=votes, parts=parts)
        for outcome in voters:
            outcome.vote = None
        _send(Agreed(tuple(votes), parts), [self._handles[outcome.rank] for outcome in voters])

    # Standstill

    def _probe(self, pending: set[int]) -> None:
        """Look at what came of the last probe, and send the next one.

        A standstill must be seen twice: a rank may have been met on its way.
        """
        answers = self._probes.answers
        for rank in pending - answers.keys():
            if self._handles[rank].is_stopped():
                answers[rank] = answer = self._handles[rank].describe_silent()
                self._hook.pytest_ranks_answer(run=self, rank=rank, answer=answer)
        silent = (self._probes.unanswered & pending) - answers.keys()
        names_place = any(self._hook.pytest_ranks_probe(run=self, silent=silent))
        for rank in pending & answers.keys():
            if answers[rank].state == "idle":
                del answers[rank]  # it has not begun this item: it would have sent the end of it before
        found = None
        if pending & answers.keys() and not self.has_lost():
            found = self._diagnose(answers)
        if self._standstill.confirm(found) and found is not None:
            lost = self._hook.pytest_ranks_standstill(run=self, found=found, pending=pending)
            for rank in lost or ():
                self._handles[rank].started.kill()  # the others notice its death, and go on
            if lost is None and found.is_hopeless:
                self._end_standstill(found, pending)
            if lost or (lost is None and found.is_hopeless):
                # The answers to the next probe may come before a rank has noticed.
                self._standstill.forget_suspicion()
        self._probes.send(names_place)

    def _diagnose(self, statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
        waits: dict[int, str] = {}
        for found in self._hook.pytest_ranks_waits(run=self, statuses=statuses):
            waits |= found
        return diagnose(statuses, self._size(), self.clock.timeout, waits)

    def has_lost(self) -> bool:
        """Whether a rank has died, with an excuse, and the others are still in its world, and differ."""
        return any(each.excuse and not each.has_left_world for each in self.outcomes)

    def _size(self) -> int:
        """Return how many ranks the world has now."""
        return sum(not each.has_left_world for each in self.outcomes)

    def _end_standstill(self, found: Diagnosis, pending: set[int]) -> None:
        """Fail a case of `run_subtests` so that the others can run, once; give up anything else."""
        answers = self._probes.answers
        cases = {answers[rank].case for rank in pending if rank in answers}
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
        self._end(ranks, self.request_statuses(ranks), phases)

    def _end(self, ranks: set[int], answers: dict[int, RankStatus], phases: dict[int, int]) -> None:
        for rank in ranks & self._pending():
            outcome = self.outcomes[rank]
            outcome.status = outcome.status or answers[rank]
            handle = self._handles[rank]
            printed = handle.log(), handle.output().captured()
            importing = self.clock.importing.get(rank, "")
            outcome.fate = Stuck(answers[rank], time.time(), phases[rank], *printed, importing)

    def _end_grace(self, late: set[int]) -> None:
        """Give up ranks that others wait for without result, but none that reports, tears down or is slow."""
        self._probes.postpone()  # so that the loop waits for something
        phases = {rank: self._handles[rank].phases_over() for rank in late}
        answers = self.request_statuses(late)
        late = self._without_failure(late & self._pending())  # some may have reported a failure by now
        may_report = {rank for rank in late if answers[rank].state in ("reports", "silent")}
        if self.clock.is_last_grace():
            may_report = set()
        # Its test is over, and it waits for no other rank: it has until the deadline.
        tearing_down = {rank for rank in late if phases[rank] >= _BEFORE_TEARDOWN}
        clearing = {rank for rank in tearing_down if in_flight(answers[rank]) is None}
        if may_report | clearing:
            self.clock.prolong_grace()
        if not may_report:
            self._end(late - clearing, answers, phases)

    def request_statuses(self, ranks: set[int]) -> dict[int, RankStatus]:
        """Request the status of ranks; return the answers of those that have not died."""
        found = request_statuses([self._handles[rank] for rank in sorted(ranks)], self._handle)
        self._probes.answers = {**found}
        return found

    def _find_diagnosis(self) -> Diagnosis | None:
        """Return what was wrong between ranks that were ended or that failed, as far as is known."""
        if self._standstill.diagnosis is not None or self.has_lost():
            return self._standstill.diagnosis
        statuses = {outcome.rank: outcome.status for outcome in self.outcomes if outcome.status is not None}
        if not statuses:
            return None
        stuck = [outcome for outcome in self.outcomes if isinstance(outcome.fate, Stuck)]
        if stuck and not any(outcome.has_failed() for outcome in self.outcomes):
            statuses |= self.request_statuses({handle.rank for handle in self._handles} - statuses.keys())
            return self._diagnose(statuses)
        return find_mismatch(statuses, self._size(), include_ended=not stuck)


def _send(message: ToRank, handles: Iterable[RankHandle]) -> None:
    """Send a message, packed once for all.

    No other frame has the packed one: Python 3.13 and later print a traceback when one that a run's traceback
    holds, such as that of Ctrl-C, is freed.
    """
    packed = pickle_message(message)
    for handle in handles:
        handle.send_packed(packed)
