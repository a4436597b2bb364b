"""The controller: the pytest process that collects, sends marked items to worlds, and reports.

Under pytest-xdist each of its workers is a controller. Must not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import secrets
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

from harness.controller.crashed_examples import CrashSearch
from harness.controller.debugging import Debugging
from harness.controller.requests import Refusal, Request, request_of
from harness.controller.rerun import rerun_line
from harness.controller.world_starter import WorldStarter, basetemp_of, measures
from harness.exceptions import WorldError
from harness.launch.processes import ProcessLauncher, is_of_torch
from harness.protocol import RunItem, RunningExample, Search, Warned, WorldKey
from harness.reporting.merge import merge
from harness.world.outcome import ItemOutcome
from harness.world.pool import Interrupted, WorldPool
from harness.world.world import World

TEAR_DOWN_WITHIN = 5.0
"""Seconds that ranks get to tear down when the run is broken off; what still runs then is ended."""

BREAKS_OFF = (KeyboardInterrupt, pytest.exit.Exception)

_request_key = pytest.StashKey[Request | Refusal]()


class Controller:
    """Runs `ranks` items on worlds; leaves every other item to pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._numbers = itertools.count()
        self._positions: dict[pytest.Item, int] = {}
        self._last_items: dict[str, pytest.Item] = {}
        self._launcher: ProcessLauncher | None = None
        self._worlds = WorldPool(self._start_world, self._complain)
        self._termination = Termination()
        self._interrupted: Interrupted | None = None
        self._preload = tuple(config.getini("ranks_preload"))
        if measures(config):  # what the server runs as it imports, no rank runs: nobody would measure it
            self._preload = tuple(filter(is_of_torch, self._preload))
        self._start_method = str(config.getini("ranks_start_method"))
        self._debugging = Debugging(config)
        self._starter = WorldStarter(config, self._launch)

    # Before tests: find out what will be needed, and start it early

    def pytest_configure(self, config: pytest.Config) -> None:
        paths = [Path(str(argument).split("::")[0]) for argument in config.args]
        for path in paths:
            self._look_into(config.invocation_params.dir / path)

    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        self._look_into(module_path)

    def _look_into(self, path: Path) -> None:
        """Let the server import torch while pytest collects, as soon as a file mentions ranks."""
        if self._launcher is None and path.suffix == ".py" and not self._config.option.collectonly:
            try:
                mentions = b"ranks" in path.read_bytes()
            except OSError:  # pytest says what is wrong with it
                return
            if mentions:
                with contextlib.suppress(OSError):  # told where a test asks for a world, if one does
                    self._launch().prestart()

    def _launch(self) -> ProcessLauncher:
        if self._launcher is None:
            self._launcher = ProcessLauncher(self._start_method, self._preload, self._debugging.terminal)
            self._termination.heed()
        return self._launcher

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if request := request_of(item):
                item.stash[_request_key] = request
        found = {str(item.nodeid): item.stash.get(_request_key, None) for item in items}
        asking = {nodeid: request.key for nodeid, request in found.items() if isinstance(request, Request)}
        if items:
            self._debugging.check(asking)
        if not asking:
            self._stop_server()  # the word stood in a file, but no test needs it
            return
        # What stands now stands to the end, torch's modules above all. Collections of garbage, and the end of
        # the interpreter, need not walk through it: 0.4 s of a run.
        gc.freeze()

    # Running a test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        request = item.stash.get(_request_key, None)
        if request is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        match request:
            case Request():
                reports = self._run(item, request, nextitem)
            case Refusal():
                reports = _refuse(item, request)
        self._tear_down_controllers_own(item, nextitem, reports)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._debugging.has_quit():
            self._worlds.close()  # a rank's wider fixtures are torn down, as where pytest quits
            pytest.exit("Quitting debugger")
        return True

    def _run(
        self, item: pytest.Item, request: Request, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        order = self._order(item, request, nextitem)
        search = CrashSearch()
        try:
            outcome, running = self._run_in_world(item, request, order)
            while search.add(outcome, running):
                outcome, running = self._run_in_world(item, request, search.order(order))
        except (WorldError, pytest.fail.Exception) as error:  # the second: a plugin's own deadline
            return _refuse(item, Refusal("failed", str(error)))
        self._pass_on_warnings(item, outcome)
        return merge(
            search.to_report(outcome), item, rerun_line(item), self._config.getoption("world_seed"), outcome
        )

    def _run_in_world(
        self, item: pytest.Item, request: Request, order: RunItem
    ) -> tuple[ItemOutcome, list[RunningExample | None]]:
        try:
            world = self._worlds.take(request.key, fresh=request.fresh)
        except WorldError as error:
            raise WorldError(f"no world of {request.key}: {error}") from error
        self._last_items[world.name] = item
        try:
            with self._debugging.attending(world):
                outcome = world.run(order, request.timeout)
        except (WorldError, pytest.fail.Exception):
            self._worlds.discard(world)
            raise
        running = world.running()
        if len(outcome.finished()) < len(outcome.ranks):
            self._worlds.discard(world)
        else:
            self._worlds.give_back(world, keep=outcome.is_clean() and not request.fresh)
        return outcome, running

    def _order(self, item: pytest.Item, request: Request, nextitem: pytest.Item | None) -> RunItem:
        following = None if request.fresh else self._next_of_world(request.key, nextitem)
        name = f"{next(self._numbers)}-{getattr(item, 'originalname', 'test')}"
        return RunItem(
            nodeid=str(item.nodeid),
            path=str(item.path),
            next_item=None if following is None else (str(following.nodeid), str(following.path)),
            shared_tmp_path=str(basetemp_of(self._config) / "shared" / name[:40]),
            search=Search(secrets.randbits(128)),
        )

    def _next_of_world(self, key: WorldKey, nextitem: pytest.Item | None) -> pytest.Item | None:
        """Find the next item on the same world, so that fixtures they share stay up until then."""
        if nextitem is None:
            return None
        items = nextitem.session.items
        if hasattr(self._config, "workerinput"):  # of pytest-xdist: which of the items after it are ours?
            request = nextitem.stash.get(_request_key, None)
            shares = isinstance(request, Request) and request.key == key and not request.fresh
            return nextitem if shares else None
        if not self._positions:
            self._positions = {item: position for position, item in enumerate(items)}
        for item in itertools.islice(items, self._positions[nextitem], None):
            request = item.stash.get(_request_key, None)
            if isinstance(request, Request) and request.key == key and not request.fresh:
                return item
        return None

    def _tear_down_controllers_own(
        self, item: pytest.Item, nextitem: pytest.Item | None, reports: list[pytest.TestReport]
    ) -> None:
        """Tear down wider fixtures of unmarked items before this one, as pytest would between two items."""
        # pytest offers no other way to a plugin that runs items itself.
        setup_state = item.session._setupstate
        call = pytest.CallInfo.from_call(lambda: setup_state.teardown_exact(nextitem), when="teardown")
        if call.excinfo is not None:
            failed = item.ihook.pytest_runtest_makereport(item=item, call=call)
            if reports[-1].failed:  # what went wrong on ranks is told too
                reports.append(failed)
            else:
                reports[-1].outcome, reports[-1].longrepr = failed.outcome, failed.longrepr

    # What ranks say beside their reports

    def _pass_on_warnings(self, item: pytest.Item, outcome: ItemOutcome) -> None:
        """Hand each warning to pytest once, however many ranks raised it."""
        for warned in dict.fromkeys(warned for rank in outcome.ranks for warned in rank.warnings):
            self._record(_to_message(warned), str(item.nodeid))

    def _complain(self, world: World, text: str) -> None:
        """Let what broke while a world closed, a wide fixture's tear-down say, fail the last item it ran."""
        item = self._last_items[world.name]
        report = _report(item, "teardown", "failed", text)
        item.ihook.pytest_runtest_logreport(report=report)

    def _record(self, message: warnings.WarningMessage, nodeid: str) -> None:
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": "runtest", "nodeid": nodeid, "location": None}
        )

    # Worlds

    def _start_world(self, key: WorldKey) -> World:
        return self._starter.start(key, self._worlds.make_room)

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov combines what ranks leave
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            result = yield
        except BREAKS_OFF:
            self._interrupted = self._worlds.interrupt(TEAR_DOWN_WITHIN)
            raise
        except (pytest.Session.Failed, pytest.Session.Interrupted):  # -x, --maxfail, a session's timeout
            self._worlds.close()
            raise
        self._worlds.close()  # while what goes wrong can still fail the run
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._interrupted is not None:
            item = self._last_items.get(self._interrupted.world or "")
            self._interrupted.write(terminalreporter, "" if item is None else str(item.nodeid))

    def pytest_sessionfinish(self) -> None:
        self._worlds.kill()  # none is left but after an interruption

    def pytest_unconfigure(self) -> None:
        self._worlds.kill()
        self._stop_server()
        self._debugging.close()

    def _stop_server(self) -> None:
        self._termination.restore()
        if self._launcher is not None:
            self._launcher.stop()
            self._launcher = None


def _report(item: pytest.Item, when: str, outcome: str, longrepr: object = None) -> pytest.TestReport:
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, when)  # type: ignore[arg-type]


def _refuse(item: pytest.Item, refusal: Refusal) -> list[pytest.TestReport]:
    longrepr: object = refusal.why
    if refusal.outcome == "skipped":
        longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {refusal.why}")
    return [_report(item, "setup", refusal.outcome, longrepr), _report(item, "teardown", "passed")]


def _to_message(warned: Warned) -> warnings.WarningMessage:
    """Rebuild a warning; one whose class is unknown here keeps its name in the text."""
    category = getattr(sys.modules.get(warned.module), warned.category, None)
    text = warned.text
    if not (isinstance(category, type) and issubclass(category, Warning)):
        category, text = UserWarning, f"{warned.category}: {text}"
    return warnings.WarningMessage(text, category, warned.filename, warned.lineno)


class Termination:
    """Lets SIGTERM, which CI systems send, break off the run as Ctrl-C does, from `heed` to `restore`."""

    def __init__(self) -> None:
        self._heeds = False

    def heed(self) -> None:
        """Handle the signal, unless somebody else does already."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            controller = os.getpid()

            def break_off(number: int, frame: FrameType | None) -> None:
                if os.getpid() != controller:  # a test's fork: it dies of it, as it would without us
                    signal.signal(number, signal.SIG_DFL)
                    os.kill(os.getpid(), number)
                pytest.exit("SIGTERM", returncode=pytest.ExitCode.INTERRUPTED)

            signal.signal(signal.SIGTERM, break_off)
            self._heeds = True

    def restore(self) -> None:
        """Let the signal do what it did before."""
        if self._heeds:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._heeds = False
