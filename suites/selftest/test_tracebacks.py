"""Stacks that Python's fault handler wrote: the line that is named, and the frames that are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from lockstep import tracebacks

ROOT = Path(lockstep.__file__).parent

PYTESTS = """\
  File "/venv/lib/python3/site-packages/_pytest/python.py", line 187 in pytest_pyfunc_call
  File "/venv/lib/python3/site-packages/pluggy/_execution.py", line 147 in _multicall
"""
NEWEST = """\
Thread 0x0003 (most recent call first):
  File "/project/serving.py", line 4 in serve

"""
CURRENT = """\
Current thread 0x0002 (most recent call first):
  File "/venv/lib/python3/site-packages/torch/nn.py", line 9 in forward
  File "/project/reading.py", line 5 in read
  File "/project/reading.py", line 7 in run
  File "<string>", line 1 in <module>

"""
MAIN = f"""\
Thread 0x0001 (most recent call first):
  File "/project/test_it.py", line 6 in test_it
{PYTESTS}"""


@pytest.mark.parametrize(
    ("dump", "line"),
    [
        (NEWEST + CURRENT + MAIN, "reading.py:5 in read"),
        (NEWEST + MAIN, "test_it.py:6 in test_it"),  # a native thread crashed
        (NEWEST + CURRENT.replace("/project", "/dist-packages") + MAIN, "test_it.py:6 in test_it"),
        (NEWEST + "Thread 0x0001 (most recent call first):\n" + PYTESTS, ""),
        (CURRENT + f"Fatal Python error: Aborted\n\n{NEWEST}{MAIN}", "test_it.py:6 in test_it"),
        ("no dump", ""),
    ],
)
def test_the_line_is_of_the_crashed_thread_or_the_main_thread(dump: str, line: str) -> None:
    assert tracebacks.user_line(dump, "/project") == line


def test_a_stack_ends_at_the_outermost_user_frame() -> None:
    shown = tracebacks.shorten(f"printed\n{NEWEST}{CURRENT}{MAIN}printed, too\n")
    assert shown == f"printed\n{NEWEST}{CURRENT}{MAIN}printed, too\n".replace(PYTESTS, "").replace(
        '  File "<string>", line 1 in <module>\n', ""
    )


def test_a_stack_without_user_frames_ends_at_the_first_frame() -> None:
    assert tracebacks.shorten(PYTESTS) == PYTESTS.splitlines(keepends=True)[0]


def test_a_thread_of_python_alone_is_shown_whole() -> None:
    stack = '  File "<frozen runpy>", line 8 in _run\n  File "<string>", line 1 in <module>\n'
    assert tracebacks.shorten(stack) == stack


def test_an_error_of_shared_memory_points_to_the_call() -> None:
    """pytest hides the frames of modules that say so: none that raises may forget it."""
    sources = {path.stem: path.read_text() for path in (ROOT / "shm").glob("*.py")}
    raising = {name for name, source in sources.items() if re.search(r"^ +raise ", source, re.MULTILINE)}
    assert "membership" in raising
    raising.add("reduce")  # in which torch raises
    assert {name for name in raising if "\n__tracebackhide__ = True" not in sources[name]} == set()
