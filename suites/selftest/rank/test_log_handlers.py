"""A rank attaches pytest's log handlers to the loggers that pytest attaches them to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs

from lockstep.rank import pytest_internals as module
from lockstep.rank.pytest_internals import attach_log_handlers_quickly

NAMES = ("", "lockstep-apart", "lockstep-apart.below", "lockstep-plain")


def _attached(level: int | None) -> list[object]:
    handler = LogCaptureHandler()
    loggers = [logging.getLogger(name or None) for name in NAMES]
    patched: Any = catching_logs(handler, level=level)
    with patched:
        found: list[object] = [handler in logger.handlers for logger in loggers]
        found += [handler.level, logging.root.level]
    taken = [handler in logger.handlers and handler.level <= logging.CRITICAL for logger in loggers]
    return [*found, *taken, logging.root.level]


@pytest.mark.parametrize("level", [None, logging.DEBUG])
def test_the_same_loggers_have_the_handler(monkeypatch: pytest.MonkeyPatch, level: int | None) -> None:
    monkeypatch.setattr(logging.getLogger("lockstep-apart"), "propagate", False)
    logging.getLogger("lockstep-placeholder.below")
    of_pytest = _attached(level)
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(catching_logs, name, getattr(catching_logs, name))
    attach_log_handlers_quickly()
    for _ in range(3):  # attached again each time, or left where it is
        assert _attached(level) == of_pytest
    assert of_pytest[0] is True


def test_a_handler_that_a_test_has_removed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(catching_logs, name, getattr(catching_logs, name))
    attach_log_handlers_quickly()
    handler, before = LogCaptureHandler(), list(logging.root.handlers)
    for _ in range(2):
        with catching_logs(handler):
            assert logging.root.handlers == [*before, handler]
            logging.root.removeHandler(handler)
    assert logging.root.handlers == before


def test_a_logger_that_propagates_again_loses_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(catching_logs, name, getattr(catching_logs, name))
    attach_log_handlers_quickly()
    logger, handler = logging.getLogger("lockstep-apart"), LogCaptureHandler()
    for propagate, text in ((False, "once"), (True, "again")):
        logger.error("between")
        monkeypatch.setattr(logger, "propagate", propagate)
        with catching_logs(handler):
            logger.error(text)
    assert [record.message for record in handler.records] == ["once", "again"]


def test_handlers_that_are_used_once_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(catching_logs, name, getattr(catching_logs, name))
    attach_log_handlers_quickly()
    phase, apart = LogCaptureHandler(), logging.getLogger("lockstep-apart")
    monkeypatch.setattr(apart, "propagate", False)
    before = list(logging.root.handlers), list(apart.handlers)
    for _ in range(2):
        with catching_logs(phase):
            for _ in range(3):
                with catching_logs(LogCaptureHandler()) as of_subtest:
                    apart.error("inside")
                assert [record.message for record in of_subtest.records] == ["inside"]
    assert [record.message for record in phase.records] == ["inside"] * 6
    assert (logging.root.handlers, apart.handlers) == tuple([*each, phase] for each in before)


class Catching:
    """The context that pytest enters for a phase, with a handler and the level of its records."""

    __slots__ = ("attached_loggers", "handler", "level", "orig_level")

    def __init__(self, handler: logging.Handler, level: int | None = None) -> None:
        self.handler, self.level = handler, level

    def __enter__(self) -> logging.Handler:
        raise AssertionError("it was not replaced")

    def __exit__(self, *raised: object) -> None: ...


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger that does not propagate, where handlers are attached quickly; no handler stays."""
    monkeypatch.setattr(module, "catching_logs", Catching)
    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(Catching, name, vars(Catching)[name])
    loggers = [logging.getLogger(f"lockstep.selftest.{name}") for name in ("alone", "later")]
    root, level = [*logging.root.handlers], logging.root.level
    loggers[0].propagate = False
    module.attach_log_handlers_quickly()
    yield loggers[0]
    logging.root.handlers[:] = root
    logging.root.setLevel(level)
    for each in loggers:
        each.handlers.clear()
        each.propagate = True


def test_a_handler_stays_from_its_second_phase_on_and_rests_between(alone: logging.Logger) -> None:
    handler, level = module.LogCaptureHandler(), logging.root.level
    handler.setLevel(7)
    first = Catching(handler, 10)
    with first as entered:
        assert entered is handler
        assert [each.handlers.count(handler) for each in (logging.root, alone)] == [1, 1]
        assert (handler.level, logging.root.level) == (10, min(level, 10))
    assert [each.handlers.count(handler) for each in (logging.root, alone)] == [0, 0]
    assert (handler.level, logging.root.level, first.attached_loggers) == (10, level, [])
    for _ in range(2):
        with Catching(handler):
            assert (handler.level, logging.root.level) == (10, level)
        assert [each.handlers.count(handler) for each in (logging.root, alone)] == [1, 1]
        assert handler.level == module.TAKES_NOTHING
    with Catching(handler, level + 5):
        assert (handler.level, logging.root.level) == (level + 5, level)
    assert logging.root.level == level


def test_a_resting_handler_goes_where_loggers_are_now(alone: logging.Logger) -> None:
    handler, later = module.LogCaptureHandler(), logging.getLogger("lockstep.selftest.later")
    for _ in range(2):
        with Catching(handler):
            assert handler not in later.handlers
    later.propagate, alone.propagate = False, True
    with Catching(handler):
        assert [each.handlers.count(handler) for each in (logging.root, later, alone)] == [1, 1, 0]


def test_handlers_of_one_phase_have_the_same_loggers_and_others_their_own(alone: logging.Logger) -> None:
    caught, reported, plain = (module.LogCaptureHandler() for _ in range(3))
    other = logging.NullHandler()
    one, two, three = Catching(caught), Catching(reported), Catching(other)
    with one, two, three:
        assert two.attached_loggers is one.attached_loggers
        assert three.attached_loggers is not one.attached_loggers
        assert [alone.handlers.count(each) for each in (caught, reported, other)] == [1, 1, 1]
    for _ in range(2):
        with Catching(other):
            assert other in alone.handlers
        assert other not in alone.handlers
    with Catching(plain) as last:
        alone.handlers.remove(last)


def test_handlers_of_an_older_pytest_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        """It knows of no loggers but the root."""

    monkeypatch.setattr(module, "catching_logs", Older)
    module.attach_log_handlers_quickly()
    assert "__enter__" not in vars(Older)
