"""Private names of Hypothesis that property tests on ranks use, as seen in 6.170. Runs inside a rank.

Importing or calling this fails with ImportError or AttributeError where a release has moved a name; property
tests on ranks then fail with that message, and all other tests run.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import core, stateful
from hypothesis.database import choices_to_bytes
from hypothesis.errors import DeadlineExceeded
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import engine, providers
from hypothesis.internal.conjecture.data import ConjectureData, DataObserver, Status
from hypothesis.internal.escalation import InterestingOrigin, get_trimmed_traceback
from hypothesis.strategies._internal.core import DataObject

from lockstep.features.properties.messages import Origin

__all__ = ["ConjectureData", "DataObserver", "Status", "choices_to_bytes", "get_trimmed_traceback"]

__hypothesistracebackhide__ = True  # frames of ours do not belong into a failure's traceback

# The execution of one property, and the engine that it makes. `core` looks both up by name at each run:
# `StateForActualGivenExecution` in `given.wrapped_test`, `ConjectureRunner` in `run_engine`.
PropertyExecution = core.StateForActualGivenExecution
Engine = engine.ConjectureRunner


def replace_execution(execution: type[PropertyExecution], runner: type[Engine]) -> None:
    """Make `@given` use these classes."""
    core.StateForActualGivenExecution = execution  # type: ignore[misc]
    core.ConjectureRunner = runner  # type: ignore[misc]


def stop_shrinking(runner: Engine) -> None:
    """End the search of an engine as Hypothesis does when shrinking takes too long."""
    runner.exit_with(engine.ExitReason.very_slow_shrinking)


def replace_engine_clock(clock: object) -> None:
    """Make engines read the time from `clock`, which replaces the module `time`."""
    engine.time = clock  # type: ignore[assignment]


def seed_engines(entropy: int) -> None:
    """Seed the generator from which `@given` draws a seed for each run that has none of its own."""
    core.threadlocal._hypothesis_global_random = random.Random(entropy)


def explicit_seed(wrapped_test: Any) -> object:
    """Return what `@seed` gave, None without it."""
    return wrapped_test._hypothesis_internal_use_seed


def generated_seed(wrapped_test: Any) -> int | None:
    """Return the seed that a run without database would print for `--hypothesis-seed`."""
    seed: int | None = wrapped_test._hypothesis_internal_use_generated_seed
    return seed


def exclude_from_explanations(*folders: str) -> None:
    """Leave lines under `folders` out of the explain phase, which lists lines that only failures run."""
    original = scrutineer.should_trace_file
    scrutineer.should_trace_file = functools.cache(
        lambda filename: not filename.startswith(folders) and original(filename)
    )


@contextlib.contextmanager
def unexplained() -> Iterator[None]:
    """Keep the lines that run inside out of the explain phase; coverage and debuggers see them.

    If it moves: what `Tracer.trace` asks of a file, and what `Tracer.__enter__` installs.
    """
    if sys.version_info < (3, 12):
        should_trace = scrutineer.should_trace_file
        scrutineer.should_trace_file = functools.cache(lambda filename: False)
        try:
            yield
        finally:
            scrutineer.should_trace_file = should_trace
    elif sys.monitoring.get_tool(scrutineer.MONITORING_TOOL_ID) == "scrutineer":
        of_lines = scrutineer.MONITORING_TOOL_ID, sys.monitoring.events.LINE
        callback = sys.monitoring.register_callback(*of_lines, None)
        try:
            yield
        finally:
            sys.monitoring.register_callback(*of_lines, callback)
    else:
        yield


# The data of one example

# What the engine reads of an example's structure. Releases call the list of nodes by either name.
_STRUCTURE = (
    "nodes",
    "_nodes",
    "_nodes_tuple",
    "length",
    "depth",
    "max_depth",
    "has_discards",
    "labels_for_structure_stack",
    "tags",
    "arg_spans",
    "misaligned_at",
    "status",
    "frozen",
    "_ConjectureData__span_record",
    "_ConjectureData__spans",
    "_ConjectureData__result",
)
_DERIVED = {"_ConjectureData__spans": None, "_ConjectureData__result": None}


def structure_of(data: ConjectureData) -> tuple[dict[str, Any], object]:
    """Return the structure of an example and the state of its generator, both of which can be pickled."""
    attributes = {name: vars(data)[name] for name in _STRUCTURE if name in vars(data)}
    return attributes | _DERIVED, data._random.getstate() if data._random is not None else None


def restore_structure(data: ConjectureData, structure: tuple[dict[str, Any], Any]) -> None:
    """Give an example the structure of another, as `structure_of` returned it."""
    attributes, state = structure
    for name, value in attributes.items():
        setattr(data, name, value)
    if state is not None and data._random is not None:
        data._random.setstate(state)


def count_spans(data: ConjectureData) -> int:
    """Return how many starts and ends of spans an example has recorded."""
    return len(data._ConjectureData__span_record.trail)  # type: ignore[attr-defined]


def forget_drawn_objects(data: ConjectureData) -> None:
    """Drop references to drawn objects. Objects alive steer shrinking, and a traceback keeps some alive."""
    record = data._ConjectureData__span_record  # type: ignore[attr-defined]
    values = getattr(record, "span_values", {})
    for place in [place for place, value in values.items() if isinstance(value, weakref.ref)]:
        del values[place]


# The identity of a failure

_ORIGIN = "_lockstep_origin"


def origin_of(error: BaseException) -> Origin:
    """Return the origin of a failure in a form that can be sent."""
    found = InterestingOrigin.from_exception(error)
    return Origin(str(found), type(error).__name__, found.filename, found.lineno)


def set_origin(error: BaseException, origin: Origin) -> None:
    """Make Hypothesis identify an exception by an origin that all ranks have agreed on."""
    kind = DeadlineExceeded if origin.exception == DeadlineExceeded.__name__ else _kind(origin)
    setattr(error, _ORIGIN, InterestingOrigin(kind, origin.filename, origin.lineno, (), ()))


@functools.cache
def _kind(origin: Origin) -> type[BaseException]:
    return type(origin.exception, (Exception,), {"__module__": __name__})


def respect_set_origins() -> None:
    """Make `InterestingOrigin.from_exception` return what `set_origin` set."""
    original = InterestingOrigin.from_exception.__func__  # type: ignore[attr-defined]

    def from_exception(
        cls: type[InterestingOrigin], exception: BaseException, /, *args: Any, **kwargs: Any
    ) -> Any:
        agreed = getattr(exception, _ORIGIN, None)
        return original(cls, exception, *args, **kwargs) if agreed is None else agreed

    InterestingOrigin.from_exception = classmethod(from_exception)  # type: ignore[method-assign, assignment]


# Constants of imported modules

_CONSTANT_KINDS = ("integers", "floats", "bytes", "strings")
read_constants: Callable[[], Any] = providers._get_local_constants
"""Returns the constants that Hypothesis finds in the modules imported at the time of the call."""


def constants_by_kind(constants: Any) -> dict[str, list[Any]]:
    """Return constants in a form that can be compared and sent."""
    return {kind: list(getattr(constants, kind)) for kind in _CONSTANT_KINDS}


def constants_from(like: Any, by_kind: dict[str, list[Any]]) -> Any:
    """Return constants of the class of `like` with the values of another rank."""
    return type(like)(**by_kind)


def hold_constants(constants: Any) -> None:
    """Make Hypothesis draw from these constants, whatever is imported from here on."""
    providers._get_local_constants = lambda: constants


def forget_constants() -> None:
    """Empty the cache of the constants that fit the bounds of a draw."""
    providers.CONSTANTS_CACHE.cache.clear()


def release_constants() -> None:
    """Make Hypothesis read constants itself again."""
    providers._get_local_constants = read_constants


# Moments at which the body of a test continues

_WRAPPED = "_lockstep_wrapped"


def call_after_draws(check: Callable[[], None]) -> None:
    """Call `check` after each draw that a body makes through `data()`."""
    draw = DataObject.draw

    @functools.wraps(draw)
    def draw_and_check(data: DataObject, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        drawn = draw(data, *args, **kwargs)
        check()
        return drawn

    DataObject.draw = draw_and_check  # type: ignore[method-assign, assignment]


def call_before_rules(check: Callable[[], None]) -> None:
    """Call `check` before each rule and initializer of a state machine."""
    setup_state = stateful.RuleBasedStateMachine.setup_state.__func__  # type: ignore[attr-defined]

    def checked(function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def check_and_call(*args: Any, **kwargs: Any) -> object:
            __tracebackhide__ = True
            check()
            return function(*args, **kwargs)

        setattr(check_and_call, _WRAPPED, True)
        return check_and_call

    def setup_checked_state(cls: Any) -> Any:
        state = setup_state(cls)
        for rule in (*state.rules, *state.initializers):
            if not hasattr(rule.function, _WRAPPED):
                object.__setattr__(rule, "function", checked(rule.function))
        return state

    stateful.RuleBasedStateMachine.setup_state = classmethod(setup_checked_state)  # type: ignore[assignment]
