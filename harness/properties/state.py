"""Hypothesis's run of one property, made to keep in step: what ranks put in place of its own classes."""

from __future__ import annotations

import functools
import hashlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import Phase, core, settings
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import engine
from hypothesis.internal.conjecture.data import ConjectureData

from harness import rank
from harness.exceptions import PeerFailed
from harness.properties.constants import SharedConstants
from harness.properties.database import LockstepDatabase
from harness.properties.examples import Examples
from harness.properties.exceptions import LeftAlone
from harness.properties.origin import respect_agreed_origins

__hypothesistracebackhide__ = True  # our frames are no news in a failure's traceback


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
    examples.lost.watch()
    engine.time = examples.clock  # type: ignore[assignment]
    respect_agreed_origins()
    _leave_out_of_explanations(str(Path(__file__).parent), str(Path(rank.__file__).parent))


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
        if self._examples.is_active and self.interesting_test_cases and self._examples.must_stop():
            self.exit_with(engine.ExitReason.very_slow_shrinking)


class _State(core.StateForActualGivenExecution):
    _examples: Examples
    _constants: SharedConstants

    def __init__(
        self, stuff: Any, test: Any, given: settings, random: Any, wrapped_test: Any, **options: Any
    ) -> None:
        __tracebackhide__ = True
        self._database: LockstepDatabase | None = None
        if not self._examples.is_active or threading.current_thread() is not threading.main_thread():
            super().__init__(stuff, test, given, random, wrapped_test, **options)
            return
        super().__init__(stuff, test, self._adapt(given), random, wrapped_test, **options)
        self.test = self._examples.lost.body(test)
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
        if self._examples.lost.is_expected:  # to explain such an example is to lose it a hundred times more
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
        victim: PeerFailed | None = None
        writes = True
        try:
            super().run_engine()  # type: ignore[no-untyped-call]
        except LeftAlone:  # this world is at its end; the next one, if there is one, shall find what it did
            writes = False
            raise
        except BaseExceptionGroup as error:
            victim = _victim_alone(error)
            if victim is None:
                raise
        finally:
            self._constants.release()
            if self._database is not None and writes:
                self._database.write()
        if victim is not None:
            raise victim


def _victim_alone(group: BaseExceptionGroup[BaseException]) -> PeerFailed | None:
    """Return the failure of another rank if a group tells of nothing else."""
    found = [error for error in group.exceptions if isinstance(error, PeerFailed)]
    return found[0] if len(found) == len(group.exceptions) else None
