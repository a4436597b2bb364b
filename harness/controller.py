"""The controller: the pytest process that collects, sends marked items to worlds, and reports.

Under pytest-xdist each of its workers is a controller. Must not import torch.
"""

from __future__ import annotations

import gc
import itertools
import os
import shlex
import sys
import uuid
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest

from harness import reporting
from harness.engines import DEFAULT, claim_of, engine_of
from harness.exceptions import WorldError
from harness.launch.processes import ProcessLauncher
from harness.protocol import RunItem, SessionSpec, Warned, WorldKey
from harness.requests import Refusal, Request, request_of
from harness.world import ItemOutcome, World
from harness.worlds import Worlds

# What changes how an item runs, with defaults: a line that runs it again has to repeat it.
OUR_OPTIONS = {
    "backend": None,
    "device": None,
    "world_seed": 0,
    "world_timeout": 60.0,
    "fresh_worlds": False,
}

_request_key = pytest.StashKey[Request | Refusal]()


class Controller:
    """Runs `ranks` items on worlds; leaves every other item to pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._numbers = itertools.count()
        self._positions: dict[pytest.Item, int] = {}
        self._last_items: dict[str, pytest.Item] = {}
        self._launcher: ProcessLauncher | None = None
        self._worlds = Worlds(self._start_world, self._complain)
        self._preload = tuple(config.getini("ranks_preload"))
        self._start_method = str(config.getini("ranks_start_method"))

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
                self._launch().prestart()

    def _launch(self) -> ProcessLauncher:
        if self._launcher is None:
            self._launcher = ProcessLauncher(self._start_method, self._preload)
        return self._launcher

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if request := request_of(item):
                item.stash[_request_key] = request
        asking = [item for item in items if isinstance(item.stash.get(_request_key, None), Request)]
        if not asking:
            self._stop_server()  # the word stood in a file, but no test needs it
            return
        if self._config.option.usepdb or self._config.option.trace:
            option = "--pdb" if self._config.option.usepdb else "--trace"
            raise pytest.UsageError(
                f"{option} cannot reach into ranks, which have no terminal, and {asking[0].nodeid} "
                f"runs on ranks. Leave {option} out, or deselect the tests marked `ranks` with -m 'not ranks'"
            )
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
        self._tear_down_controllers_own(item, nextitem, reports[-1])
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(
        self, item: pytest.Item, request: Request, nextitem: pytest.Item | None
    ) -> list[pytest.TestReport]:
        try:
            world = self._worlds.take(request.key, fresh=request.fresh)
            self._last_items[world.name] = item
        except WorldError as error:
            return _refuse(item, Refusal("failed", f"no world of {request.key}: {error}"))
        order = self._order(item, request, nextitem)
        try:
            outcome = world.run(order, request.timeout)
        except WorldError as error:
            world.kill()
            return _refuse(item, Refusal("failed", str(error)))
        except BaseException:
            world.kill()
            raise
        if len(outcome.finished()) < len(outcome.ranks):
            world.kill()
        else:
            self._worlds.give_back(world, keep=outcome.is_clean() and not request.fresh)
        self._pass_on_warnings(item, outcome)
        return reporting.merge(outcome, item, self._rerun(item), self._config.getoption("world_seed"))

    def _order(self, item: pytest.Item, request: Request, nextitem: pytest.Item | None) -> RunItem:
        following = None if request.fresh else self._next_of_world(request.key, nextitem)
        name = f"{next(self._numbers)}-{getattr(item, 'originalname', 'test')}"
        return RunItem(
            nodeid=str(item.nodeid),
            path=str(item.path),
            next_item=None if following is None else (str(following.nodeid), str(following.path)),
            shared_tmp_path=str(self._basetemp() / "shared" / name[:40]),
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
        self, item: pytest.Item, nextitem: pytest.Item | None, report: pytest.TestReport
    ) -> None:
        """Tear down wider fixtures of unmarked items before this one, as pytest would between two items."""
        # pytest offers no other way to a plugin that runs items itself.
        setup_state = item.session._setupstate
        call = pytest.CallInfo.from_call(lambda: setup_state.teardown_exact(nextitem), when="teardown")
        if call.excinfo is not None:
            failed = item.ihook.pytest_runtest_makereport(item=item, call=call)
            report.outcome, report.longrepr = failed.outcome, failed.longrepr

    def _rerun(self, item: pytest.Item) -> str:
        """The command that runs one item again: its node id, and what the user chose of our options."""
        config = self._config
        path = os.path.relpath(item.path, config.invocation_params.dir)
        words = ["pytest", f"{path}::{claim_of(item).split('::', 1)[1]}"]
        if config.option.inifilename:
            words += ["-c", str(config.option.inifilename)]
        for flag, values in (("-o", config.option.override_ini), ("-p", config.option.plugins)):
            words += [word for value in values or () for word in (flag, str(value))]
        for option, default in OUR_OPTIONS.items():
            value = config.getoption(option)
            if value != default:
                words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        if (engine := engine_of(item)) not in (None, DEFAULT):
            words += ["--engine", str(engine)]
        return shlex.join(words)

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
        world = World(key, f"world-{next(self._numbers)}", self._session_spec(), self._launch())
        try:
            world.start(
                seed=self._config.getoption("world_seed"),
                basetemp=self._basetemp(),
                timeout=self._config.getoption("world_timeout"),
            )
        except BaseException:
            world.kill()
            raise
        return world

    def _session_spec(self) -> SessionSpec:
        config = self._config
        # Every rank would open --debug's file anew, as soon as it reads its arguments.
        args = [arg for arg in map(str, config.invocation_params.args) if not arg.startswith("--debug")]
        if hasattr(config.option, "no_cov"):
            args.append("--no-cov")  # pytest-cov in a rank would erase what the controller has measured
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        workerinput = getattr(config, "workerinput", None) or {
            "workerid": "master",
            "workercount": 1,
            "testrunuid": uuid.uuid4().hex,
            "mainargv": sys.argv,
        }
        return SessionSpec(
            args=tuple(args),
            cwd=str(config.invocation_params.dir),
            argv=tuple(sys.argv),
            sys_path=tuple(sys.path),
            environ=environ,
            workerinput=workerinput,
            captures=config.getoption("capture") != "no",
        )

    def _basetemp(self) -> Path:
        # The fixture's factory is the only one that knows; pytest-xdist asks it the same way.
        factory: pytest.TempPathFactory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        return factory.getbasetemp()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        result = yield
        self._worlds.close()  # while what goes wrong can still fail the run
        return result

    def pytest_sessionfinish(self) -> None:
        self._worlds.kill()  # none is left but after an interruption

    def pytest_unconfigure(self) -> None:
        self._worlds.kill()
        self._stop_server()

    def _stop_server(self) -> None:
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
