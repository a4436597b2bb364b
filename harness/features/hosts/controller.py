"""The hosts of a run, as the controller uses them: the placement of ranks, their launcher, their directory.

Must not import torch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Generator, Sequence

import pytest

from lockstep.backends import objects_of, takes_devices
from lockstep.controller.requests import Refusal, Request
from lockstep.exceptions import LaunchError
from lockstep.features.hosts.hosts_file import HOSTS, read_hosts_file
from lockstep.features.hosts.launchers import refuse_launcher
from lockstep.launch.processes import Launcher, ProcessLauncher, RankProgram
from lockstep.marker import MarkError, RanksMark
from lockstep.specification import Spread, WorldKey

_TOO_FEW_HOSTS = re.compile(r"Skipped: the test needs (\d+) hosts, this run has")


def check_options(config: pytest.Config) -> None:
    """Refuse options, and a file of hosts, that no world can use.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    for option in ("hosts", "per-host"):
        number: int | None = config.getoption(f"ranks_{option.replace('-', '_')}")
        if number is not None and number < 1:
            raise pytest.UsageError(f"--ranks-{option} {number}: write a whole number above 0")
    shared: str | None = config.getoption("ranks_shared_dir")
    if shared is not None and not os.path.isdir(shared):
        raise pytest.UsageError(f"--shared-dir {shared}: no such directory; make it where all hosts see it")
    try:
        read_hosts_file()
    except (LaunchError, OSError) as error:
        raise pytest.UsageError(str(error)) from None


class HostsController:
    """Puts the ranks of tests on the hosts of this run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        shared_dir: str | None = config.getoption("ranks_shared_dir")
        own = f"lockstep-{secrets.token_hex(4)}"  # each worker of pytest-xdist has its own
        self._shared_dir = "" if shared_dir is None else f"{os.path.abspath(shared_dir)}/{own}"

    def pytest_ranks_launcher(self, launcher: ProcessLauncher, program: RankProgram) -> Launcher | None:
        if (hosts_file := read_hosts_file()) is None:
            return None
        from lockstep.features.hosts.remote import HostsLauncher

        return HostsLauncher(launcher, str(self._config.getini("ranks_start_method")), program, hosts_file)

    def pytest_ranks_spread(self, mark: RanksMark, key: WorldKey) -> Spread | Refusal:
        if mark.hosts is not None:
            if isinstance(mark.hosts, bool) or not isinstance(mark.hosts, int) or mark.hosts < 1:
                raise MarkError(f"ranks(hosts={mark.hosts!r}): hosts is a whole number above 0")
            if mark.hosts > key.size:
                raise MarkError(f"ranks({key.size}, hosts={mark.hosts}): there are fewer ranks than hosts")
        on = mark.hosts or self._config.getoption("ranks_hosts")
        if (on or 1) < 2 and HOSTS not in os.environ:
            return ()
        exclusive, per_host = takes_devices(key.backend), self._config.getoption("ranks_per_host")
        if mark.hosts is None and on is not None:
            on = min(on, key.size)
        spread = spread_of(key.size, on, needs_gpus=exclusive, per_host=per_host)
        if isinstance(spread, str):
            return Refusal("skipped", spread)
        bound = [backend.name for backend in objects_of(key.backend) if not backend.spans_hosts]
        if len(spread) > 1 and bound:
            return Refusal("skipped", f"the backend {bound[0]} works within one host")
        return spread

    @pytest.hookimpl(tryfirst=True)
    def pytest_ranks_request(self) -> None:
        refuse_launcher()

    def pytest_ranks_shared_directory(self, request: Request) -> str | None:
        return self._shared_dir if len(request.key.spread) > 1 else None

    def pytest_ranks_command(self) -> tuple[str, ...] | None:
        """Return the command that starts pytest on the first host."""
        hosts_file = read_hosts_file()
        return None if hosts_file is None else hosts_file.command

    @pytest.hookimpl(trylast=True)  # when ranks have ended
    def pytest_unconfigure(self) -> None:
        if self._shared_dir:
            shutil.rmtree(self._shared_dir, ignore_errors=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # below the list of all that failed
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> Generator[None, object, object]:
        """Count the tests that need more hosts than there are."""
        result = yield
        reasons = (str(getattr(each, "longrepr", "")) for each in terminalreporter.stats.get("skipped", ()))
        needs = [int(found[1]) for reason in reasons if (found := _TOO_FEW_HOSTS.search(reason))]
        if needs:
            most = f"{min(needs)} to {max(needs)}" if len({*needs}) > 1 else str(needs[0])
            tests = f"{len(needs)} test{'s' if len(needs) > 1 else ''}"
            terminalreporter.write_line(f"{tests} skipped: {most} hosts needed (python -m lockstep hosts)")
        return result


def spread_of(size: int, on: int | None, *, needs_gpus: bool, per_host: int | None) -> Spread | str:
    """Return the hosts of a world, or why there are too few.

    Args:
        size: ranks of the world.
        on: how many hosts it is to be spread over evenly; None: as few as it fits on.
        needs_gpus: whether each rank takes a GPU.
        per_host: of `--ranks-per-host`: ranks that fit on a host without GPUs; None: as many as it has CPUs.
    """
    hosts_file = read_hosts_file()
    hosts = () if hosts_file is None else hosts_file.hosts
    if on is not None and on > max(1, len(hosts)):
        have = "this run has 1" if len(hosts) < 2 else f"this run has {len(hosts)}"
        return f"the test needs {on} hosts, {have}"
    if needs_gpus:
        return _spread(size, on, [len(host.gpus) for host in hosts], can_share=False)
    return _spread(size, on, [per_host or len(host.gpus) or host.cpus for host in hosts], can_share=True)


def _spread(size: int, on: int | None, capacities: Sequence[int], can_share: bool) -> Spread | str:
    """Return the hosts; on CPUs ranks share those that there are."""
    if on is None:
        fitting = [number for number, capacity in enumerate(capacities) if capacity >= size]
        if fitting or len(capacities) < 2:
            return _without_first_alone([(fitting[0] if fitting else 0, size)])
        if sum(capacities) >= size:
            return _without_first_alone(_fill(size, capacities))
        on = len(capacities)
    on = min(on, size)
    spread = [(number, size // on + (number < size % on)) for number in range(on)]
    if not can_share and any(ranks > capacities[number] for number, ranks in spread):
        return f"{size} ranks need a GPU each, the hosts of this run have {', '.join(map(str, capacities))}"
    return _without_first_alone(spread)


def _fill(size: int, capacities: Sequence[int]) -> list[tuple[int, int]]:
    filled = []
    for number, capacity in enumerate(capacities):
        if ranks := min(size, capacity):
            filled.append((number, ranks))
            size -= ranks
    return filled


def _without_first_alone(spread: list[tuple[int, int]]) -> Spread:
    return () if len(spread) == 1 and spread[0][0] == 0 else tuple(spread)
