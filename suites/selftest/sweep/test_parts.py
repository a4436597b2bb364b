"""The parts of a sweep that need no ranks: points, operations on files, what a loss of power takes."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.features.sweep.directories import Directories, move_aside, owned
from lockstep.features.sweep.files import FileCalls
from lockstep.features.sweep.journal import Journal, lose_unsynced
from lockstep.features.sweep.points import Point, Spot, choose, points_of

SPOTS = [Spot(rank, "write", number, number - 1, "") for rank in range(2) for number in range(1, 51)]


class Log:
    """An observer that notes operations, and refuses or hides what it is asked to."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.read: set[str] = set()
        self.refused = ""
        self.hidden: set[str] = set()

    def before(self, op: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        self.ops.append(f"{op} {os.path.basename(path)}")
        if op == self.refused:
            half()
            raise OSError(errno.ENOSPC, "full")

    def after(self, op: str, path: str, target: str) -> None:
        self.ops.append(f"done {op}")

    def reads(self, path: str) -> None:
        self.read.add(os.path.basename(path))

    def hides(self, path: str) -> bool:
        return os.path.basename(path) in self.hidden


@pytest.fixture
def log() -> Log:
    return Log()


def test_operations_of_python_are_seen(tmp_path: Path, log: Log) -> None:
    with FileCalls([str(tmp_path)], log).installed():
        (tmp_path / "a").mkdir()
        with (tmp_path / "a" / "x.tmp").open("w") as file:
            file.write("text")
            file.flush()
            os.fsync(file.fileno())
        (tmp_path / "a" / "x.tmp").rename(tmp_path / "a" / "x")
        descriptor = os.open(tmp_path / "y", os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, b"more")
        os.close(descriptor)
        (tmp_path / "y").unlink()
    seen = [op for op in log.ops if not op.startswith("done")]
    assert seen == [
        *("mkdir a", "open x.tmp", "write x.tmp", "fsync x.tmp", "rename x"),
        *("open y", "write y", "unlink y"),
    ]
    assert (tmp_path / "a" / "x").read_text() == "text"


def test_other_directories_and_later_calls_are_not_seen(tmp_path: Path, log: Log) -> None:
    (tmp_path / "in").mkdir()
    with FileCalls([str(tmp_path / "in")], log).installed():
        (tmp_path / "inside").write_text("x")
    (tmp_path / "in" / "y").write_text("y")
    assert (log.ops, log.read) == ([], set())


def test_a_full_disk_takes_half_of_a_write(tmp_path: Path, log: Log) -> None:
    log.refused = "write"
    seen = FileCalls([str(tmp_path)], log).installed()
    with seen, pytest.raises(OSError, match="full"), (tmp_path / "x").open("wb", buffering=0) as file:
        file.write(b"12345678")
    assert (tmp_path / "x").read_bytes() == b"1234"


def test_hidden_files_are_not_there_for_any_function(tmp_path: Path, log: Log) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "y").touch()
    log.hidden = {"x"}
    with FileCalls([str(tmp_path)], log).installed():
        assert not (tmp_path / "x").exists()
        assert [each.name for each in tmp_path.iterdir()] == ["y"]
        assert [each.name for each in os.scandir(tmp_path)] == ["y"]
        assert not os.access(tmp_path / "x", os.R_OK)
        with pytest.raises(FileNotFoundError):
            (tmp_path / "x").read_text()
        assert (tmp_path / "y").read_text() == ""
    assert log.read >= {"x", "y"}


def test_modes_of_open_work_as_before(tmp_path: Path, log: Log) -> None:
    path = tmp_path / "x"
    with FileCalls([str(tmp_path)], log).installed():
        path.write_bytes(b"one\n")
        with path.open("a", encoding="utf-8", newline="\n") as text:
            text.write("zwei ü\n")
        with path.open("r+b") as both:
            both.seek(0)
            both.write(b"ONE")
            assert both.read() == "\nzwei ü\n".encode()
        with pytest.raises(FileExistsError):
            path.open("xb")
        with pytest.raises(ValueError, match="encoding"):
            open(path, "wb", encoding="utf-8")  # noqa: SIM115
    assert path.read_text() == "ONE\nzwei ü\n"


def test_a_loss_of_power_takes_what_was_not_synced(tmp_path: Path) -> None:
    notes = tmp_path / "journal"
    journal, folder = Journal(str(notes)), tmp_path / "files"
    folder.mkdir()
    for name, is_synced in (("synced", True), ("lost", False)):
        path, aside = folder / name, folder / "aside"
        aside.touch()
        journal.note("open", str(aside), "")
        aside.write_bytes(b"data")
        journal.note("write", str(aside), "")
        if is_synced:
            journal.note("fsync", str(aside), "")
        aside.rename(path)
        journal.note("rename", str(aside), str(path))
    journal.close()
    lost = lose_unsynced([notes])
    assert [Path(path).name for path in lost] == ["lost"]
    assert (folder / "synced").read_bytes() == b"data"


def test_points_are_spread_over_kinds_ranks_and_phases() -> None:
    points = points_of(SPOTS, ["kill", "fail", "full", "delay"])
    assert len(points) == 400
    chosen = choose(points, 40, seed=3)
    assert chosen == choose(points, 40, seed=3)
    assert chosen != choose(points, 40, seed=4)
    assert Counter((each.kind, each.rank) for each in chosen) == {
        (kind, rank): 5 for kind in ("kill", "fail", "full", "delay") for rank in range(2)
    }
    assert {(each.number - 1) // 10 for each in chosen if each.kind == "kill"} == set(range(5))
    assert len(choose(points, None, seed=3)) == 400
    parts = [choose(points, 100, seed=3)[part::3] for part in range(3)]
    assert len({str(each) for part in parts for each in part}) == 100


def test_the_name_of_a_point_is_read_back() -> None:
    for point in points_of(SPOTS, ["kill", "power"]):
        assert Point.parse(str(point)) == point


def test_directories_are_put_back_and_taken_over(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", [tmp_path / f"own-{rank}" for rank in range(2)]
    folders = [(str(shared), str(own[rank]), str(shared / "below")) for rank in range(2)]
    assert {*owned(folders, 0)} == {"0/0", "0/1"}
    assert {*owned(folders, 1)} == {"1/1"}
    (shared / "below").mkdir(parents=True)
    (shared / "below" / "old").write_text("old")
    kept = [Directories(owned(folders, rank), tmp_path / f"kept-{rank}") for rank in range(2)]
    (shared / "below" / "old").unlink()
    (shared / "new").write_text("new")
    (own[1] / "mine").write_text("1")
    left = move_aside(folders, tmp_path / "aside")
    assert [*shared.iterdir()] == []
    for each in kept:
        each.put_back()
    assert (shared / "below" / "old").read_text() == "old"
    for each in kept:
        each.take_over(left)
    assert sorted(each.name for each in shared.iterdir()) == ["below", "new"]
    assert [*(shared / "below").iterdir()] == []
    assert (own[1] / "mine").read_text() == "1"
