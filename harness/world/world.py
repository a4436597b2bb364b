"""The controller's handle on a world: start N ranks, run a test on them, end them.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Protocol

from lockstep.exceptions import WorldError
from lockstep.launch.limits import explain
from lockstep.launch.processes import Launcher
from lockstep.output import OutputDirectory
from lockstep.place import reserve_port
from lockstep.protocol import Close, Finished, Interrupt, Ready, StartFailed, Warned
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.world.diagnosis import place_of
from lockstep.world.handle import RankHandle, receive, request_statuses
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, ItemOutcome

START_WITHIN = 60.0
"""Seconds, at least, that ranks get to stand ready: importing torch may take longer than a test may."""
CLOSE_WITHIN = 10.0
"""Seconds, at least, that a rank gets to tear down its session, wide fixtures included."""


class Share(Protocol):
    """The part of the machine that a world has, where a feature keeps account of that."""

    gpus: tuple[str, ...]
    """Names of the world's GPUs; empty for one on CPUs."""
    held: str
    """Path of a file that its ranks keep locked until they end."""

    def leave_to_ranks(self) -> None: ...

    def rest(self) -> bool:
        """Note that no test uses the world now; return False if it must end."""

    def resume(self) -> bool:
        """Note that a test uses it again; return False if it was ended while it was idle."""

    def end(self) -> None: ...


class World:
    """N ranks that share a default process group."""

    def __init__(
        self, key: WorldKey, name: str, session: SessionSpec, launcher: Launcher, share: Share | None
    ) -> None:
        self.key = key
        self.name = name
        self.share = share
        self._session = session
        self._launcher = launcher
        self._directory = f"{launcher.directory}/{name}"
        self._handles: list[RankHandle] = []
        self._port: socket.socket | None = None
        self._close_within = CLOSE_WITHIN
        self._kept = OutputDirectory(session.output_directory) if session.output_directory else None

    def start(self, seed: int, gpus: tuple[str, ...], basetemp: Path, timeout: float) -> None:
        """Start the ranks and wait until all of them stand ready.

        Args:
            gpus: names of the GPUs that the ranks have.
            timeout: seconds that a test may take; so may starting and, later, tearing down the session, or
                `START_WITHIN` and `CLOSE_WITHIN` where that is more.

        Raises:
            WorldError: a rank ended, or did not get ready in time.
            LaunchError: ranks cannot be started on this machine at all.
        """
        # A wide fixture is torn down with the last test where all goes well, and within its deadline then.
        self._close_within = max(timeout, CLOSE_WITHIN)
        timeout = max(timeout, START_WITHIN)
        deadline = time.monotonic() + timeout
        self._launcher.restore_directory()
        os.makedirs(self._directory, mode=0o700)
        self._port = reserve_port("127.0.0.1")
        port = self._port.getsockname()[1]
        held = "" if self.share is None else self.share.held
        stem = f"{basetemp}/{self.name}-rank"
        specs = [
            RankSpec(rank, self.key, self._session, seed, self._directory, f"{stem}{rank}", held, gpus, port)
            for rank in range(self.key.size)
        ]
        started = self._launcher.start(specs, deadline)
        self._handles = [RankHandle(spec, each) for spec, each in zip(specs, started, strict=True)]
        waiting = set(range(self.key.size))
        while waiting:
            for rank, message in receive(self._handles, deadline - time.monotonic()):
                match message:
                    case Ready():
                        waiting.discard(rank)
                    case StartFailed(text):
                        raise WorldError(f"rank {rank} did not start: {text}\n{self._handles[rank].log()}")
                    case Died():
                        raise WorldError(f"rank {rank} {message.how} while starting\n{message.output}")
            if waiting and time.monotonic() >= deadline:
                statuses = request_statuses([self._handles[rank] for rank in sorted(waiting)])
                names = ", ".join(map(str, statuses))
                stacks = "\n".join(f"rank {rank}: {status.stacks}" for rank, status in statuses.items())
                raise WorldError(f"rank {names} of {self.key}: not ready after {timeout:g} s\n{stacks}")
        if self.share is not None:
            self.share.leave_to_ranks()

    def run(self, run: ItemRun) -> ItemOutcome:
        """Return what each rank said of the item, soon after its timeout at the latest.

        Raises:
            WorldError: a rank has left its session, the world's directory is gone, or what
                `--rank-output-dir` holds cannot be replaced.
        """
        if self._kept is not None:
            self._kept.clear(run.label)
        try:
            outcome = run.run(self._handles)
        except OSError as error:
            raise WorldError(self.fault() or explain(error)) from error
        if not outcome.is_clean():
            for handle, rank in zip(self._handles, outcome.ranks, strict=True):
                if self._kept is None or isinstance(rank.fate, Finished):  # that rank has kept it
                    continue
                try:
                    handle.output().append_to(self._kept.of_test(run.label), rank.rank)
                except OSError as error:
                    text = f"--rank-output-dir: output of rank {rank.rank} is missing: {error}"
                    rank.warnings.append(Warned("pytest", "PytestWarning", text, __file__, 0))
        return outcome

    # The end

    def interrupt(self) -> dict[int, str]:
        """Interrupt what the ranks run; return the status of each. `reap` waits for their tear-down.

        To be called when `run` was left by an exception.
        """
        said = {
            rank: "has ended the test" if doing.state == "idle" else place_of(doing)
            for rank, doing in request_statuses(self._handles).items()
        }
        for handle in self._handles:
            handle.send(Interrupt())
        return said | {handle.rank: handle.died.how for handle in self._handles if handle.died}

    def send_close(self) -> None:
        """Send the ranks the order to tear down their sessions; `reap` waits for them."""
        for handle in self._handles:
            handle.send(Close())

    def reap(self, timeout: float | None = None) -> list[str]:
        """Wait for ranks that were sent `Close`, end what is left; return what went wrong, a line each."""
        timeout = self._close_within if timeout is None else timeout
        until = time.monotonic() + timeout
        complaints = []
        for handle in self._handles:
            if not handle.await_end(until):
                complaints.append(
                    f"{handle} of {self.key} did not end in {round(timeout, 1):g} s and was killed"
                )
            elif died := handle.how_it_closed():
                complaints.append(f"{handle} of {self.key} {died.how} while closing\n{died.output}")
        self.kill()
        return complaints

    def fault(self) -> str:
        """Say why it can run no test any more; "" if it can."""
        if not all(handle.is_alive() for handle in self._handles):
            return f"a rank of {self.key} ended after the test"
        if not os.path.isdir(self._directory):
            return (
                f"the directory of {self.key}, {self._directory}, has been removed: does a test, or a job of "
                "the machine, clean the temporary directory?"
            )
        return ""

    def is_lost(self) -> bool:
        """Whether that is because a host is gone, which is no fault of a test."""
        return any(not handle.is_alive() and handle.lost_host() for handle in self._handles)

    def is_gone(self) -> bool:
        """Whether every rank has ended."""
        return not any(handle.is_alive() for handle in self._handles)

    def kill(self) -> None:
        """End every rank at once, with what their tests have started, and remove the world's directory."""
        for handle in self._handles:
            handle.started.kill()
        for handle in self._handles:
            handle.close()
            self._launcher.forget(handle.started)
            if self._kept is not None:
                self._kept.keep_log(self._session.workerinput["workerid"], self.name, handle.output().log)
        self._handles = []
        self._launcher.end_world(self._directory)
        if self._port is not None:
            self._port.close()
        if self.share is not None:
            self.share.end()
