"""Spawned functions on a warm world: a rank runs one as a process of `spawn` would. Inside a rank."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import socket
import sys
import traceback
import unittest
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
import torch.distributed as dist

from lockstep.features.spawn.failure import from_the_function_on
from lockstep.features.spawn.messages import EXIT_CODE, FEATURE, TRACEBACK, Call
from lockstep.features.spawn.multiprocessing_internals import processes_started_by
from lockstep.features.spawn.pytest_internals import rewritten_modules
from lockstep.features.spawn.starter import Starter
from lockstep.protocol import Part
from lockstep.rank.torch_internals import replace_store_maker

if TYPE_CHECKING:
    from lockstep.protocol import RunItem
    from lockstep.rank.session import RankSession

__tracebackhide__ = True


class Exited(Exception):
    """A spawned function left by another way than an Exception, as by `sys.exit`."""

    def __init__(self, exitcode: int, how: str) -> None:
        super().__init__(how)
        self.exitcode = exitcode


class SpawnOnRank:
    """Runs spawned functions in the place of the item that calls `spawn`."""

    def __init__(self, session: RankSession) -> None:
        self._session = session

    @pytest.hookimpl
    def pytest_ranks_item(self, item: pytest.Item, order: RunItem) -> pytest.Item | None:
        call: Call | None = order.parts.get(FEATURE)
        if call is None:
            return None
        made: SpawnedCall = SpawnedCall.from_parent(item.session, name=call.name, nodeid=item.nodeid)
        made.path = item.path
        made.prepare(call, self._session)
        return made

    @pytest.hookimpl
    def pytest_ranks_failed(self, item: pytest.Item, error: BaseException, parts: dict[str, Any]) -> None:
        if isinstance(item, SpawnedCall):
            code = error.exitcode if isinstance(error, Exited) else None
            if code is None and not isinstance(error, Exception):
                code = 1  # `pytest.fail`, say: no Exception, so the process ends by it
            parts[FEATURE] = {TRACEBACK: _traceback_of(error), EXIT_CODE: code}


class SpawnedCall(pytest.Item):
    """The call of a spawned function: an item without fixtures and marks."""

    def prepare(self, call: Call, session: RankSession) -> None:
        """Take what is to be run."""
        self._call = call
        self._session = session

    def runtest(self) -> None:
        session = self._session
        session.rank.wire.send(Part(FEATURE, os.getpid()))
        with _process_of(self, self._call, session):
            function, args = pickle.loads(self._call.data)
            try:
                function(session.world.rank, *args)
            except KeyboardInterrupt:
                if session.rank.wire.is_interrupted:
                    raise
                # Of `spawn`, too, it is no failure.
            except SystemExit as end:
                if end.code not in (None, 0):
                    code = end.code if isinstance(end.code, int) else 1
                    raise Exited(code, f"exited with code {code}") from end
            except (unittest.SkipTest, pytest.skip.Exception, pytest.xfail.Exception) as skip:
                # No process of `spawn` can skip the test.
                raise Exited(1, f"{type(skip).__name__}: {skip}") from skip

    def reportinfo(self) -> tuple[os.PathLike[str], int | None, str]:
        return self.path, None, self.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, Exited) and excinfo.value.__cause__ is not None:
            excinfo = pytest.ExceptionInfo.from_exception(excinfo.value.__cause__)
        return excinfo.getrepr(
            style="long",
            showlocals=self.config.getoption("showlocals"),
            tbfilter=from_the_function_on,
            truncate_locals=self.config.get_verbosity() <= 1,
        )


def _traceback_of(error: BaseException) -> str:
    """Return the text of an exception as in the child of `spawn`, from the function on."""
    start = error.__traceback__
    frames = start
    while frames is not None:
        if frames.tb_frame.f_code.co_filename == __file__:
            start = frames.tb_next or start
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


@contextlib.contextmanager
def _process_of(item: pytest.Item, call: Call, session: RankSession) -> Iterator[None]:
    """Make this process what the child of `spawn` would be, as far as it can be undone."""
    rank = session.rank
    environ, directory = dict(os.environ), os.getcwd()
    argv, path = sys.argv, sys.path
    factory, root = logging.getLogRecordFactory(), logging.getLogger()
    handlers, level = [*root.handlers], root.level
    seed = rank.spec.seed + rank.spec.rank  # processes differ, and the run can be repeated
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        _set_environ(call.environ)
        os.chdir(call.directory)
        sys.argv, sys.path = list(call.argv), list(call.path)
        with (
            contextlib.closing(
                Starter(call.server, rewritten=partial(rewritten_modules, item.config))
            ) as starter,
            processes_started_by(starter.start),
            _meets_in_world(rank.spec.port, rank.spec.key.size),
        ):
            yield
    finally:
        logging.setLogRecordFactory(factory)  # one that asks for the rank fails once the group has ended
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.argv, sys.path = argv, path
        os.chdir(directory)
        _set_environ(environ)


def _set_environ(environ: dict[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


@contextlib.contextmanager
def _meets_in_world(own_port: int, size: int) -> Iterator[None]:
    """Let ranks that meet at any port of this host meet in a store of the world: no port can be taken."""
    here = {"127.0.0.1", "localhost", "0.0.0.0", "::1", socket.gethostname()}

    def make(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> dist.Store:
        if hostname in here and world_size == size:
            hostname, port = "127.0.0.1", own_port
        return make_of_world(hostname, port, rank, world_size, *args, **kwargs)

    make_of_world = replace_store_maker(make)
    try:
        yield
    finally:
        replace_store_maker(make_of_world)
