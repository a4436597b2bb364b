"""Hypothesis's execution of one property, kept in step: its classes, database and constants on ranks.

Runs inside a rank. Hypothesis offers a hook for the body of a test, but not for that of a state machine, nor
for what happens between two examples: draws, deadlines, explicit examples. So its classes are replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.database import ExampleDatabase

from lockstep.exceptions import Diverged, PeerFailed
from lockstep.features.properties import hypothesis_internals as internals
from lockstep.features.properties.desync import EndedByOthers
from lockstep.features.properties.examples import Examples
from lockstep.features.properties.hypothesis_internals import ConjectureData

__hypothesistracebackhide__ = True  # frames of ours do not belong into a failure's traceback

_DEFAULT_DEADLINE = timedelta(milliseconds=200)
"""Hypothesis's own. It does not fit ranks, which wait for each other, and connect again after a failure."""

_FOLDERS = [str(Path(__file__).parents[2] / room) for room in ("features", "rank")]


def keep_in_step(examples: Examples) -> None:
    """Keep every property that this process runs in step with those of the other ranks."""

    class ExecutionOfRank(_Execution):
        _examples = examples
        _constants = SharedConstants(examples)

    class EngineOfRank(_Engine):
        _examples = examples

    internals.replace_execution(ExecutionOfRank, EngineOfRank)
    internals.replace_engine_clock(examples.clock)
    internals.respect_set_origins()
    internals.exclude_from_explanations(*_FOLDERS)
    examples.crash_guard.install()


class _Engine(internals.Engine):
    _examples: Examples

    def test_function(self, data: ConjectureData) -> None:
        super().test_function(data)
        if self._examples.is_active and self._examples.must_stop():
            internals.stop_shrinking(self)


class _Execution(internals.PropertyExecution):
    _examples: Examples
    _constants: SharedConstants

    def __init__(
        self, stuff: Any, test: Any, given: settings, random: Any, wrapped_test: Any, **options: Any
    ) -> None:
        __tracebackhide__ = True
        self._database: LockstepDatabase | None = None
        self._is_in_step = self._examples.is_active and threading.current_thread() is threading.main_thread()
        if not self._is_in_step:
            super().__init__(stuff, test, given, random, wrapped_test, **options)
            return
        super().__init__(stuff, test, self._adapt(given), random, wrapped_test, **options)
        self.test = self._examples.crash_guard.wrap_body(self._examples.wrap_body(test))
        self.test_runner = partial(self._examples.run, self.test_runner)
        facts = {
            "seed": str(internals.explicit_seed(wrapped_test)),
            "randomness": hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest(),
            # Of rank 0 alone it is used, and the folder has another path on another host.
            "settings": repr(settings(given, database=None)),
            "database": "None" if given.database is None else "of examples",
        }
        if given.database is None:
            self._examples.seed = internals.generated_seed(wrapped_test)
        self._examples.begin_run(test.__name__, facts)
        self._constants.share()

    def _adapt(self, given: settings) -> settings:
        """Return settings for ranks: one bug at a time, with what reproduces it; the shared database."""
        chosen: dict[str, Any] = {"report_multiple_bugs": False, "print_blob": True}
        if given.deadline == _DEFAULT_DEADLINE:
            chosen["deadline"] = None
        if self._examples.crash_guard.is_expected:  # each run of such an example ends a world
            chosen["phases"] = [phase for phase in given.phases if phase is not Phase.explain]
        if given.database is not None:
            self._database = LockstepDatabase(given.database, self._examples.rank == 0, self._fetch)
            chosen["database"] = self._database
        return settings(given, **chosen)

    def _fetch(self, key: bytes, read: list[bytes] | None) -> list[bytes]:
        values: list[bytes] = self._examples.exchange(f"the database, {key.hex()[:8]}", read)[0]
        return values

    def execute_once(self, data: ConjectureData, **options: Any) -> Any:
        """Run an example; with recording if it is the last one, and runs or ranks part in it."""
        __tracebackhide__ = True
        error, _ = options.get("expected_failure") or (None, "")
        with self._examples.recorded() if isinstance(error, Diverged) else contextlib.nullcontext():
            return super().execute_once(data, **options)  # type: ignore[no-untyped-call]

    def run_engine(self) -> None:
        __tracebackhide__ = True
        try:
            super().run_engine()  # type: ignore[no-untyped-call]
        except EndedByOthers:
            raise  # this world ends; a run in the next one must find the database as this one found it
        except (KeyboardInterrupt, pytest.exit.Exception):
            self._write()
            raise
        except BaseException as error:
            self._end()
            if isinstance(error, BaseExceptionGroup) and error.split(PeerFailed)[1] is None:
                raise error.exceptions[0] from None  # a group of failures of other ranks only: one is enough
            raise
        else:
            self._end()
        finally:
            self._constants.release()

    def _end(self) -> None:
        """Write the database before any rank leaves: the controller may kill a rank that is late."""
        __tracebackhide__ = True
        self._write()
        if self._is_in_step:
            self._examples.end_run()

    def _write(self) -> None:
        if self._database is not None:
            self._database.write()


class SharedConstants:
    """Constants that Hypothesis reads in imported modules and likes to draw: equal on all ranks in a run."""

    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self._differed = False

    def share(self) -> None:
        """Agree on the constants of the property that begins: those of rank 0 where ranks differ."""
        constants = internals.read_constants()
        by_kind = internals.constants_by_kind(constants)
        digest = hashlib.blake2b(repr(by_kind).encode(errors="surrogatepass"), digest_size=16).digest()
        differ = len(set(self._examples.exchange("the constants of modules", digest))) > 1
        if differ:
            of_rank_0 = self._examples.exchange("the constants in full", by_kind)[0]
            constants = internals.constants_from(constants, of_rank_0)
        if differ or self._differed:
            internals.forget_constants()
        self._differed = differ
        internals.hold_constants(constants)

    def release(self) -> None:
        internals.release_constants()


Fetch = Callable[[bytes, list[bytes] | None], list[bytes]]
"""Takes a key, and the values that rank 0 has read under it (None elsewhere); returns them on all ranks."""


class LockstepDatabase(ExampleDatabase):
    """One state of a database, the same on all ranks. Changes are written when the run is over.

    Until then a world may crash and the run start again in another, from the state that it first found.

    Args:
        database: the user's; read and written by rank 0 only.
        is_writer: whether this is rank 0.
    """

    def __init__(self, database: ExampleDatabase, is_writer: bool, agree: Fetch) -> None:
        super().__init__()
        self._database = database
        self._is_writer = is_writer
        self._agree = agree
        self._known: dict[bytes, dict[bytes, None]] = {}
        self._changes: list[tuple[str, bytes, bytes]] = []

    def __repr__(self) -> str:
        return repr(self._database)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return list(self._values(key))

    def save(self, key: bytes, value: bytes) -> None:
        self._values(key)[value] = None
        self._changes.append(("save", key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        self._values(key).pop(value, None)
        self._changes.append(("delete", key, value))

    def write(self) -> None:
        """Make the changes in the user's database."""
        changes, self._changes = self._changes, []
        for change, key, value in changes if self._is_writer else ():
            getattr(self._database, change)(key, value)
        if self._is_writer and changes:  # reading waits for a database that writes in the background
            with contextlib.suppress(Exception):
                list(self._database.fetch(changes[-1][1]))

    def _values(self, key: bytes) -> dict[bytes, None]:
        if key not in self._known:
            read = list(self._database.fetch(key)) if self._is_writer else None
            self._known[key] = dict.fromkeys(self._agree(key, read))
        return self._known[key]
