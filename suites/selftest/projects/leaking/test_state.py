"""Tests that leave their rank's interpreter in another state."""

import faulthandler
import gc
import locale
import os
import pathlib
import resource
import signal
import sys

import pytest

if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_signals(world, only):
    pathlib.Path(f"pid-{world.rank}.txt").write_text(str(os.getpid()))
    if only:
        signal.alarm(100)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


def test_interpreter(only):
    if only:
        gc.disable()
        sys.setrecursionlimit(77777)
        sys.path.insert(0, "/somewhere")
        os.umask(0o077)
        faulthandler.disable()
        locale.setlocale(locale.LC_NUMERIC, "C" if locale.setlocale(locale.LC_NUMERIC) != "C" else "C.UTF-8")


def test_limit(only):
    if only:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_everything_is_put_back(world):
    pid = pathlib.Path(f"pid-{world.rank}.txt").read_text()
    assert pid == str(os.getpid()), "what cannot be put back costs a new world"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert gc.isenabled()
    assert sys.getrecursionlimit() != 77777
    assert "/somewhere" not in sys.path
    assert os.umask(0o022) == 0o022
    assert faulthandler.is_enabled()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 60


@pytest.mark.ranks(2, timeout=0.8)
def test_stacks_after_sigusr1_was_taken(only):
    if only:
        sum(range(10**12))


def test_closed_stream(only):
    if only:
        sys.stdout.close()


def test_prints(world):
    print("heard from", world.rank)


def test_destroyed_group(only):
    if only:
        dist.destroy_process_group()
