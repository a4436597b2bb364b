"""`python -m lockstep hosts`: node 0 runs pytest, the others serve ranks to it until it ends.

Must not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.addresses import address_towards, is_here, resolve
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo, this_host
from lockstep.features.hosts.join_info import (
    MAKE_SECRET,
    JoinInfo,
    Known,
    SharedFile,
    Store,
    WithoutSecret,
    rendezvous_point,
    take_secret,
)
from lockstep.features.hosts.launchers import (
    NodePlace,
    check_one_each,
    place_by_hand,
    place_of,
    without_launcher,
)
from lockstep.features.hosts.rendezvous import Comer, Rendezvous, versions
from lockstep.features.hosts.wire import Credentials

if TYPE_CHECKING:
    from lockstep.features.hosts.agent import Agent

NOT_RUN, INTERRUPTED, LOST = 4, 130, 1
"""Exit status: pytest was not started; Ctrl-C before it was, or on a host that serves; node 0 is gone."""
WAIT, LONGEST_WAIT = 300.0, 1e6
MOST_HOSTS = 1024
_NOWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the default route leads there."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "hosts",
        help="run pytest with ranks on several hosts",
        description="Started once on each host, by torchrun, srun, mpirun or by hand: node 0 runs pytest with"
        " the arguments behind `--`, the others serve ranks to it until it ends, with its exit status.",
        usage="python -m lockstep hosts [options] [-- PYTEST ARGUMENTS]",
        allow_abbrev=False,
    )
    parser.add_argument("--node", metavar="I/N", help="by hand: this is host I of N, from 0")
    parser.add_argument(
        "--meet",
        metavar="ADDRESS:PORT",
        help="where node 0 waits for the others: an address of it, a free port",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="a file with the same secret on all hosts, that you alone can read; needed with --meet "
        "(default: the variable LOCKSTEP_HOSTS_SECRET)",
    )
    parser.add_argument(
        "--address",
        default="",
        help="by which the other hosts reach this one (default: that of the interface that leads to node 0)",
    )
    parser.add_argument("--name", default="", help="of this host in reports (default: its host name)")
    parser.add_argument(
        "--wait", type=float, default=WAIT, metavar="SECONDS", help="for hosts to come (default: %(default)g)"
    )
    parser.add_argument("arguments", nargs="*", metavar="PYTEST ARGUMENTS", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, others: Sequence[str]) -> int:
    try:
        if others:
            raise LaunchError(f"unknown arguments: {' '.join(others)}; those of pytest come behind --")
        secret = take_secret(options.secret_file, os.environ)
        place = _place(options)
        if place.nodes == 1:
            _forget_launcher()
            return _run_pytest(options.arguments)
        if place.node == 0:
            return _lead(place, options, secret)
        with _interrupted_by_sigterm():
            return _serve(place, options, secret)
    except LaunchError as error:
        _say(str(error))
        return NOT_RUN
    except KeyboardInterrupt:
        return INTERRUPTED


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Take SIGTERM, by which launchers end what they have started, as Ctrl-C: files are removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _place(options: argparse.Namespace) -> NodePlace:
    place = place_of(os.environ) if options.node is None else place_by_hand(options.node)
    if place is None:
        raise LaunchError(
            "no launcher says which host this is: start it by torchrun, srun or mpirun, or give "
            "--node 0/2 --meet ADDRESS:PORT, and --node 1/2 on the other host"
        )
    check_one_each(place)
    if place.nodes > MOST_HOSTS:
        raise LaunchError(f"{place}: a run has at most {MOST_HOSTS} hosts; start fewer")
    if not 0 <= options.wait <= LONGEST_WAIT:  # not a number is in no range
        raise LaunchError(
            f"--wait {options.wait:g}: give seconds from 0 to {LONGEST_WAIT:g}: --wait {WAIT:g}"
        )
    if not (options.meet or place.launcher):
        raise LaunchError("--node needs --meet ADDRESS:PORT: where node 0 waits for the others")
    return place


def _by_hand(options: argparse.Namespace, secret: bytes | None) -> JoinInfo | None:
    """Return the join info that the user gives; None where it is the launcher's to hand over.

    Raises:
        LaunchError: its address is none, or there is no secret.
    """
    if not options.meet:
        return None
    address, port = rendezvous_point(options.meet)
    if secret is None:
        raise LaunchError(f"--meet needs a secret that all hosts have: on one host {MAKE_SECRET}")
    return JoinInfo(address, port, secret)


def _way(place: NodePlace, by_hand: JoinInfo | None, secret: bytes | None) -> Known | WithoutSecret:
    if by_hand is not None:
        return Known(by_hand)
    return WithoutSecret(SharedFile(place) if place.store is None else Store(place), secret)


def _lead(place: NodePlace, options: argparse.Namespace, secret: bytes | None) -> int:
    """Meet the others, and run pytest; return its status."""
    by_hand = _by_hand(options, secret)
    if by_hand is not None and not is_here(by_hand.address):
        raise LaunchError(
            f"--meet {options.meet}: {by_hand.address} is no address of this host, which is node 0"
        )
    join_info = by_hand or JoinInfo(_own_address(place, options.address), 0, secret or token_hex(32).encode())
    way = _way(place, by_hand, secret)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-hosts-"))
    rendezvous, status = None, NOT_RUN
    try:
        environ = _forget_launcher()
        this = _this_host(options.name, join_info.address, 0)
        rendezvous = Rendezvous(place, this, join_info, directory / "hosts.json", environ)
        with _interrupted_by_sigterm():  # pytest handles it for itself
            way.publish(rendezvous.join_info, time.monotonic() + options.wait)
            hosts = rendezvous.await_all(options.wait, _say)
        _say(f"{len(hosts)} hosts: " + ", ".join(f"{host.name} ({host.address})" for host in hosts))
        os.environ[HOSTS] = str(directory / "hosts.json")
        status = _run_pytest(options.arguments)
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        if rendezvous is not None:
            rendezvous.end(status)
        way.close()
        shutil.rmtree(directory, ignore_errors=True)
    return status


def _run_pytest(arguments: Sequence[str]) -> int:
    """Run pytest in this process as `python -m pytest` would; return its status."""
    sys.argv[:] = [f"{Path(pytest.__file__).parent}/__main__.py", *arguments]
    return int(pytest.console_main())


def _serve(place: NodePlace, options: argparse.Namespace, secret: bytes | None) -> int:
    """Serve ranks until pytest has ended on node 0; return its status."""
    from lockstep.features.hosts.agent import Agent

    by_hand = _by_hand(options, secret)
    given = resolve(options.address) if options.address else ""
    if given and not is_here(given):
        raise LaunchError(f"--address {options.address} is no address of this host")
    way = _way(place, by_hand, secret)
    _forget_launcher()
    opened: list[Agent] = []

    def describe(node_0: str, credentials: Credentials) -> HostInfo:
        address = given or address_towards(node_0)
        while opened:  # node 0 was started again, and has another secret
            opened.pop().close()
        opened.append(Agent(address, place.node, credentials))
        return _this_host(options.name, address, opened[0].port)

    try:
        comer = Comer(place, way, describe, _say, by_hand is not None)
        try:
            membership = comer.come(options.wait)
        finally:
            way.close()
        _say(f"{membership.name}, {place}, serves ranks to {membership.first}")
        opened[0].serve(membership.connection.fileno())
        status = membership.read_end()
    finally:
        for agent in opened:
            agent.close()
    if status is None:
        _say(f"{membership.name}: node 0, {membership.first}, is gone; its pytest has not said how it ended")
        return LOST
    _say(f"{membership.name}: pytest has ended on {membership.first} with status {status}")
    return status


def _own_address(place: NodePlace, given: str) -> str:
    """Return the address by which other hosts reach node 0, where the user does not say where to meet."""
    if given:
        return resolve(given)
    if place.store is not None:
        return address_towards(resolve(place.store[0]))
    try:
        address = resolve(socket.gethostname())
    except LaunchError:
        return address_towards(_NOWHERE)
    return address_towards(_NOWHERE) if address.startswith("127.") else address


def _this_host(name: str, address: str, port: int) -> HostInfo:
    return this_host(name or socket.gethostname().partition(".")[0] or address, address, port, versions())


def _forget_launcher() -> dict[str, str]:
    """Take the launcher's variables away from pytest and from ranks; return the environment that is left."""
    environ = without_launcher(os.environ)
    for name in {*os.environ} - {*environ}:
        del os.environ[name]
    return environ


def _say(text: str) -> None:
    sys.stderr.write(f"hosts: {text}\n")
    sys.stderr.flush()
