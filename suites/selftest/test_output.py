"""Texts and files that are truncated, and the folders in which the output of ranks is kept."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import WorldError
from lockstep.output import (
    OutputDirectory,
    log_file,
    read_truncated,
    shows_live,
    shows_logs,
    truncate,
    truncate_lines,
    write_text,
    write_texts,
)


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


def test_what_is_left_out_begins_and_ends_at_a_line_unless_that_is_most_of_it(tmp_path: Path) -> None:
    text = "".join(f"{number:03}\n" for number in range(100))
    note = "[... 344 characters left out; ask ...]\n"
    assert truncate(text, 100, "ask") == f"{text[:28]}{note}{text[-28:]}"
    path, note_of_bytes = tmp_path / "log", "[... 340 bytes left out; ask ...]\n"
    path.write_text(text)
    assert read_truncated(path, most=100, remedy="ask") == f"{text[:32]}{note_of_bytes}{text[-28:]}"
    assert read_truncated(path, most=400) == text
    assert read_truncated(path, start=396, most=4) == "099\n"
    assert read_truncated(path, start=401) == ""
    long = f"{'x' * 10}\n{'y' * 380}\n{'z' * 9}"
    assert truncate(long, 100) == f"{long[:32]}\n[... 337 characters left out ...]\n{long[-32:]}"


def test_a_first_and_a_last_line_are_kept_however_long_they_are() -> None:
    for lines in ["x" * 50], ["x" * 50, "y" * 50]:
        assert truncate_lines(lines, 10) == lines
    assert truncate_lines(["x" * 50, "y", "z"], 10) == ["x" * 50, "y", "z"]
    assert truncate_lines([*"xyz"], 2) == ["x", "[... 1 line left out ...]", "z"]
    lines = ["x" * 50, *"abc", "y" * 50]
    assert truncate_lines(lines, 60) == ["x" * 50, "[... 3 lines left out ...]", "y" * 50]
    assert truncate_lines(lines, 103) == lines


def test_a_name_that_had_to_be_changed_has_a_hash() -> None:
    folder = OutputDirectory("/kept").of_test
    assert folder("a.py::test_b[x::y[z]").name == "test_b[x__y[z]-ed07e94a"
    assert folder("a.py::test_b.").name == "test_b-" + folder("a.py::test_b.").name[-8:]
    assert [len(folder(f"a.py::{'x' * length}").name) for length in (120, 121)] == [120, 129]


def test_output_of_ranks_in_an_earlier_run_is_removed(tmp_path: Path) -> None:
    kept = OutputDirectory(str(tmp_path))
    rank, other = (kept.write("a.py::test_b", number, "stdout", "x", "w") for number in (0, 1))
    mine = rank.with_name("mine.txt")
    mine.touch()
    kept.clear("a.py::test_b")
    assert [rank.exists(), other.exists(), mine.exists()] == [False, False, True]
    kept.clear("a.py::test_of_no_run")


def test_logs_of_ranks_are_kept_unless_they_are_empty(tmp_path: Path) -> None:
    kept, log = OutputDirectory(str(tmp_path / "kept")), tmp_path / "rank-1.log"
    kept.keep_log("gw1", "world-2", log)
    log.touch()
    kept.keep_log("gw1", "world-2", log)
    assert not (tmp_path / "kept").exists()
    log.write_text("said")
    for controller in ("gw1", "gw2"):
        kept.keep_log(controller, "world-2", log)
    folder = tmp_path / "kept" / "outside-of-tests"
    copies = [folder / name / "world-2" / "rank-1.log" for name in ("gw1", "gw2")]
    assert [copy.read_text() for copy in copies] == ["said", "said"]
    kept.clear_logs("gw1")
    kept.clear_logs("gw1")
    assert [copy.exists() for copy in copies] == [False, True]
    assert copies[1].parents[1].exists()
    assert not copies[0].parents[1].exists()


def test_a_file_that_is_written_is_as_it_was_given_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "one\r\ntwo\n\udcff")
    assert path.read_bytes() == b"one\r\ntwo\n\\udcff"
    assert os.listdir(tmp_path) == ["a.txt"]


def config_of(*plugins: str, ini: dict[str, Any] | None = None, **options: Any) -> Any:
    return SimpleNamespace(
        pluginmanager=SimpleNamespace(hasplugin=lambda name: name in plugins),
        getoption=lambda name, default=None: options.get(name, default),
        getini=(ini or {}).get,
    )


def test_logs_are_shown_and_written_by_the_plugin_of_logging_alone() -> None:
    level, ini = {"log_cli_level": 0}, {"log_cli": True}
    configs = [config_of("logging", **level), config_of("logging", ini=ini), config_of("logging")]
    configs += [config_of(ini=ini, **level)]
    assert [shows_logs(config) for config in configs] == [True, True, False, False]
    assert [shows_live(config) for config in configs] == [True, True, False, False]
    assert shows_live(config_of(setupshow=True)) is True
    files = [
        config_of("logging", log_file="a", ini={"log_file": "b"}),
        config_of("logging", ini={"log_file": "b"}),
        config_of("logging"),
        config_of(log_file="a"),
    ]
    assert [log_file(config) for config in files] == ["a", "b", "", ""]
