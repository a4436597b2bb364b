"""The launcher of ranks on several hosts, and a rank on another host as its controller sees it.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lockstep.exceptions import LaunchError, MessageRefused
from lockstep.features.hosts.code import CodeComparison, Digests
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo, HostsFile, read_hosts_file
from lockstep.features.hosts.orders import (
    KEPT,
    Digest,
    EndWorld,
    Fetch,
    Look,
    Order,
    Prepared,
    PrepareWorld,
    Prestart,
    Signal,
    StartRanks,
)
from lockstep.features.hosts.wire import Call, Credentials, Purpose, SignedConnection, be_patient, connect
from lockstep.launch.processes import ProcessLauncher, RankProcess, RankProgram, StartedRank
from lockstep.place import Place, reserve_port
from lockstep.specification import RankSpec, Spread, WorldKey

ANSWER_WITHIN = 30.0
"""Seconds that an agent has to answer. One whose host is gone is noticed by its connection, long before."""
TRY_AGAIN_AFTER = 10.0
"""Seconds between attempts to reach a host that is gone."""
GROWING = ("log", "stacks")
"""The files of a rank that only grow."""


class Host:
    """Another host: a controller's connection to its agent."""

    def __init__(self, number: int, info: HostInfo, credentials: Credentials) -> None:
        self.number = number
        self.info = info
        self.is_gone = False
        self._credentials = credentials
        try:
            self._control = self.attach(Purpose("control"))
        except OSError as error:
            where = f"{info.address}:{info.port}"
            raise LaunchError(f"host {info.name} is gone ({where}: {error.strerror or error})") from None
        except LaunchError as error:  # its agent has ended, and something else has its port
            raise LaunchError(f"host {info.name} is gone ({error})") from None

    def attach(self, purpose: Purpose) -> SignedConnection:
        """Return a new connection for a purpose.

        Raises:
            OSError: the host cannot be reached.
            LaunchError: who listens there is not its agent.
        """
        return connect(Call(purpose, 0, self.number, self.info.address, self.info.port), self._credentials)

    def send(self, order: Order) -> None:
        """Send an order; its answer is to be read before the next one is sent.

        Raises:
            LaunchError: the host is gone.
        """
        try:
            if not self.is_gone:
                self._control.send(order)
                return
        except OSError:
            self.drop()
        raise self.gone()

    def answer(self, within: float = ANSWER_WITHIN) -> Any:
        """Return the answer to the order that was sent last.

        Raises:
            LaunchError: the order failed, or the host is gone.
        """
        try:
            received = self._control.recv() if self._control.poll(within) else None
        except MessageRefused as error:
            self.drop()
            raise LaunchError(f"host {self.info.name} is given up: {error}") from None
        except (EOFError, OSError):
            received = None
        except BaseException:  # Ctrl-C, or a plugin's deadline: the next order must not get this answer
            self.drop()
            raise
        if received is None:
            self.drop()
            raise self.gone()
        done, answer = received
        if not done:
            raise LaunchError(f"host {self.info.name}: {answer}")
        return answer

    def ask(self, order: Order, within: float = ANSWER_WITHIN) -> Any:
        self.send(order)
        return self.answer(within)

    def gone(self) -> LaunchError:
        return LaunchError(f"host {self.info.name} is gone")

    def drop(self) -> None:
        """Give up the connection; the agent ends what it has started for it."""
        if not self.is_gone:
            self.is_gone = True
            self._control.close()


class RemoteRank:
    """A started rank of another host: the form of `StartedRank` for it."""

    def __init__(
        self, host: Host, world: str, spec: RankSpec, wire: SignedConnection, end: SignedConnection
    ) -> None:
        self.wire = wire
        self.host = host.info.name
        self.moved = spec.place.moved if spec.place is not None else ()
        self.pid, self.began = 0, ""
        self.is_lost = False
        self.sentinel = end.fileno()
        self._host = host
        self._world = world
        self._spec = spec
        self._end = end
        self._exitcode: int | None = None
        self._has_ended = False

    @property
    def exitcode(self) -> int | None:
        if not self._has_ended and not self.is_alive():
            self._has_ended = True
            try:
                self._exitcode = self._end.recv()
            except (EOFError, OSError):
                self.is_lost = True
                self._host.drop()
        return self._exitcode

    def is_alive(self) -> bool:
        return not self._has_ended and not wait([self.sentinel], 0)

    def join(self, timeout: float) -> None:
        if not self._has_ended:
            wait([self.sentinel], timeout)

    def state(self) -> str:
        try:
            return str(self._host.ask(Look(self._world, self._spec.rank)))
        except LaunchError:
            return ""

    def signal(self, number: int) -> None:
        try:
            self._host.ask(Signal(self._world, self._spec.rank, number))
        except LaunchError as error:
            raise OSError(str(error)) from None

    def fetch(self) -> None:
        """Bring its files up to date; do nothing if its host is gone."""
        directory, stem = Path(self._spec.directory), f"rank-{self._spec.rank}"
        known = {
            f"{stem}.{kind}": path.stat().st_size
            for kind in GROWING
            if (path := directory / f"{stem}.{kind}").exists()
        }
        try:
            fetched = self._host.ask(Fetch(self._world, self._spec.rank, known))
        except LaunchError:
            return
        with contextlib.suppress(OSError):  # the directory was removed
            captured = directory / f"{stem}.captured"
            for path in captured.glob("*"):
                path.unlink()
            for name, start, content in fetched.files:
                self._write(name, start, content)

    def _write(self, name: str, start: int, content: bytes) -> None:
        kept = f"rank-{self._spec.rank}.{KEPT}/"
        if name.startswith(kept):
            path, mode = Path(self._spec.session.output_directory, name.removeprefix(kept)), "ab"
        else:
            path, mode = Path(self._spec.directory, name), "ab" if start else "wb"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode) as file:
            file.write(content)

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.signal(0)

    def close(self) -> None:
        self.join(2.0)
        self._has_ended = True
        self.wire.close()
        self._end.close()


class HostsLauncher:
    """Starts ranks on the hosts of a run: on this one as `local` does, on others by their agents.

    Args:
        start_method, program: as for `local`.
    """

    def __init__(
        self, local: ProcessLauncher, start_method: str, program: RankProgram, hosts_file: HostsFile
    ) -> None:
        self.directory = local.directory
        self._local = local
        self._prestart = Prestart(start_method, program)
        self._hosts_file = hosts_file
        self._hosts: dict[int, Host] = {}
        self._tried: dict[int, float] = {}
        self._token = secrets.token_hex(4)
        self._ports: dict[str, tuple[socket.socket, ...]] = {}
        self._used: dict[str, list[Host]] = {}
        self._comparison: CodeComparison | None = None
        self._compared: set[tuple[Path, Spread]] = set()

    def prestart(self) -> None:
        """Start the servers of all hosts, and return at once."""
        for number in range(1, len(self._hosts_file.hosts)):
            with contextlib.suppress(LaunchError):  # reported where a test needs the host
                self.host(number)
        self._local.prestart()

    def expect(self, module: str) -> None:
        self._local.expect(module)

    def restore_directory(self) -> None:
        self._local.restore_directory()

    def host(self, number: int) -> Host:
        """Return a host; one that has come back after it was gone, too.

        Raises:
            LaunchError: it is gone.
        """
        host = self._hosts.get(number)
        if host is not None and not host.is_gone:
            return host
        now = time.monotonic()
        info = self._hosts_file.hosts[number]
        self._hosts_file = read_hosts_file() or self._hosts_file
        if self._hosts_file.hosts[number] == info and now < self._tried.get(number, 0.0) + TRY_AGAIN_AFTER:
            raise LaunchError(f"host {info.name} is gone")
        self._tried[number] = now
        self._comparison, self._compared = None, set()  # it may have other code than before
        run = self._hosts_file
        self._hosts[number] = host = Host(number, run.hosts[number], run.credentials)
        host.send(self._prestart)
        return host

    def start(self, specs: list[RankSpec], deadline: float) -> list[StartedRank]:
        """Start one process for each spec, on the hosts that the key of its world names.

        Raises:
            LaunchError: a host is gone, or its ranks did not start; none of the processes is left.
        """
        session = specs[0].session
        own = {name: value for name, value in session.environ.items() if name != HOSTS}
        spread = specs[0].key.spread or ((0, len(specs)),)
        name = Path(specs[0].directory).name
        world = f"{self._token}-{name}"
        hosts = {number: self.host(number) for number, _ in spread if number}
        self._used[specs[0].directory] = list(hosts.values())
        placed = self._place(world, specs, hosts)
        start = StartRanks(world, (), *self._changes(own), max(0.0, deadline - time.monotonic()))
        started: dict[int, StartedRank] = {}
        asked: list[tuple[Host, list[RemoteRank]]] = []
        try:
            for number, host in hosts.items():
                there = [spec for spec in placed if spec.place and spec.place.number == number]
                ranks = [self._attach(host, world, spec) for spec in there]
                started |= {spec.rank: rank for spec, rank in zip(there, ranks, strict=True)}
                bare = replace(session, environ={})  # it has its own
                host.send(replace(start, specs=tuple(replace(spec, session=bare) for spec in there)))
                asked.append((host, ranks))
            here = [replace(each, session=replace(session, environ=own)) for each in placed]
            here = [each for each in here if each.place and each.place.number == 0]
            if here:
                for spec, process in zip(here, self._local.start(here, deadline), strict=True):
                    several = spec.place is not None and len(spec.place.hosts) > 1
                    name = self._hosts_file.hosts[0].name if several else ""
                    started[spec.rank] = replace(process, host=name)
            while asked:
                host, ranks = asked.pop(0)
                pids = host.answer(max(0.0, deadline - time.monotonic()) + ANSWER_WITHIN)
                for rank, pid in zip(ranks, pids, strict=True):
                    rank.pid = pid
        except BaseException:
            for host, _ in asked:
                with contextlib.suppress(LaunchError):
                    host.answer()
            for each in started.values():
                each.kill()
                each.close()
            raise
        return [started[spec.rank] for spec in specs]

    def _attach(self, host: Host, world: str, spec: RankSpec) -> RemoteRank:
        try:
            wire = host.attach(Purpose("wire", world, spec.rank))
            be_patient(wire)
            end = host.attach(Purpose("end", world, spec.rank))
        except OSError:
            host.drop()
            raise host.gone() from None
        return RemoteRank(host, world, spec, wire, end)

    def _place(self, world: str, specs: list[RankSpec], hosts: dict[int, Host]) -> list[RankSpec]:
        """Return the specifications with the place of each rank, and the ports of the world."""
        spread = specs[0].key.spread
        if not spread:
            here, size = (self._hosts_file.hosts[0].name,), len(specs)
            alone = Place(0, here, 0, 0, size, "127.0.0.1", "127.0.0.1")
            return [replace(spec, place=replace(alone, local_rank=spec.rank)) for spec in specs]
        prepared = {number: host.ask(PrepareWorld(world)) for number, host in hosts.items()}
        infos, first = self._hosts_file.hosts, spread[0][0]
        if first == 0:
            ports = reserve_port(infos[0].address), reserve_port(infos[0].address)
            self._ports[specs[0].directory] = ports
            prepared[0] = Prepared(*(port.getsockname()[1] for port in ports))
        of_first: Prepared = prepared[first]
        placed: list[RankSpec] = []
        for index, (number, ranks) in enumerate(spread):
            info = infos[number]
            moved = ((infos[0].cwd, info.cwd), (infos[0].prefix, info.prefix))
            for local_rank in range(ranks):
                place = Place(
                    host=index,
                    hosts=tuple(infos[each].name for each, _ in spread),
                    number=number,
                    local_rank=local_rank,
                    local_size=ranks,
                    address=info.address,
                    master=infos[first].address,
                    store_port=of_first.store_port if len(spread) > 1 else 0,
                    moved=tuple(pair for pair in moved if pair[0] != pair[1]),
                )
                spec = replace(specs[len(placed)], place=place, port=of_first.port)
                gpus = () if spec.key.device == "cpu" else info.gpus
                placed.append(replace(spec, gpus=gpus or spec.gpus))
        return placed

    def _changes(self, own: dict[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the variables that have changed since the run began, and those that are gone."""
        before = self._hosts_file.environ
        changed = {name: value for name, value in own.items() if before.get(name) != value}
        return changed, tuple(before.keys() - own.keys())

    def check_code(self, path: Path, root: Path, key: WorldKey) -> None:
        """Compare the code of a test on the hosts of its world, once for each file.

        Raises:
            LaunchError: it differs, or a host is gone.
        """
        if (path, key.spread) in self._compared:
            return
        self._comparison = self._comparison or CodeComparison(root, self.digests)
        others = {number: self._hosts_file.hosts[number].name for number, _ in key.spread if number}
        if difference := self._comparison.find_difference(path, others):
            raise LaunchError(difference)
        self._compared.add((path, key.spread))

    def digests(self, number: int, paths: Sequence[str]) -> Digests:
        """Return the digests of files on a host, by their paths on this one.

        Raises:
            LaunchError: the host is gone.
        """
        infos = self._hosts_file.hosts
        moved = ((infos[0].cwd, infos[number].cwd), (infos[0].prefix, infos[number].prefix))
        answer: Digests = self.host(number).ask(Digest(tuple(paths), moved))
        return answer

    def forget(self, started: StartedRank) -> None:
        if isinstance(started, RankProcess):
            self._local.forget(started)

    def end_world(self, directory: str) -> None:
        name = f"{self._token}-{os.path.basename(directory)}"
        for host in self._used.pop(directory, ()):
            with contextlib.suppress(LaunchError):
                host.ask(EndWorld(name))
        for port in self._ports.pop(directory, ()):
            port.close()
        self._local.end_world(directory)

    def stop(self) -> None:
        """End the server of this host; leave the others, whose agents end what is left of this controller."""
        for host in self._hosts.values():
            host.drop()
        self._local.stop()
