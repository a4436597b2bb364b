"""`--rank-pdb` in the controller: its checks, the loan of the terminal, Ctrl-C, quitting; `--rank-debugpy`.

Runs in the controller; must not import torch. What a rank does with the terminal is in `rank.debugger`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pkgutil
import signal
import socket
import threading
from collections.abc import Iterator, Mapping

import pytest

from lockstep.controller.pytest_internals import uncaptured_streams
from lockstep.launch.terminal import Terminal
from lockstep.specification import WorldKey
from lockstep.world.world import World


class Debugging:
    """The debugger of a run with `--rank-pdb`.

    Attributes:
        terminal: The streams that pytest was started with, for the rank.
        has_quit: Whether the user has quit the debugger, and with it the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.has_quit = False
        with uncaptured_streams(config):
            self.terminal = Terminal(config.getoption("rank_pdb"))

    @contextlib.contextmanager
    def attending(self, world: World) -> Iterator[None]:
        """While the world runs an item, pass Ctrl-C on to its debugger's prompt; note whether the user quits.

        The terminal sends Ctrl-C to the controller alone. Without a prompt it ends the run.
        """
        before = signal.getsignal(signal.SIGINT)
        ends = before if callable(before) else signal.default_int_handler
        # Python has signals in the main thread only; a run in the background has Ctrl-C ignored.
        handles = threading.current_thread() is threading.main_thread() and before is not signal.SIG_IGN
        if handles:
            signal.signal(
                signal.SIGINT, lambda number, frame: world.interrupt_debugger() or ends(number, frame)
            )
        try:
            yield
        finally:
            if handles:
                signal.signal(signal.SIGINT, before)
        self.has_quit = world.has_quit_debugger()


def is_debugged(key: WorldKey, config: pytest.Config) -> bool:
    """Return whether a world has the rank of `--rank-pdb`."""
    rank = debugged_rank(config)
    return rank is not None and rank < key.size


def debugged_rank(config: pytest.Config) -> int | None:
    """Return the rank of `--rank-pdb` or `--rank-debugpy`; None without either."""
    if (given := config.getoption("rank_debugpy")) is not None:
        return int(given.partition(":")[0])
    rank: int | None = config.getoption("rank_pdb")
    return rank


def debugpy_port(config: pytest.Config) -> int:
    """Return the port of `--rank-debugpy` for one world; 0 without the option.

    Where it names none it is a free one, another for each world: a warm one still listens on its own.
    """
    if config.getoption("rank_debugpy") is None:
        return 0
    given = config.getoption("rank_debugpy").partition(":")[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(given or free.getsockname()[1])


def how_to_attach(rank: int | None, port: int) -> str:
    """Return what the user does in an IDE to debug the rank that listens on the port."""
    configuration = {
        "name": f"rank {rank}",
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": port},
        "justMyCode": False,
    }
    return (
        f"rank {rank} waits for a debugger on 127.0.0.1:{port}. In launch.json of VS Code:\n"
        f"{json.dumps(configuration)}"
    )


def _check_debugpy(config: pytest.Config, given: str) -> None:
    error = f"--rank-debugpy {given[:40]}"
    rank, colon, port = given.partition(":")
    is_form = len(given) < 20 and rank.isdecimal()  # Python reads no int of 4,301 digits
    if not is_form or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise pytest.UsageError(f"{error}: write RANK or RANK:PORT, such as 1:5678")
    if config.getoption("rank_pdb") is not None:
        raise pytest.UsageError(f"{error}: one debugger at a time; leave out --rank-pdb")
    if getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError(f"{error}: each process of pytest -n would listen there; leave out -n")
    if importlib.util.find_spec("debugpy") is None:
        raise pytest.UsageError(f"{error}: needs debugpy: pip install debugpy")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port or 0)))
        except OSError as why:
            raise pytest.UsageError(f"{error}: {why.strerror}: write another port, or none") from None


def check_options(config: pytest.Config) -> None:
    """Refuse a `--rank-pdb` or `--rank-debugpy` that no run can satisfy.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    if (given := config.getoption("rank_debugpy")) is not None:
        _check_debugpy(config, given)
    rank = config.getoption("rank_pdb")
    if rank is None:
        return
    if rank < 0:
        raise pytest.UsageError(f"--rank-pdb {rank}: ranks count from 0")
    if getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError(
            "--rank-pdb needs the terminal, which the processes of pytest -n do not have; leave out -n"
        )
    if config.option.usepdb_cls:
        name = ":".join(config.option.usepdb_cls)
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise pytest.UsageError(f"--pdbcls {name}: {error}") from None


def check_debuggers(config: pytest.Config, keys: Mapping[str, WorldKey]) -> None:
    """Refuse a debugger that would reach no test on ranks, or ranks that only a `--rank-pdb` reaches.

    Args:
        keys: the world of each test that runs on ranks, by its node id.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    rank = debugged_rank(config)
    if rank is not None:
        option = "--rank-pdb" if config.getoption("rank_debugpy") is None else "--rank-debugpy"
        if not any(is_debugged(key, config) for key in keys.values()):
            has = "no test runs on ranks"
            if keys:
                has = f"the largest world has the ranks 0 to {max(key.size for key in keys.values()) - 1}"
            if any(key.backend == "fake" for key in keys.values()):
                has += f". A fake world is one process: {option} 0 debugs it, whichever rank it stands for"
            raise pytest.UsageError(f"{option} {rank}: there is no such rank: {has}")
        return
    for name, option in (("usepdb", "--pdb"), ("trace", "--trace")):
        if keys and config.getoption(name):
            raise pytest.UsageError(
                f"{option} alone does not work in ranks, and {next(iter(keys))} runs on ranks. Add "
                "--rank-pdb 0 for a debugger in rank 0 (it works without --pdb, too), or deselect the tests "
                "marked `ranks` with -m 'not ranks'"
            )
