"""Stacks of threads that run while they are looked at."""

from __future__ import annotations

import sys
import threading
import time

from harness.rank.stacks import stacks


def busy(stop: threading.Event) -> None:
    """Call, return, raise and yield as fast as it goes."""

    def deep(depth: int) -> int:
        return sum(deep(depth - 1) for _ in range(2)) if depth else len([*map(str, range(20))])

    while not stop.is_set():
        deep(8)


def test_stacks_of_running_threads_are_stacks() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=busy, args=(stop,))
    thread.start()
    try:
        until = time.monotonic() + 1.0
        seen = set()
        while time.monotonic() < until:
            stack = stacks()[thread.ident or 0]
            assert stack[-1].code.co_name == "_bootstrap"  # each walk reaches the thread's beginning
            seen.add(stack[0].code.co_name)
    finally:
        stop.set()
        thread.join()
    assert "deep" in seen


def test_looking_changes_nothing() -> None:
    before = sys.getswitchinterval()
    place = stacks()[threading.get_ident()]
    assert "test_looking_changes_nothing" in [each.code.co_name for each in place]
    assert sys.getswitchinterval() == before
