"""The handler of SIGTERM that a run has: in the controller's main thread alone, and over no other."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.controller.termination import Termination


@pytest.fixture(autouse=True)
def _default_action() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_the_run_until_the_action_is_restored() -> None:
    termination = Termination()
    termination.handle()
    with pytest.raises(pytest.exit.Exception, match="SIGTERM") as raised:
        signal.raise_signal(signal.SIGTERM)
    assert raised.value.returncode == pytest.ExitCode.INTERRUPTED
    termination.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_that_is_there_already_stays() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    termination = Termination()
    termination.handle()
    termination.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_another_thread_than_the_main_one_installs_none() -> None:
    thread = threading.Thread(target=Termination().handle)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_fork_of_the_controller_dies_of_the_signal() -> None:
    Termination().handle()
    if (child := os.fork()) == 0:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            os._exit(0)  # it goes on: the handler has not ended it
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
