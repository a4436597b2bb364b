"""A rank's note of its running example, which others read."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.features.properties.messages import (
    SIZE,
    RunningExample,
    RunningExampleFile,
    read_running_example,
)
from suites.selftest.properties.stand_ins import example_of


def test_a_running_example_can_be_read_from_outside(tmp_path: Path) -> None:
    path = str(tmp_path / "running")
    note = RunningExampleFile(path)
    note.begin(2, 7)
    note.draw(b"ab")
    note.enter_body()
    note.draw(b"c")
    assert read_running_example(path) == note.now() == RunningExample(2, 7, b"abc", True)


def test_an_example_that_has_ended_is_read_as_none(tmp_path: Path) -> None:
    path = str(tmp_path / "running")
    note = RunningExampleFile(path)
    assert read_running_example(path) is None
    note.begin(1, 1)
    note.end()
    assert read_running_example(path) is None


def test_a_choice_that_does_not_fit_in_the_file_is_left_out(tmp_path: Path) -> None:
    path, before = str(tmp_path / "running"), len(os.listdir("/proc/self/fd"))
    note = RunningExampleFile(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_size == SIZE == 256 * 1024
    room = SIZE - 14
    note.begin(1, 1)
    for choice in (b"a" * (room - 2), b"bcd", b"ef", b"g"):
        note.draw(choice)
    read = read_running_example(path)
    assert read is not None
    assert len(read.choices) == len(note.now().choices) == room
    assert read.choices[-3:] == note.now().choices[-3:] == b"aef"


def test_examples_are_the_same_if_their_choices_are() -> None:
    assert example_of(b"a", number=1).is_same(example_of(b"a", number=2))
    assert not example_of(b"a").is_same(example_of(b"ab"))
    assert not example_of(b"", number=1).is_same(example_of(b"", number=2))
    assert not example_of(b"a").is_same(RunningExample(1, 1, b"a", False))
