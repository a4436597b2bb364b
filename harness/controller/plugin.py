"""The controller: the pytest process that collects, sends marked items to worlds, and reports.

Under pytest-xdist each of its workers is a controller. Must not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends import BACKENDS, objects_of
from lockstep.controller.pytest_internals import (
    add_failed_tear_down,
    basetemp_of,
    make_report,
    tear_down,
)
from lockstep.controller.requests import REQUEST, Refusal, Request, report_refusal, request_of
from lockstep.controller.rerun import rerun_line
from lockstep.controller.termination import Termination
from lockstep.controller.world_starter import WorldStarter
from lockstep.exceptions import WorldError
from lockstep.launch.processes import Launcher, ProcessLauncher, RankProgram
from lockstep.options import default_backend
from lockstep.protocol import Preparation, RunItem
from lockstep.reporting.differences import pass_on_warnings
from lockstep.reporting.merge import merge
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import ItemOutcome
from lockstep.world.pool import Interrupted, WorldPool
from lockstep.world.world import START_WITHIN, World

TEAR_DOWN_WITHIN = 5.0
"""Seconds that ranks get to tear down when the run is interrupted; what still runs then is ended."""
INTERRUPTS = (KeyboardInterrupt, pytest.exit.Exception)
RANK = "lockstep.rank:RankSession"
RANK_IMPORTS = tuple(f"lockstep.{name}" for name in ("plugin", "subtests", "recorders"))
_IMPORTED = re.compile(rb"^(?:from|import) +((?:torch|lockstep)\b[\w.]*)", re.MULTILINE)
"""Modules that a file imports, and the server, too; no plugins of pytest, whose asserts ranks rewrite."""
_IMPORTING = {
    "torch._dynamo.repro.after_dynamo": re.compile(rb"\btorch\.compile\b|(?<!\bre)\.compile\("),
    "torch._dynamo": re.compile(rb"\b(?:optim|assert_parity|DistributedDataParallel)\b"),
}
"""Modules of torch's compiler that tests import as they run, a second in each rank, by words of such tests:
those that compile, and those with optimizers and DDP."""
_COLLECTING = 10_000
"""Objects that are made between two garbage collections while tests with ranks are collected."""


class Controller:
    """Runs `ranks` items on worlds; leaves every other item to pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._positions: dict[pytest.Item, int] = {}
        self._last_items: dict[str, pytest.Item] = {}
        self._functions: dict[Path, frozenset[str]] = {}
        self._launcher: Launcher | None = None
        self._worlds = WorldPool(WorldStarter(config, self._launch).start, self._fail_last_item)
        self._termination = Termination()
        self._interrupted: Interrupted | None = None
        self._numbers = itertools.count()
        self._current: pytest.Item | None = None
        self._next: pytest.Item | None = None
        self._thresholds = gc.get_threshold()

    # Before tests: find out what will be needed, and start it early

    def pytest_configure(self, config: pytest.Config) -> None:
        for argument in config.args:
            self._look_into(config.invocation_params.dir / str(argument).split("::")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if gc.get_threshold()[0] == _COLLECTING:  # else a file has set its own
                gc.set_threshold(*self._thresholds)

    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        self._look_into(module_path)
        # Nearly all that is made now stays: to look for garbage took a quarter of collecting 3,000 tests.
        if self._launcher is not None and 0 < gc.get_threshold()[0] < _COLLECTING:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(_COLLECTING)

    def _look_into(self, path: Path) -> None:
        """Start the server, which imports torch while pytest collects, as soon as a file mentions ranks."""
        if path.suffix != ".py" or self._config.option.collectonly:
            return
        try:
            text = path.read_bytes()
        except OSError:  # pytest reports what is wrong with it
            return
        mentioned = self._config.hook.pytest_ranks_mentioned
        if self._launcher is not None:
            if b"ranks" in text:
                for module in _imported_in_tests(text):
                    self._launcher.expect(module)
        elif any(mentioned(config=self._config, text=text)) or b"ranks" in text:
            with contextlib.suppress(OSError):  # reported where a test needs a world, if one does
                self._launch(text).prestart()

    def _launch(self, text: bytes = b"") -> Launcher:
        """Return the launcher; what its server imports depends on the first file that mentions ranks."""
        if self._launcher is None:
            preload: list[str] = list(self._config.getini("ranks_preload"))
            hints = [name.decode() for name in _IMPORTED.findall(text)]
            hints += _imported_in_tests(text)
            self._config.hook.pytest_ranks_imports(config=self._config, preload=preload, hints=hints)
            method = str(self._config.getini("ranks_start_method"))
            # Of the backends that the options or the file name; a rank imports others by itself.
            named = [each for name, each in BACKENDS.items() if re.search(rf'[":]{name}\b'.encode(), text)]
            backends = (*objects_of(default_backend(self._config)), *named)
            modules = (*RANK_IMPORTS, *sorted({each.module for each in backends if each.module}))
            program = RankProgram(RANK, modules, tuple(preload), tuple(hints))
            own = ProcessLauncher(method, program)
            self._launcher = self._config.hook.pytest_ranks_launcher(launcher=own, program=program) or own
            self._termination.handle()
        return self._launcher

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        has_requests = False
        for item in items:
            if request := request_of(item):
                item.stash[REQUEST] = request
                has_requests |= isinstance(request, Request)
        if not has_requests:
            if not any(self._config.hook.pytest_ranks_needs_server(config=self._config)):
                self._stop_server()  # the word was in a file, but no test needs it
            return
        # What is in memory now stays to the end, torch's modules above all. Garbage collections, and the end
        # of the interpreter, need not walk through it: 0.4 s of a run.
        gc.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which functions of each file are selected, as ranks need not make items of the others."""
        by_path: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            by_path.setdefault(item.path, []).append(item)
        for path, items in by_path.items():
            functions = [item for item in items if isinstance(item, pytest.Function) and _has_its_name(item)]
            if len(functions) == len(items):
                self._functions[path] = frozenset(item.originalname for item in functions)

    # Running a test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        self._current, self._next = item, nextitem
        request = item.stash.get(REQUEST, None)
        if request is None:
            return None
        run = partial(self._run_and_merge, item, request, nextitem)
        if not self._config.hook.pytest_ranks_run_and_log(item=item, nextitem=nextitem, run=run):
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            for report in run():
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_and_merge(
        self, item: pytest.Item, request: Request | Refusal, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        outcome = self._run(item, request, nextitem) if isinstance(request, Request) else request
        # Wider fixtures of unmarked items before this one, as pytest would between two items.
        torn_down = tear_down(item, nextitem)
        reports = self._report(item, outcome)
        if torn_down.excinfo is not None:
            add_failed_tear_down(item, torn_down, reports)
        return reports

    def _run(
        self, item: pytest.Item, request: Request, nextitem: pytest.Item | None
    ) -> ItemOutcome | Refusal | list[pytest.TestReport]:
        reports: list[pytest.TestReport] | None = self._config.hook.pytest_ranks_before(item=item)
        if reports is not None:
            return reports
        try:
            order = self._order(item, request, nextitem)
            outcome = self._run_order(item, request, order)
            if not outcome.is_clean():
                run, again = partial(self._run_order, item, request), self._config.hook.pytest_ranks_again
                outcome = again(item=item, order=order, outcome=outcome, run=run) or outcome
        except (WorldError, pytest.fail.Exception) as error:  # the second: a plugin's own deadline
            return Refusal("failed", str(error))
        return outcome

    def pytest_ranks_run_begins(self) -> None:
        """Let pytest find the line of the next item, which it keeps: 0.1 ms that no test waits for."""
        with contextlib.suppress(Exception):  # pytest raises it again where it asks for the line
            _ = self._next and self._next.location

    def prepare(
        self, item: pytest.Item, request: Request, preparation: Preparation | None, parts: Mapping[str, Any]
    ) -> tuple[str, list[pytest.TestReport]]:
        """Run something in an item's place, before it; return the directory that ranks shared, and reports.

        Args:
            preparation: names it in reports; None where they are as of the item.
            parts: what features add to the order.

        Raises:
            WorldError: it could not run.
        """
        order = self._order(item, request, item)
        order = replace(order, preparation=preparation, parts={**order.parts, **parts})
        outcome = self._run_order(item, request, order)
        return order.shared_tmp_path, self._report(item, outcome)

    def _run_order(self, item: pytest.Item, request: Request, order: RunItem) -> ItemOutcome:
        """Run an order on a world of the kind that the item requests."""
        try:
            if request.key.spread:
                self._launch().check_code(item.path, self._config.rootpath, request.key)
            world = self._worlds.take(request.key, fresh=request.fresh)
        except WorldError as error:
            raise WorldError(f"no world of {request.key}: {error}") from error
        self._last_items[world.name] = item
        try:
            outcome = world.run(ItemRun(order, request.timeout, self._config.hook))
        except (WorldError, pytest.fail.Exception):
            self._worlds.discard(world)
            raise
        if len(outcome.finished()) < len(outcome.ranks):
            self._worlds.discard(world)
        else:
            self._worlds.give_back(world, keep=outcome.is_clean() and not request.fresh)
        return outcome

    def _report(
        self, item: pytest.Item, outcome: ItemOutcome | Refusal | list[pytest.TestReport]
    ) -> list[pytest.TestReport]:
        if isinstance(outcome, list):
            return outcome
        if isinstance(outcome, Refusal):
            return report_refusal(item, outcome)
        last = outcome.last_run or outcome
        if any(rank.warnings for rank in last.ranks):
            pass_on_warnings(item, last)
        reports = merge(outcome, item, partial(rerun_line, item), self._config.getoption("world_seed"))
        self._config.hook.pytest_ranks_reported(item=item, outcome=outcome, reports=reports)
        return reports

    def _order(self, item: pytest.Item, request: Request, nextitem: pytest.Item | None) -> RunItem:
        following = None if request.fresh else self._next_of_world(request, nextitem)
        parts = {**request.parts}
        self._config.hook.pytest_ranks_order(item=item, request=request, parts=parts)
        both = [item] if following is None else [item, following]
        return RunItem(
            nodeid=str(item.nodeid),
            path=str(item.path),
            next_item=None if following is None else (str(following.nodeid), str(following.path)),
            shared_tmp_path=self._shared_directory(item, request),
            location=item.location,
            functions={
                each.nodeid: self._functions[each.path] for each in both if each.path in self._functions
            },
            parts=parts,
        )

    def _shared_directory(self, item: pytest.Item, request: Request) -> str:
        """Return the path of a new directory that ranks share; "" where none is known that all see."""
        shared = self._config.hook.pytest_ranks_shared_directory
        given: str | None = shared(request=request) if request.key.spread else None
        above = str(basetemp_of(self._config) / "shared") if given is None else given
        name = f"{next(self._numbers)}-{getattr(item, 'originalname', 'test')}"
        return above and f"{above}/{name[:40]}"

    def _next_of_world(self, request: Request, nextitem: pytest.Item | None) -> pytest.Item | None:
        """Find the next item on the same world, so that fixtures they share stay up until then."""
        if nextitem is None:
            return None
        items, start = nextitem.session.items, self._position(nextitem)
        later: Iterable[pytest.Item] = (items[index] for index in range(start, len(items)))
        if hasattr(self._config, "workerinput"):  # of pytest-xdist: which of the items after it are ours?
            later = [nextitem]
        for item in later:
            found = item.stash.get(REQUEST, None)
            if isinstance(found, Request) and found.key == request.key and not found.fresh:
                # What is set up for one rank is not for another, though one process stands for both.
                return item if found.parts == request.parts else None
        return None

    def _position(self, item: pytest.Item) -> int:
        items = item.session.items
        position = self._positions.get(item, len(items))
        if position >= len(items) or items[position] is not item:  # a plugin may change them
            self._positions = {item: position for position, item in enumerate(items)}
            position = self._positions.get(item, len(items))
        return position

    def ready_launcher(self) -> ProcessLauncher | None:
        """Return the launcher of this machine when its server is ready; None where ranks start elsewhere.

        Raises:
            LaunchError: the server did not come up.
        """
        launcher = self._launch()
        if not isinstance(launcher, ProcessLauncher):
            return None
        launcher.restore_directory()
        launcher.make_ready(time.monotonic() + START_WITHIN)
        return launcher

    # Worlds

    def close_worlds(self) -> None:
        """End all worlds, and wait until they have torn down."""
        self._worlds.close()

    def _fail_last_item(self, world: World, text: str) -> None:
        """Fail the last item of a world for what broke as it closed: the tear-down of a wide fixture, say.

        A worker of pytest-xdist may report of the item alone that it runs, or ran last: it names the other.
        """
        item = self._last_items[world.name]
        if hasattr(self._config, "workerinput") and item is not self._current:
            assert self._current is not None, "no item has begun"
            item, text = self._current, f"after {item.nodeid}: {text}"
        item.ihook.pytest_runtest_logreport(report=make_report(item, "teardown", "failed", text))

    @pytest.hookimpl(wrapper=True, trylast=True)  # before pytest-cov combines what ranks leave
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        try:
            result = yield
        except (pytest.Session.Failed, pytest.Session.Interrupted):  # -x, --maxfail, a session's timeout
            self._worlds.close()
            raise
        except INTERRUPTS:
            self._interrupted = self._worlds.interrupt(TEAR_DOWN_WITHIN)
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

    def _stop_server(self) -> None:
        self._termination.restore()
        if self._launcher is not None:
            self._launcher.stop()
            self._launcher = None


def _has_its_name(item: pytest.Function) -> bool:
    """Return whether its module or class has a function of its name: a plugin may name it otherwise."""
    return hasattr(getattr(item.parent, "obj", None), item.originalname)


def _imported_in_tests(text: bytes) -> list[str]:
    """Return what of torch's compiler the tests of a file import as they run."""
    return [module for module, words in _IMPORTING.items() if words.search(text)]
