"""The parts of a sweep that need no ranks: points, operations on files, what a loss of power takes."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.injection.calls import INTERCEPTION
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.sweep.directories import Directories, move_aside, owned
from lockstep.features.sweep.files import FileCalls
from lockstep.features.sweep.journal import Journal, lose_unsynced
from lockstep.features.sweep.plugin import pytest_configure
from lockstep.features.sweep.striker import Striker
from lockstep.features.sweep.sweep import Sweep


class Log:
    """An observer that notes operations, and refuses or hides what it is asked to."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.read: set[str] = set()
        self.refused = ""
        self.takes_half = True
        self.hidden: set[str] = set()

    def before(self, op: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        self.ops.append(f"{op} {os.path.basename(path)}")
        if op == self.refused:
            if self.takes_half:
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


def test_a_file_that_is_cut_is_seen(tmp_path: Path, log: Log) -> None:
    (tmp_path / "x").write_bytes(b"12345678")
    with FileCalls([str(tmp_path)], log).installed(), (tmp_path / "x").open("r+b") as file:
        assert file.truncate(3) == 3
    assert log.ops == ["open x", "done open", "truncate x", "done truncate"]
    assert (tmp_path / "x").read_bytes() == b"123"


def test_other_directories_and_later_calls_are_not_seen(tmp_path: Path, log: Log) -> None:
    (tmp_path / "in").mkdir()
    with FileCalls([str(tmp_path / "in")], log).installed():
        (tmp_path / "inside").write_text("x")
    (tmp_path / "in" / "y").write_text("y")
    assert (log.ops, log.read) == ([], set())


DATA = b"12345678"


def send(file: int, source: int) -> None:
    os.sendfile(file, source, 0, 8)


def copy(file: int, source: int) -> None:
    os.copy_file_range(source, file, 8)


WRITES: dict[str, Callable[[int, int], object]] = {
    "write": lambda file, source: os.write(file, DATA),
    "pwrite": lambda file, source: os.pwrite(file, DATA, 0),
    "writev": lambda file, source: os.writev(file, [DATA[:2], DATA[2:]]),
    "pwritev": lambda file, source: os.pwritev(file, [DATA[:5], DATA[5:]], 0),
    "sendfile": send,
    "copy_file_range": copy,
    "open": lambda file, source: open(file, "wb", buffering=0, closefd=False).write(DATA),  # noqa: SIM115
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_full_disk_takes_half_of_a_write(
    tmp_path: Path, log: Log, write: Callable[[int, int], object]
) -> None:
    log.refused = "write"
    (tmp_path / "source").write_bytes(DATA)
    source, file = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("source", "x"))
    with FileCalls([str(tmp_path)], log).installed(), pytest.raises(OSError, match="full"):
        write(file, source)
    os.close(source)
    os.close(file)
    assert (tmp_path / "x").read_bytes() == b"1234"


def test_the_writer_in_cpp_of_torch_save_is_seen(tmp_path: Path, log: Log) -> None:
    path, state = tmp_path / "state.pt", torch.arange(1000)
    with FileCalls([str(tmp_path)], log).installed():
        torch.save(state, str(path))
    assert log.ops == ["open state.pt", "done open", "write state.pt", "done write"]
    assert torch.load(path).equal(state)
    whole = path.read_bytes()
    log.refused = "write"
    with FileCalls([str(tmp_path)], log).installed(), pytest.raises(OSError, match="full"):
        torch.save(state, path)
    gc.collect()  # the destructor of the writer writes nothing more
    assert path.read_bytes() == whole[: len(whole) // 2]


def test_the_writer_in_cpp_ends_no_file_that_it_was_refused(tmp_path: Path, log: Log) -> None:
    path, log.refused, log.takes_half = tmp_path / "state.pt", "write", False
    with FileCalls([str(tmp_path)], log).installed(), pytest.raises(OSError, match="full"):
        torch.save(torch.arange(1000), path)
    gc.collect()
    assert b"PK\x03\x04" in path.read_bytes()  # of a record; the directory at the end is missing
    assert b"PK\x01\x02" not in path.read_bytes()


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


def lost_of(folder: Path, ops: list[tuple[str, str, str, int]]) -> dict[str, int]:
    """Return the sizes of the files of a folder after operations, each with a size, and a loss of power."""
    notes = folder / "journal"
    lines = [
        json.dumps([time, op, f"{folder}/{path}", f"{folder}/{target}" if target else "", size])
        for time, (op, path, target, size) in enumerate(ops)
    ]
    notes.write_text("\n".join(reversed(lines)))
    paths = lose_unsynced([notes])
    left = {each.name: each.stat().st_size for each in folder.iterdir() if each != notes}
    assert {Path(each).name for each in paths} <= {*left}
    return left


@pytest.mark.parametrize(
    ("ops", "kept"),
    [
        ([("write", "x", "", 8)], 0),
        ([("open", "x", "", 5), ("write", "x", "", 8)], 5),
        ([("open", "x", "", 5), ("open", "x", "", 3), ("write", "x", "", 8)], 3),
        ([("open", "x", "", 3), ("open", "x", "", 5), ("write", "x", "", 8)], 3),
        ([("open", "x", "", 0), ("write", "x", "", 8), ("fsync", "x", "", 8)], 8),
        ([("open", "x", "", 0), ("fsync", "x", "", 8)], 8),
        ([("open", "a", "", 0), ("write", "a", "", 8), ("fsync", "a", "", 6), ("rename", "a", "x", 8)], 6),
        ([("write", "x", "", 8), ("rename", "a", "x", 8)], 8),
        ([("rename", "a", "x", 8), ("write", "b", "", 2)], 8),
    ],
)
def test_a_file_keeps_what_it_had_when_it_was_synced(
    tmp_path: Path, ops: list[tuple[str, str, str, int]], kept: int
) -> None:
    (tmp_path / "x").write_bytes(DATA)
    assert lost_of(tmp_path, ops) == {"x": kept}


def test_ranks_on_two_hosts_are_refused() -> None:
    session: Any = SimpleNamespace(world=SimpleNamespace(backend="gloo", hosts=("a", "b")))
    sweep = Sweep(session, LostPeers(), (0, 1))
    with pytest.raises(RuntimeError, match="the ranks are on 2 hosts; a sweep needs them on one"):
        sweep(print, then=print, files=".")


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("sweep_points", "some", "--sweep-points 'some': a number from 1, or all"),
        ("sweep_seconds", -1.0, "--sweep-seconds -1.0: a number of seconds above 0"),
        ("sweep_point", "boom", "--sweep-point 'boom': write a point as reports name it"),
        ("sweep_point", "kill rank 1 sing 2", "the operations are collective, open, write"),
        ("sweep_point", "maim rank 1 write 2", "'maim rank 1 write 2': the kinds are kill, torn, all"),
        ("sweep_point", "kill rank x write 2", "'kill rank x write 2': write a point as"),
        ("sweep_point", "kill rank 1 write x", "'kill rank 1 write x': write a point as"),
        ("sweep_points", "0", "--sweep-points '0': a number from 1, or all"),
        ("sweep_points", "1" * 10, "--sweep-points '1111111111': a number from 1, or all"),
    ],
)
def test_a_wrong_option_is_refused(option: str, value: object, why: str) -> None:
    options = dict.fromkeys(("sweep_points", "sweep_seconds", "sweep_point")) | {option: value}
    config: Any = SimpleNamespace(option=SimpleNamespace(**options), getini=lambda name: "100")
    with pytest.raises(pytest.UsageError, match=re.escape(why)):
        pytest_configure(config)


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


def test_handles_of_collectives_are_let_go_of_behind_a_sweep() -> None:
    """They keep tensors alive."""
    handle: Any = object()
    with Striker(0, []).installed():
        INTERCEPTION._works.append(handle)
    assert INTERCEPTION._works == []
