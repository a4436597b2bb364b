"""Texts and files that are truncated, and the folders in which the output of ranks is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.exceptions import WorldError
from lockstep.output import OutputDirectory, read_truncated, truncate, truncate_lines, write_texts


@pytest.mark.parametrize("length", [0, 99, 100, 101, 1000, 10**6])
def test_a_truncated_text_has_a_limit_and_says_what_is_missing(length: int) -> None:
    text = "x" * length
    short = truncate(text, 100, "look elsewhere")
    assert len(short) <= 100
    assert truncate(short, 100) == short
    if length > 100:
        head, note, tail = short.splitlines()
        assert note == f"[... {length - len(head) - len(tail):,} characters left out; look elsewhere ...]"
    else:
        assert short == text


def test_lines_are_truncated_to_the_first_and_the_last_ones() -> None:
    lines = [f"{n:09}" for n in range(1000)]
    assert truncate_lines(lines, 9000) == lines
    assert truncate_lines(lines, 90) == [*lines[:5], "[... 990 lines left out ...]", *lines[-5:]]


def test_a_file_is_truncated_from_where_reading_begins(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before" + b"\xff" + b"a\n" * 500)
    assert read_truncated(path, start=len(b"before\xff") + 990, most=100) == "a\n" * 5
    assert read_truncated(path, most=100).splitlines()[0] == "before\N{REPLACEMENT CHARACTER}a"
    assert read_truncated(tmp_path / "nothing") == ""


def test_folders_follow_node_ids_and_stay_in_the_directory() -> None:
    folder = OutputDirectory("/kept").of_test
    assert (
        str(folder("suites/test_a.py::TestB::test_c[2-ranks]"))
        == "/kept/suites/test_a.py/TestB/test_c[2-ranks]"
    )
    assert len(folder(f"test_a.py::test_b[{'x' * 300}]").name) < 140
    outside = folder("../other/test_a.py::test_b")
    assert outside.parts[:2] == ("/", "kept")
    assert ".." not in outside.parts
    assert (
        folder("test_a.py::test_b[a:b]")
        != folder("test_a.py::test_b[a_b]")
        != folder("test_a.py::test_b[a?b]")
    )


def test_what_is_kept_is_written_to_the_file_that_is_returned(tmp_path: Path) -> None:
    kept = OutputDirectory(str(tmp_path))
    first = kept.write("test_a.py::test_b", 1, "stdout", "one\r\n", "w")
    assert kept.write("test_a.py::test_b", 1, "stdout", "two", "a") == first
    assert (first.name, first.read_bytes()) == ("rank-1.stdout", b"one\r\ntwo")
    assert first.is_relative_to(tmp_path)


def test_output_of_an_earlier_run_that_stays_is_refused(tmp_path: Path) -> None:
    kept = OutputDirectory(str(tmp_path))
    (kept.of_test("test_a.py::test_b") / "rank-0.stdout").mkdir(parents=True)
    with pytest.raises(WorldError, match="--rank-output-dir: cannot remove an earlier run's output: "):
        kept.clear("test_a.py::test_b")


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    first, folder = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("before")
    folder.mkdir()
    with pytest.raises(IsADirectoryError, match=r"second\.txt"):
        write_texts({first: "after", folder: "after"})
    assert first.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == [first, folder]
    folder.rmdir()
    write_texts({first: "after", folder: "after"})
    assert [each.read_text() for each in (first, folder)] == ["after", "after"]
