"""Stacks of threads that run while they are looked at."""

from __future__ import annotations

import threading
import time

from lockstep.rank.status import Stacks


def busy(stop: threading.Event) -> None:
    """Call, return, raise and yield as fast as it goes."""

    def deep(depth: int) -> int:
        return sum(deep(depth - 1) for _ in range(2)) if depth else len([*map(str, range(20))])

    while not stop.is_set():
        deep(8)


def test_stacks_of_running_threads_are_stacks() -> None:
    stop, stacks = threading.Event(), Stacks()
    thread = threading.Thread(target=busy, args=(stop,))
    thread.start()
    try:
        until = time.monotonic() + 1.0
        seen = set()
        while time.monotonic() < until:
            stack = stacks.take()[thread.ident or 0]
            assert stack[-1].function == "_bootstrap"  # each walk reaches the thread's beginning
            seen.add(stack[0].function)
    finally:
        stop.set()
        thread.join()
    assert "deep" in seen


def test_a_place_is_a_line_of_a_function() -> None:
    place = Stacks().take()[threading.get_ident()][1]  # below `take`
    assert (place.file, place.function) == (__file__, "test_a_place_is_a_line_of_a_function")
    assert "Stacks().take()" in (place.summary().line or "")
