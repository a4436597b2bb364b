"""The agent of a host: starts ranks there for controllers elsewhere, and does what needs their machine.

It starts ranks as a controller does, and passes the connection of each rank on to it: what ranks and
controllers say to each other does not come by here. Runs in a process of its own; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.code import digests
from lockstep.features.hosts.hosts_file import HOSTS
from lockstep.features.hosts.listener import Listener
from lockstep.features.hosts.orders import (
    KEPT,
    Digest,
    EndWorld,
    Fetch,
    Fetched,
    Look,
    Order,
    Prepared,
    PrepareWorld,
    Prestart,
    Signal,
    StartRanks,
)
from lockstep.features.hosts.wire import Call, Credentials, Purpose, SignedConnection, be_patient, listen
from lockstep.launch.limits import explain
from lockstep.launch.processes import ProcessLauncher, RankProcess
from lockstep.place import moved_path, reserve_port
from lockstep.specification import RankSpec

ATTACH_WITHIN = 10.0
"""Seconds that the connections of a rank may come after the order to start it."""


class Agent:
    """The agent of one host.

    Args:
        address: of the interface that leads to the other hosts; nothing else is listened at.
        node: number of this host.
        credentials: of the run.
    """

    def __init__(self, address: str, node: int, credentials: Credentials) -> None:
        self.address = address
        self._listener = Listener(listen(address), node, credentials, ("control", "wire", "end"), self._admit)
        self.port: int = self._listener.port
        self._attached: dict[Purpose, SignedConnection] = {}
        self._attaching = threading.Condition()
        self._starting = threading.Lock()
        self._launcher: ProcessLauncher | None = None
        self.environ = dict(os.environ)  # the start of a server sets variables for a moment

    def serve(self, stop: int) -> None:
        """Serve controllers until the descriptor `stop` can be read."""
        self._listener.serve(stop)

    def close(self) -> None:
        self._listener.close()
        with self._starting:
            if self._launcher is not None:
                self._launcher.stop()

    def _admit(self, connection: SignedConnection, call: Call) -> None:
        if call.purpose.kind == "control":
            threading.Thread(target=self._serve_controller, args=(connection,), daemon=True).start()
            return
        if call.purpose.kind == "wire":
            be_patient(connection)
        with self._attaching:
            self._attached[call.purpose] = connection
            self._attaching.notify_all()

    def _serve_controller(self, control: SignedConnection) -> None:
        with contextlib.suppress(EOFError, OSError):
            _Service(self, control).run()

    def attached(self, purpose: Purpose) -> SignedConnection:
        """Return the connection that came for a purpose.

        Raises:
            LaunchError: it does not come.
        """
        with self._attaching:
            if not self._attaching.wait_for(lambda: purpose in self._attached, ATTACH_WITHIN):
                raise LaunchError(f"rank {purpose.rank}: its connection did not come")
            return self._attached.pop(purpose)

    def prestart(self, order: Prestart) -> None:
        """Start the server that ranks are forked from; all controllers of a run have the same."""
        with self._starting:
            if self._launcher is None:
                self._launcher = ProcessLauncher(order.start_method, order.program)
            self._launcher.prestart()

    def launcher(self) -> ProcessLauncher:
        assert self._launcher is not None, "`Prestart` comes first"
        return self._launcher

    def start(
        self, specs: list[RankSpec], wires: dict[int, SignedConnection], deadline: float
    ) -> list[RankProcess]:
        with self._starting:  # multiprocessing is not made for threads
            return self.launcher().start(specs, deadline, wires)

    def forget(self, started: RankProcess) -> None:
        with self._starting:  # a rank that has just been forked is not known yet
            self.launcher().forget(started)


class _World:
    """The ranks of a world that are on this host."""

    def __init__(self, directory: str, ports: tuple[socket.socket, socket.socket]) -> None:
        self.directory = directory
        self.ports = ports
        self.ranks: dict[int, RankProcess] = {}
        self.ends: dict[int, SignedConnection] = {}


class _Service:
    """The part of the agent for one controller, until that is gone."""

    def __init__(self, agent: Agent, control: SignedConnection) -> None:
        self._agent = agent
        self._control = control
        self._worlds: dict[str, _World] = {}

    def run(self) -> None:
        try:
            while True:
                ends = {
                    each.sentinel: (world, rank)
                    for world in self._worlds.values()
                    for rank, each in world.ranks.items()
                    if rank in world.ends
                }
                for ready in wait([self._control, *ends]):
                    if isinstance(ready, int):
                        _report_end(*ends[ready])
                    else:
                        self._obey(self._control.recv())
        finally:
            for name in list(self._worlds):
                self._end_world(name)
            self._control.close()

    def _obey(self, order: Order) -> None:
        try:
            done, answer = True, self._do(order)
        except Exception as error:  # whatever it is, the controller reports it
            done, answer = False, explain(error)
        if not isinstance(order, Prestart):
            self._control.send((done, answer))

    def _do(self, order: Order) -> object:
        match order:
            case Prestart():
                self._agent.prestart(order)
                return None
            case PrepareWorld():
                return self._prepare(order)
            case StartRanks():
                return self._start(order)
            case Fetch():
                return self._fetch(order)
            case Look(world, rank):
                return self._worlds[world].ranks[rank].state()
            case Signal(world, rank, number):
                started = self._worlds[world].ranks[rank]
                started.signal(number) if number else started.kill()
                return None
            case EndWorld(name):
                self._end_world(name)
                return None
            case Digest(paths, moved):
                here = {moved_path(path, moved): path for path in paths}
                return {here[path]: digest for path, digest in digests(here).items()}

    def _prepare(self, order: PrepareWorld) -> Prepared:
        launcher = self._agent.launcher()
        launcher.restore_directory()
        directory = f"{launcher.directory}/{order.world}"
        os.makedirs(directory, mode=0o700)
        ports = reserve_port(self._agent.address), reserve_port(self._agent.address)
        self._worlds[order.world] = _World(directory, ports)
        return Prepared(*(port.getsockname()[1] for port in ports))

    def _start(self, order: StartRanks) -> list[int]:
        world = self._worlds[order.world]
        environ = {**self._agent.environ, **order.changed}
        for name in (*order.removed, HOSTS):
            environ.pop(name, None)
        specs = [_as_here(spec, world.directory, environ) for spec in order.specs]
        wires: dict[int, SignedConnection] = {}
        try:
            for spec in specs:
                wires[spec.rank] = self._agent.attached(Purpose("wire", order.world, spec.rank))
                world.ends[spec.rank] = self._agent.attached(Purpose("end", order.world, spec.rank))
            started = self._agent.start(specs, wires, time.monotonic() + order.patience)
        except BaseException:
            for wire in wires.values():
                wire.close()
            raise
        world.ranks = {spec.rank: each for spec, each in zip(specs, started, strict=True)}
        return [each.pid for each in started]

    def _fetch(self, order: Fetch) -> Fetched:
        directory = Path(self._worlds[order.world].directory)
        stem = f"rank-{order.rank}."
        files = []
        for path in sorted(directory.rglob("*")):
            name = str(path.relative_to(directory))
            if name.startswith(stem) and path.is_file():
                start = order.known.get(name, 0)
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(start)
                    files.append((name, start, file.read()))
                    if name.startswith(f"{stem}{KEPT}/"):  # it is the controller's from now on
                        path.unlink()
        return Fetched(tuple(files))

    def _end_world(self, name: str) -> None:
        if (world := self._worlds.pop(name, None)) is None:
            return
        for started in world.ranks.values():
            started.kill()
        for started in world.ranks.values():
            started.close()
            self._agent.forget(started)
        for end in world.ends.values():
            end.close()
        for port in world.ports:
            port.close()
        self._agent.launcher().end_world(world.directory)


def _report_end(world: _World, rank: int) -> None:
    started, end = world.ranks[rank], world.ends.pop(rank)
    started.join(1.0)
    with contextlib.suppress(OSError):
        end.send(started.exitcode)
    end.close()


def _as_here(spec: RankSpec, directory: str, environ: dict[str, str]) -> RankSpec:
    """Return the specification of a rank for this host."""
    assert spec.place is not None
    session, here = spec.session, spec.place.path
    session = replace(
        session,
        args=tuple(map(here, session.args)),
        cwd=here(session.cwd),
        rootdir=here(session.rootdir),
        inifile=here(session.inifile),
        sys_path=tuple(map(here, session.sys_path)),
        environ=environ,
        output_directory=f"{directory}/rank-{spec.rank}.{KEPT}" if session.output_directory else "",
    )
    return replace(spec, session=session, directory=directory, basetemp=f"{directory}/tmp-{spec.rank}")
