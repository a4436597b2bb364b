"""DeepSpeed's `DistributedTest`, and copies of it, known by what they have; nothing of DeepSpeed is imported.

A hook in the project's conftest calls an instance with the request of the test: it evaluates fixtures in the
parent process, and starts processes that call `_dist_run` each. Here every rank does both in turn: the hook
runs in the rank, and what would start processes calls `_dist_run` in place. A test with a list of world sizes
is an item for each, on a world of that size.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lockstep.features.adopt import pytest_internals
from lockstep.features.adopt.kinds import RANKS_VARIABLES, Demand, LeftAlone, RankOfItem
from lockstep.features.adopt.modules import restored
from lockstep.hookspecs import RANK_PLUGIN

__tracebackhide__ = True

_STARTERS = ("_launch_daemonic_procs", "_launch_non_daemonic_procs")
"""Methods that start processes, since DeepSpeed 0.10; before, `_launch_procs` did."""
_OF_FILES = "_launch_with_file_store"
"""The method that makes a file for a rendezvous, launches each world size, and sleeps after each."""
_PARAMETERS = ("local_rank", "num_procs", "master_port", "init_method", "skip_msg")
"""Parameters of `_dist_run`, in any version."""


class DistributedTest:
    """The kind of `DistributedTest`; also a plugin."""

    family = "deepspeed"

    def matches(self, cls: type) -> bool:
        return getattr(cls, "is_dist_test", False) is True

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make an item of each world size: libraries keep the size of the first one, in C++ too."""
        if metafunc.cls is None or not self.matches(metafunc.cls):
            return
        with contextlib.suppress(LeftAlone):
            _check_launcher(metafunc.cls)
            sizes = dict.fromkeys(_sizes_of(metafunc.function, metafunc.cls, {}))
            if len(sizes) > 1:
                metafunc.fixturenames.append("ranks_size")
                ids = [f"{size}-rank" if size == 1 else f"{size}-ranks" for size in sizes]
                metafunc.parametrize("ranks_size", list(sizes), ids=ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Give all ranks the same temporary directories: fixtures, which run on each, pass on one path."""
        session: Any = item.config.pluginmanager.get_plugin(RANK_PLUGIN)
        if session is None or not self.matches(getattr(item, "cls", None) or object):
            return (yield)
        make = functools.partial(_make_directory, session.world.shared_tmp_path, Counter())
        with mock.patch.object(pytest_internals.tmp_path_factory(item.config), "mktemp", make):
            return (yield)

    def demand(self, item: pytest.Item) -> Demand:
        cls, function = item.cls, item.function  # type: ignore[attr-defined]
        _check_launcher(cls)
        for name, fixture in pytest_internals.fixture_functions(item):
            if getattr(fixture, "is_dist_fixture", False) is True:
                raise LeftAlone(f"its fixture {name} is a DistributedFixture, which starts processes itself")
        params = item.callspec.params if hasattr(item, "callspec") else {}
        size = params.get("ranks_size") or _sizes_of(function, cls, params)[0]
        return Demand(size, _timeout_of(cls))

    def owner_of_groups(self, item: pytest.Item) -> object:
        return item

    @contextlib.contextmanager
    def running(self, item: pytest.Item, place: RankOfItem) -> Iterator[None]:
        """Replace what starts processes."""
        cls: Any = item.cls  # type: ignore[attr-defined]
        params = item.callspec.params if hasattr(item, "callspec") else {}
        sizes = _sizes_of(item.function, cls, params)  # type: ignore[attr-defined]
        launched = dict.fromkeys(sizes, False)
        launch = functools.partial(_launch, place, launched)
        starters = [name for name in _STARTERS if hasattr(cls, name)] or ["_launch_procs"]
        start_method = multiprocessing.get_start_method(allow_none=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(restored(_package_of(cls)))
            for name in starters:
                stack.enter_context(mock.patch.object(cls, name, _method(launch)))
            if hasattr(cls, _OF_FILES):
                once = functools.partial(_launch_own_size, place.size)
                stack.enter_context(mock.patch.object(cls, _OF_FILES, _method(once)))
            yield
            if len(launched) > 1 and not launched.get(place.size):
                pytest.fail(f"{cls.__name__} did not launch the {place.size} processes of its world_size")
        if multiprocessing.get_start_method(allow_none=True) != start_method:  # `_launch_procs` sets it
            multiprocessing.set_start_method(start_method, force=True)


def _make_directory(folder: Path, made: Counter[str], basename: str, numbered: bool = True) -> Path:
    """Make a directory as `tmp_path_factory.mktemp` does; every rank calls it equally often."""
    path = folder / (f"{basename}{made[basename]}" if numbered else basename)
    made[basename] += 1
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _sizes_of(function: Any, cls: Any, params: dict[str, Any]) -> tuple[int, ...]:
    """Return the world sizes that a test is launched with, one after another."""
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "world_size"]
    if marks:
        size = marks[0].args[0]
    elif "world_size" in params:
        size = params["world_size"]
    elif "world_size" in inspect.signature(function).parameters:
        raise LeftAlone("its world size comes from a fixture, which is known only when the test runs")
    else:
        size = cls.world_size
    sizes = (size,) if isinstance(size, int) else tuple(size) if isinstance(size, list | tuple) else ()
    if not sizes or not all(isinstance(each, int) and each > 0 for each in sizes):
        raise LeftAlone(f"its world size is {size!r}")
    return sizes


def _timeout_of(cls: Any) -> float:
    """Return the seconds that a class asks for itself; those of its base are a default."""
    own = float(getattr(cls, "exec_timeout", 0.0))
    return own if own != float(getattr(_base(cls), "exec_timeout", own)) else 0.0


def _base(cls: type) -> type:
    """Return the class that has made this one a test of this kind."""
    return next(parent for parent in cls.__mro__ if "is_dist_test" in vars(parent))


def _check_launcher(cls: Any) -> None:
    """Raise LeftAlone for a launcher that is not the one known here."""
    base = _base(cls)
    for name in ("_dist_run", "_launch_procs", *_STARTERS, _OF_FILES):
        owner = next((parent for parent in cls.__mro__ if name in vars(parent)), None)
        if owner is None and name in ("_dist_run", "_launch_procs"):
            raise LeftAlone(f"it has no {name}")
        if owner is not None and owner not in base.__mro__:
            raise LeftAlone(f"{owner.__name__} has a launcher of its own: it overrides {name}")
    parameters = [name for name in inspect.signature(cls._dist_run).parameters if name != "self"]
    if unknown := [name for name in parameters if name not in _PARAMETERS]:
        raise LeftAlone(f"its _dist_run has a parameter {unknown[0]}, which is unknown here")


def _package_of(cls: Any) -> str:
    """Return the package that `_dist_run` initialises the communication of: `deepspeed`, or "" for torch."""
    package: str = getattr(cls._dist_run.__globals__.get("dist"), "__name__", "").partition(".")[0]
    return "" if package == "torch" else package


def _method(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that becomes a method in a class; a partial would not get the instance."""

    def method(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        function(*args, **kwargs)

    return method


def _launch_own_size(size: int, test: Any, request: object, world_size: int | Sequence[int]) -> None:
    """Launch the world size of this item alone, in place of all sizes in turn."""
    __tracebackhide__ = True
    test._launch_procs(size if not isinstance(world_size, int) and size in world_size else world_size, "")


def _launch(place: RankOfItem, launched: dict[int, bool], test: Any, num_procs: int, *_: object) -> None:
    """Run in place what a process would."""
    __tracebackhide__ = True
    if num_procs != place.size and num_procs in launched:
        return  # a loop over the test's sizes, as in launchers without `_OF_FILES`: this one has its own item
    launched[num_procs] = True
    if num_procs != place.size:
        pytest.fail(
            f"{type(test).__name__} launches {num_procs} processes, and this world is of size {place.size}: "
            "the world size was another one when the test was collected"
        )
    skips = SkipMessages()
    offered = {
        "local_rank": place.rank,
        "num_procs": num_procs,
        "master_port": os.environ["MASTER_PORT"],
        "init_method": f"file://{place.directory}/rendezvous",
        "skip_msg": skips,
    }
    with mock.patch.dict(os.environ):  # a process takes its environment with it
        for name in RANKS_VARIABLES:
            os.environ.pop(name, None)
        names = inspect.signature(test._dist_run).parameters
        result = test._dist_run(**{name: offered[name] for name in names})
        if hasattr(test, "_dist_destroy"):
            test._dist_destroy()
    place.end_groups()
    if reason := result if isinstance(result, str) else skips.first:
        pytest_internals.skip_at_item(reason)


class SkipMessages:
    """The queue that `_dist_run` puts the reason of a skip into, where it does not return it."""

    first = ""

    def put(self, message: str) -> None:
        self.first = self.first or message
