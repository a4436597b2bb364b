"""The controller's handle on a world: start N ranks, run a test on them, enforce the deadline, end them.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, assert_never

from harness.exceptions import WorldError
from harness.launch.processes import ProcessLauncher, RankProcess
from harness.protocol import (
    Agreed,
    Began,
    Broken,
    Close,
    Collecting,
    Doing,
    Finished,
    FromRank,
    Interrupt,
    RankSpec,
    Ready,
    Reported,
    RunItem,
    SessionSpec,
    ShowStacks,
    ToRank,
    Vote,
    Voted,
    Warned,
    WorldKey,
)

GRACE = 0.4
"""Seconds that the other ranks get once a rank has failed: enough to see a broken connection."""
PROBE_EVERY = 0.5
"""Seconds between looks at ranks that others have long finished before."""
ANSWER_WITHIN = 0.5
"""Seconds a rank gets to say what it is doing; a rank that holds the GIL cannot."""
MOST_OUTPUT = 6000
"""Characters of a dead rank's last output that are shown."""
COLLECT_WITHIN = 60.0
"""Seconds, at least, that importing a test file may take; it counts for no test."""
CLOSE_WITHIN = 10.0
"""Seconds a rank gets to tear down its session."""


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process ended in the middle of the test."""

    exitcode: int | None
    output: str
    at: float
    """Wall-clock time, as in pytest's reports."""
    phases_over: int = 0
    """How many phases of the item the rank had ended; it may not have sent the reports of all."""

    @property
    def how(self) -> str:
        if self.exitcode is None:
            return "closed its connection to the controller"
        if self.exitcode >= 0:
            return f"exited with code {self.exitcode}"
        try:
            return f"died: {signal.Signals(-self.exitcode).name}"
        except ValueError:
            return f"died: signal {-self.exitcode}"


@dataclass(frozen=True, slots=True)
class Stuck:
    """The rank was still running when its time was over, and was ended."""

    doing: Doing
    at: float
    phases_over: int = 0


Fate = Finished | Died | Stuck


@dataclass(slots=True)
class RankOutcome:
    """What one rank said of one item, and how it ended."""

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[Warned] = field(default_factory=list)
    fate: Fate | None = None
    vote: Vote | None = None
    left_in_flight: str | None = None
    """A collective of the default group that the rank had begun and others had not, at the item's end."""

    def has_failed(self) -> bool:
        """Whether the rank is known to have failed a phase (a failed subtest lets the test go on)."""
        return isinstance(self.fate, Died) or any(
            report["outcome"] == "failed" and report.get("$report_type") == "TestReport"
            for report in self.reports
        )


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """What all ranks said of one item, in rank order, and whether it ran into its deadline."""

    ranks: tuple[RankOutcome, ...]
    timeout: float
    timed_out: bool
    seconds: float
    """From the order to the last rank's end, collection included."""

    def is_clean(self) -> bool:
        """Whether the world can be trusted with another test."""
        finished = self.finished()
        return (
            len(finished) == len(self.ranks)
            and all(fate.usable for fate in finished)
            and len({(fate.collectives, fate.groups) for fate in finished}) == 1
            and not any(_tells_of_failure(report) for outcome in self.ranks for report in outcome.reports)
        )

    def finished(self) -> list[Finished]:
        """What the ranks that reached the end of the item said there, in rank order."""
        return [outcome.fate for outcome in self.ranks if isinstance(outcome.fate, Finished)]


def _tells_of_failure(report: dict[str, Any]) -> bool:
    """Whether a test raised; one that was expected to leaves its world no better."""
    return report["outcome"] == "failed" or (report["outcome"] == "skipped" and "wasxfail" in report)


def _without_failure(outcomes: list[RankOutcome], ranks: set[int]) -> set[int]:
    return {rank for rank in ranks if not outcomes[rank].has_failed()}


class World:
    """N ranks that share a default process group."""

    def __init__(self, key: WorldKey, name: str, session: SessionSpec, launcher: ProcessLauncher) -> None:
        self.key = key
        self.name = name
        self._session = session
        self._launcher = launcher
        self._directory = f"{launcher.directory}/{name}"
        self._specs: list[RankSpec] = []
        self._ranks: list[RankProcess] = []
        self._timeout = self._deadline = 0.0
        self._collecting: set[int] = set()
        self._died: dict[int, Died] = {}
        self._log_starts: dict[int, int] = {}

    def start(self, seed: int, basetemp: Path, timeout: float) -> None:
        """Start the ranks and wait until all of them stand ready.

        Raises:
            WorldError: a rank ended, or did not get ready in `timeout` seconds.
            LaunchError: ranks cannot be started on this machine at all.
        """
        deadline = time.monotonic() + timeout
        os.makedirs(self._directory, mode=0o700)
        self._specs = [
            RankSpec(
                rank, self.key, self._session, seed, self._directory, f"{basetemp}/{self.name}-rank{rank}"
            )
            for rank in range(self.key.size)
        ]
        self._ranks = self._launcher.start(self._specs, deadline)
        waiting = set(range(self.key.size))
        while waiting:
            for rank, message in self._receive(waiting, deadline - time.monotonic()):
                match message:
                    case Ready():
                        waiting.discard(rank)
                    case Broken(text):
                        raise WorldError(f"rank {rank} did not start: {text}\n{self._log(rank)}")
                    case Died():
                        raise WorldError(f"rank {rank} {message.how} while it started\n{message.output}")
            if waiting and time.monotonic() >= deadline:
                raise WorldError(self._not_ready(waiting, timeout))

    def _not_ready(self, waiting: set[int], timeout: float) -> str:
        outcomes = [RankOutcome(rank) for rank in range(self.key.size)]
        stacks = "\n".join(
            f"rank {rank}: {doing.stacks}" for rank, doing in self._ask(waiting, outcomes).items()
        )
        names = ", ".join(map(str, sorted(waiting)))
        return f"rank {names} of {self.key} did not get ready in {timeout:g} s\n{stacks}"

    # Running one item

    def run(self, order: RunItem, timeout: float) -> ItemOutcome:
        """Run one item on all ranks; return what each said of it, soon after `timeout` seconds at the latest.

        Once a rank has failed or died the others get a moment to notice; whoever still runs then, or when
        time is over, is asked what it is doing and counts as stuck.
        """
        begun = time.monotonic()
        self._timeout, self._deadline = timeout, begun + timeout
        outcomes = [RankOutcome(rank) for rank in range(self.key.size)]
        for rank in range(self.key.size):
            self._begin(rank, order)
        grace = probe = float("inf")
        while pending := {outcome.rank for outcome in outcomes if outcome.fate is None}:
            if len(pending) < len(outcomes):
                probe = min(probe, time.monotonic() + PROBE_EVERY)
            late = _without_failure(outcomes, pending)
            until = min(self._deadline, probe, grace if late else self._deadline)
            for rank, message in self._receive(pending, until - time.monotonic()):
                self._note(outcomes, rank, message)
            now = time.monotonic()
            if any(outcome.has_failed() for outcome in outcomes):
                grace = min(grace, now + GRACE)
            if now >= probe:
                probe = float("inf")
                if self._waits_in_vain(pending, outcomes):
                    self._give_up(outcomes, pending)
            if now >= min(self._deadline, grace):
                # What has come meanwhile counts: a rank that has failed itself may tear down in peace.
                late = _without_failure(outcomes, pending)
                self._give_up(outcomes, pending if now >= self._deadline else late)
        now = time.monotonic()
        outcome = ItemOutcome(tuple(outcomes), timeout, now >= self._deadline, now - begun)
        if len({fate.collectives for fate in outcome.finished()}) > 1:
            self._look_for_work_in_flight(outcomes)
        return outcome

    def _begin(self, rank: int, order: RunItem) -> None:
        spec = self._specs[rank]
        with open(spec.phases_path, "r+b") as phases:
            phases.write(b"0")  # not truncated first: some file systems then wait for the disk
        with contextlib.suppress(OSError):  # there is no log under -s
            self._log_starts[rank] = os.path.getsize(spec.log_path)
        self._send(rank, order)

    def _note(self, outcomes: list[RankOutcome], rank: int, message: FromRank | Died) -> None:
        outcome = outcomes[rank]
        match message:
            case Reported(data):
                outcome.reports.append(data)
            case Warned():
                outcome.warnings.append(message)
            case Voted(vote):
                outcome.vote = vote
                self._count_votes(outcomes)
            case Finished() | Died():
                outcome.fate = message
                self._count_votes(outcomes)
            case Collecting():
                self._collecting.add(rank)
                self._deadline = time.monotonic() + max(self._timeout, COLLECT_WITHIN)
            case Began():
                self._collecting.discard(rank)
                if not self._collecting:
                    self._deadline = time.monotonic() + self._timeout
            case Doing() | Ready():
                pass  # the answer to a question that is no longer asked
            case Broken(text):
                raise WorldError(f"rank {rank} left its session: {text}\n{self._log(rank)}")
            case _:
                assert_never(message)

    def _count_votes(self, outcomes: list[RankOutcome]) -> None:
        """Once no rank is under way to the point, tell those that wait there how all fared."""
        voters = [outcome for outcome in outcomes if outcome.vote is not None]
        if not voters or any(outcome.vote is None and outcome.fate is None for outcome in outcomes):
            return
        votes = tuple(outcome.vote or Vote("the end of the test", "ended") for outcome in outcomes)
        for outcome in voters:
            outcome.vote = None
            self._send(outcome.rank, Agreed(votes))

    def _waits_in_vain(self, pending: set[int], outcomes: list[RankOutcome]) -> bool:
        """Whether ranks wait in collectives that a rank which has ended the test never began.

        Some collectives let ranks go before others, so it counts whether that rank had begun it; and as
        sends and receives are numbered too, all that still run must be waiting.
        """
        doing = self._ask(pending, outcomes)
        waiting = [doing[rank] for rank in pending if outcomes[rank].fate is None and rank in doing]
        ended = [outcome.fate.collectives for outcome in outcomes if isinstance(outcome.fate, Finished)]
        if not waiting or not ended or not all(each.on_world for each in waiting):
            return False
        return max(each.sequence for each in waiting) > min(ended)

    def _look_for_work_in_flight(self, outcomes: list[RankOutcome]) -> None:
        """Ask ranks that ended after unequal numbers of collectives what is still under way.

        The number alone tells nothing certain: it counts sends and receives too.
        """
        finished = {outcome.rank for outcome in outcomes if isinstance(outcome.fate, Finished)}
        for rank, doing in self._ask(finished, outcomes).items():
            outcomes[rank].left_in_flight = doing.collective if doing.on_world else None

    def _give_up(self, outcomes: list[RankOutcome], ranks: set[int]) -> None:
        pending = {rank for rank in ranks if outcomes[rank].fate is None}
        for rank, doing in self._ask(pending, outcomes).items():
            if outcomes[rank].fate is None:
                outcomes[rank].fate = Stuck(doing, time.time(), self._phases_over(rank))

    def _ask(self, ranks: set[int], outcomes: list[RankOutcome]) -> dict[int, Doing]:
        """Ask ranks what they are doing; what else they say meanwhile goes into `outcomes`."""
        answers: dict[int, Doing] = {}
        for rank in ranks:
            self._send(rank, ShowStacks())
        until = time.monotonic() + ANSWER_WITHIN
        while (silent := ranks - answers.keys() - self._died.keys()) and time.monotonic() < until:
            for rank, message in self._receive(silent, until - time.monotonic()):
                if isinstance(message, Doing):
                    answers[rank] = message
                else:
                    self._note(outcomes, rank, message)
        for rank in ranks - answers.keys() - self._died.keys():
            answers[rank] = self._dump(rank)
        return answers

    def _dump(self, rank: int) -> Doing:
        """Read the stacks of a rank that does not answer; its faulthandler needs no GIL to write them."""
        path = Path(self._specs[rank].stacks_path)
        with contextlib.suppress(OSError):
            before = path.stat().st_size
            os.kill(self._pid(rank), signal.SIGUSR1)
            time.sleep(0.1)  # the handler gives no sign when it is done
            if text := path.read_text()[before:]:
                return Doing(text, "code that holds the GIL")
        return Doing(
            "(it does not answer)", "a place it cannot tell: it is stopped, or blocked in a system call"
        )

    # The wire

    def _pid(self, rank: int) -> int:
        pid = self._ranks[rank].process.pid
        assert pid is not None
        return pid

    def _send(self, rank: int, message: ToRank) -> None:
        with contextlib.suppress(OSError):  # a rank that has died is noticed where its end is awaited
            self._ranks[rank].wire.send(message)

    def _receive(self, ranks: set[int], timeout: float) -> list[tuple[int, FromRank | Died]]:
        """Wait for messages or ends of ranks; return those of one moment, a rank's words before its end."""
        sources: dict[Any, int] = {}
        for rank in ranks - self._died.keys():
            sources[self._ranks[rank].wire] = rank
            sources[self._ranks[rank].process.sentinel] = rank
        received: list[tuple[int, FromRank | Died]] = []
        for source in wait(list(sources), max(timeout, 0.0)):
            rank = sources[source]
            if rank not in self._died:
                received.extend((rank, message) for message in self._read(rank, source))
        return received

    def _read(self, rank: int, source: Any) -> list[FromRank | Died]:
        """Read what came from one source: a batch of messages, or the end of the rank's wire or process."""
        wire, process = self._ranks[rank].wire, self._ranks[rank].process
        messages: list[FromRank | Died] = []
        try:
            if source is wire:
                return [*wire.recv()]
            while wire.poll():  # its last words
                messages.extend(wire.recv())
        except (EOFError, OSError):
            process.join(5.0)  # its exit status follows the end of the wire
        died = Died(process.exitcode, self._log(rank), time.time(), self._phases_over(rank))
        self._died[rank] = died
        return [*messages, died]

    def _phases_over(self, rank: int) -> int:
        try:
            return int(Path(self._specs[rank].phases_path).read_text())
        except (OSError, ValueError):  # it died before it ran an item
            return 0

    def _log(self, rank: int) -> str:
        """Read what a rank wrote outside of pytest's capture since its item began: its start and its end."""
        try:
            with open(self._specs[rank].log_path, errors="replace") as log:
                log.seek(self._log_starts.get(rank, 0))
                text = log.read()
        except OSError:
            return ""
        text = re.sub(r"\nExtension modules:.*", "", text)  # faulthandler lists all of numpy's and torch's
        return (
            text
            if len(text) < MOST_OUTPUT
            else f"{text[: MOST_OUTPUT // 2]}\n[…]\n{text[-MOST_OUTPUT // 2 :]}"
        )

    # The end

    def interrupt(self) -> dict[int, str]:
        """Break off what the ranks run; return what each was doing. `reap` waits for their tear-down.

        To be called when `run` was left by an exception.
        """
        outcomes = [RankOutcome(rank) for rank in range(len(self._ranks))]
        said = self._ask({outcome.rank for outcome in outcomes}, outcomes)
        for outcome in outcomes:
            self._send(outcome.rank, Interrupt())
        words = {
            rank: f"{doing.collective} at {doing.where}" if doing.collective else doing.where
            for rank, doing in said.items()
        }
        return words | {rank: died.how for rank, died in self._died.items()}

    def say_close(self) -> None:
        """Ask the ranks to tear down their sessions; `reap` waits for them."""
        for rank in range(len(self._ranks)):
            self._send(rank, Close())

    def reap(self, timeout: float = CLOSE_WITHIN) -> list[str]:
        """Wait for ranks that were asked to close, end what is left; return what went wrong, a line each."""
        until = time.monotonic() + timeout
        complaints = []
        for rank, started in enumerate(self._ranks):
            started.process.join(max(0.0, until - time.monotonic()))
            if started.process.is_alive():
                complaints.append(f"rank {rank} of {self.key} did not end in {timeout:g} s and was killed")
            elif started.process.exitcode not in (0, None) and rank not in self._died:
                died = Died(started.process.exitcode, self._log(rank), 0.0)
                complaints.append(f"rank {rank} of {self.key} {died.how} as it closed\n{died.output}")
        self.kill()
        return complaints

    def is_whole(self) -> bool:
        """Whether every rank lives."""
        return all(started.process.is_alive() for started in self._ranks)

    def is_gone(self) -> bool:
        """Whether every rank has ended."""
        return not any(started.process.is_alive() for started in self._ranks)

    def kill(self) -> None:
        """End every rank at once, with what their tests have started, and remove the world's directory."""
        for started in self._ranks:
            started.kill()
        for started in self._ranks:
            started.close()
            if started.process.pid is not None:
                self._launcher.forget(started.process.pid)
        self._ranks = []
        shutil.rmtree(self._directory, ignore_errors=True)
