"""Tests that leave something behind in their rank: processes, threads, files."""

import multiprocessing
import pathlib
import socket
import subprocess
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import pytest
from pids import SLEEP, note

pytestmark = pytest.mark.ranks(2)
kept = []


def test_child(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)


def test_orphan_in_a_session_of_its_own(only):
    if only:
        shell = "setsid sleep 300 > /dev/null & echo $!"
        note(int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE).stdout))


def test_tree_that_ignores_sigterm(only):
    if only:
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300 & echo $!; wait"], stdout=-1)
        note(child.pid, int(child.stdout.readline()))


def test_process_of_multiprocessing(only):
    if only:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), name="Bob")
        child.start()
        note(child.pid)


def sleep_on():
    time.sleep(300)


def test_thread(only):
    if only:
        threading.Thread(target=sleep_on, name="sleeper", daemon=True).start()


def test_file(only):
    if only:
        kept.append(open("kept.txt", "w"))


def test_socket(only):
    if only:
        kept.append(socket.create_server(("127.0.0.1", 0)))
        pathlib.Path("port.txt").write_text(str(kept[-1].getsockname()[1]))


def test_segment(only):
    if only:
        segment = SharedMemory(create=True, size=100)
        segment.close()
        pathlib.Path("segment.txt").write_text(segment.name)


def test_child_of_a_failed_test(only, tmp_path):
    if only:
        _file = open(tmp_path / "in_the_traceback", "w")
        note(subprocess.Popen(SLEEP).pid)
        assert not only


@pytest.fixture(scope="class")
def leaky():
    child = subprocess.Popen(SLEEP)
    note(child.pid)
    return child


class TestLeakyFixture:
    def test_first(self, world, leaky):
        assert leaky.poll() is None

    def test_last(self, world, leaky):
        assert leaky.poll() is None


@pytest.mark.ranks(2, fresh=True)
def test_healthy_after_leaks(world):
    assert world.gather(world.rank) == [0, 1]
