"""A rank attaches pytest's log handlers to the loggers that pytest attaches them to."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, catching_logs

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
