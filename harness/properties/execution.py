"""Hypothesis's run of one property, made to keep in step: what ranks put in place of its own classes."""

from __future__ import annotations

import functools
import hashlib
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, core, settings
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import engine
from hypothesis.internal.conjecture.data import ConjectureData

from harness.exceptions import PeerFailed
from harness.properties.constants import SharedConstants
from harness.properties.database import LockstepDatabase
from harness.properties.desync import LeftAlone
from harness.properties.examples import Examples
from harness.properties.origin import respect_agreed_origins

__hypothesistracebackhide__ = True  # our frames are no news in a failure's traceback


_DEFAULT_DEADLINE = timedelta(milliseconds=200)
"""Hypothesis's own. It is not for ranks, which wait for each other, and import anew after a failure."""


def keep_in_step(examples: Examples) -> None:
    """Let every property that this process runs keep in step with those of the other ranks.

    Hypothesis offers a hook for the body of a test alone, and not for that of a state machine. Here
    everything between two examples counts too: draws, deadlines, explicit examples.
    """

    class State(_State):
        _examples = examples
        _constants = SharedConstants(examples)

    class Runner(_Runner):
        _examples = examples

    core.StateForActualGivenExecution = State  # type: ignore[misc, assignment]
    core.ConjectureRunner = Runner  # type: ignore[misc]
    examples.crash_guard.watch()
    engine.time = examples.clock  # type: ignore[assignment]
    respect_agreed_origins()
    _leave_out_of_explanations(str(Path(__file__).parent), str(Path(__file__).parents[1] / "rank"))


def _leave_out_of_explanations(*folders: str) -> None:
    """Let Hypothesis not name lines of ours among those that only failing examples have run."""
    original = scrutineer.should_trace_file
    scrutineer.should_trace_file = functools.cache(
        lambda filename: not filename.startswith(folders) and original(filename)
    )


class _Runner(engine.ConjectureRunner):
    _examples: Examples

    def test_function(self, data: ConjectureData) -> None:
        super().test_function(data)
        if self._examples.is_active and self._examples.must_stop():
            self.exit_with(engine.ExitReason.very_slow_shrinking)


class _State(core.StateForActualGivenExecution):
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
        self.test = self._examples.crash_guard.body(test)
        self.test_runner = partial(self._examples.run, self.test_runner)
        facts = {
            "seed": str(wrapped_test._hypothesis_internal_use_seed),
            "randomness": hashlib.blake2b(repr(random.getstate()).encode(), digest_size=8).hexdigest(),
            "settings": repr(given),
        }
        if given.database is None:
            self._examples.seed = wrapped_test._hypothesis_internal_use_generated_seed
        self._examples.begin_run(test.__name__, facts)
        self._constants.settle()

    def _adapt(self, given: settings) -> settings:
        """Choose what ranks need: one bug at a time, told with what reproduces it; the shared database."""
        chosen: dict[str, Any] = {"report_multiple_bugs": False, "print_blob": True}
        if given.deadline == _DEFAULT_DEADLINE:
            chosen["deadline"] = None
        if (
            self._examples.crash_guard.is_expected
        ):  # to explain such an example is to lose it a hundred times more
            chosen["phases"] = [phase for phase in given.phases if phase is not Phase.explain]
        if given.database is not None:
            self._database = LockstepDatabase(given.database, self._examples.rank == 0, self._fetch)
            chosen["database"] = self._database
        return settings(given, **chosen)

    def _fetch(self, key: bytes, read: list[bytes] | None) -> list[bytes]:
        found: list[bytes] = self._examples.ask_all(f"the database, {key.hex()[:8]}", read)[0]
        return found

    def run_engine(self) -> None:
        __tracebackhide__ = True
        try:
            super().run_engine()  # type: ignore[no-untyped-call]
        except LeftAlone:
            raise  # this world is at its end; the next one, if there is one, shall find what this one found
        except (KeyboardInterrupt, pytest.exit.Exception):
            self._write()
            raise
        except BaseException as error:
            self._end()
            if (victim := _victim_alone(error)) is not None:
                raise victim from None
            raise
        else:
            self._end()
        finally:
            self._constants.release()

    def _end(self) -> None:
        """Write what was found; no rank leaves before rank 0 has: the controller may end one that is late."""
        __tracebackhide__ = True
        self._write()
        if self._is_in_step:
            self._examples.end_run()

    def _write(self) -> None:
        if self._database is not None:
            self._database.write()


def _victim_alone(error: BaseException) -> PeerFailed | None:
    """Return the failure of another rank if a group of exceptions tells of nothing else."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    found = [each for each in error.exceptions if isinstance(each, PeerFailed)]
    return found[0] if len(found) == len(error.exceptions) else None
