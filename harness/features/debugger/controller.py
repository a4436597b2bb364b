"""The debugger in the controller: its checks, the loan of the terminal, Ctrl-C, quitting.

Must not import torch.
"""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import signal
import socket
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

from lockstep.backends import meets
from lockstep.controller.requests import REQUEST, Refusal, Request
from lockstep.features.debugger import FEATURE, Chosen, State
from lockstep.features.debugger.pytest_internals import uncaptured_streams
from lockstep.features.debugger.terminal import Terminal
from lockstep.hookspecs import CONTROLLER_PLUGIN
from lockstep.launch.processes import ProcessLauncher
from lockstep.protocol import Part
from lockstep.specification import WorldKey
from lockstep.world.item_run import ItemRun


class Debugging:
    """The debugger of a run with `--rank-pdb` or `--rank-debugpy`.

    Raises:
        pytest.UsageError: no run can satisfy the option; the message says what to write.
    """

    def __init__(self, config: pytest.Config) -> None:
        _check_options(config)
        self._config = config
        self._given: str | None = config.option.rank_debugpy
        self._rank = int(self._given.partition(":")[0]) if self._given else config.option.rank_pdb
        self._port = 0
        self._terminal: Terminal | None = None
        if self._given is None:
            with uncaptured_streams(config):
                self._terminal = Terminal(self._rank)
        self._before_prompt: Any = None
        """The handler of Ctrl-C that the prompt of a debugger has replaced."""
        self._has_quit = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_ranks_launcher(self, launcher: ProcessLauncher) -> None:
        launcher.loan = self._terminal

    def pytest_ranks_session(self, parts: dict[str, Any]) -> None:
        if self._given is not None:
            with socket.socket() as free:  # another for each world: a warm one still listens on its own
                free.bind(("127.0.0.1", 0))
                self._port = int(self._given.partition(":")[2] or free.getsockname()[1])
        chosen: Chosen = self._rank, self._port
        parts[FEATURE] = chosen

    @pytest.hookimpl(tryfirst=True)
    def pytest_ranks_timeout(self, key: WorldKey) -> float | None:
        return float("inf") if self._rank < key.size else None

    def pytest_ranks_request(self, request: Request) -> Refusal | None:
        spread = request.key.spread
        here = spread[0][1] if spread and spread[0][0] == 0 else 0
        if not spread or not here <= self._rank < request.key.size:
            return None
        return Refusal("failed", f"rank {self._rank} runs on another host, where no debugger can be attached")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Refuse a debugger that would reach no test on ranks."""
        result = yield
        keys = [request.key for _, request in _requests(items)]
        if items and not any(self._rank < key.size for key in keys):
            option = "--rank-pdb" if self._given is None else "--rank-debugpy"
            has = "no test runs on ranks"
            if keys:
                has = f"the largest world has the ranks 0 to {max(key.size for key in keys) - 1}"
            if not all(meets(key.backend) for key in keys):
                has += f". A fake world is one process: {option} 0 debugs it, whichever rank it stands for"
            raise pytest.UsageError(f"{option} {self._rank}: there is no such rank: {has}")
        return result

    def pytest_ranks_run_begins(self, run: ItemRun) -> None:
        run.may_pause.add(self._rank)

    def pytest_ranks_message(self, run: ItemRun, rank: int, part: Part) -> None:
        if part.feature != FEATURE:
            return
        state: State = part.data
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if state == "waits" and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(how_to_attach(rank, self._port))
            terminal.flush()  # a pipe would hold it back, and the user acts on it
        self._leave_prompt()
        if state == "prompts":
            self._enter_prompt(run, rank)
        self._has_quit = state == "quits"
        if state in ("waits", "prompts", "runs"):
            run.paused.add(rank)
        else:
            run.paused.discard(rank)

    def pytest_ranks_run_ended(self) -> None:
        self._leave_prompt()

    def _enter_prompt(self, run: ItemRun, rank: int) -> None:
        """Pass Ctrl-C on to the prompt, which the terminal sends to the controller alone."""
        before = signal.getsignal(signal.SIGINT)
        # Python has signals in the main thread only; a run in the background has Ctrl-C ignored.
        if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
            return
        ends = before if callable(before) else signal.default_int_handler

        def interrupt(number: int, frame: FrameType | None) -> None:
            if not run.signal(rank, number):
                ends(number, frame)

        self._before_prompt = before
        signal.signal(signal.SIGINT, interrupt)

    def _leave_prompt(self) -> None:
        if self._before_prompt is not None:
            signal.signal(signal.SIGINT, self._before_prompt)
            self._before_prompt = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        result = yield
        if self._has_quit:
            # A rank's wider fixtures are torn down, as where pytest quits.
            controller: Any = self._config.pluginmanager.get_plugin(CONTROLLER_PLUGIN)
            controller.close_worlds()
            pytest.exit("Quitting debugger")
        return result

    @pytest.hookimpl(trylast=True)  # ranks have ended
    def pytest_unconfigure(self) -> None:
        if self._terminal is not None:
            self._terminal.close()


class NoDebugging:
    """Refuses `--pdb` and `--trace` in a run with tests on ranks, which they do not reach."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        result = yield
        for item, _ in _requests(items):
            option = "--pdb" if config.option.usepdb else "--trace"
            raise pytest.UsageError(
                f"{option} alone does not work in ranks, and {item.nodeid} runs on ranks. Add "
                "--rank-pdb 0 for a debugger in rank 0 (it works without --pdb, too), or deselect the tests "
                "marked `ranks` with -m 'not ranks'"
            )
        return result


def _requests(items: list[pytest.Item]) -> list[tuple[pytest.Item, Request]]:
    found = [(item, item.stash.get(REQUEST, None)) for item in items]
    return [(item, request) for item, request in found if isinstance(request, Request)]


def how_to_attach(rank: int, port: int) -> str:
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


def _check_options(config: pytest.Config) -> None:
    if (given := config.option.rank_debugpy) is not None:
        _check_debugpy(config, given)
        return
    rank = config.option.rank_pdb
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
