"""Calls on files one by one: what an observer sees of each, and what the caller gets."""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.features.sweep import files
from lockstep.features.sweep.files import FileCalls


class Seen:
    """An observer that notes whole paths, below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ops: list[str] = []
        self.read: list[str] = []
        self.hidden: set[str] = set()

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.folder) if path else ""

    def before(self, op: str, path: str, half: Callable[[], object] = lambda: None) -> None:
        os.stat(self.folder)
        self.ops.append(f"{op} {self._short(path)}")

    def after(self, op: str, path: str, target: str) -> None:
        self.ops.append(f"{op} {self._short(path)} {self._short(target)}".rstrip())

    def reads(self, path: str) -> None:
        self.read.append(self._short(path))

    def hides(self, path: str) -> bool:
        os.listdir(self.folder)
        return self._short(path) in self.hidden


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Seen]:
    (tmp_path / "in").mkdir()
    found = Seen(tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    calls = FileCalls([str(tmp_path / "link")], found)
    with calls.installed():
        vars(found)["calls"] = calls
        yield found


def ops(seen: Seen) -> list[str]:
    """Return what was seen since the last look; of each operation its beginning and its end are alike."""
    noted = [*seen.ops]
    seen.ops.clear()
    return noted


def test_each_function_of_os_is_seen_with_its_path(seen: Seen, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    at = os.open(folder, os.O_RDONLY)
    os.mkdir(folder / "a")
    os.mkdir("b", dir_fd=at)
    os.mkdir(path=folder / "c")
    assert ops(seen) == ["mkdir a"] * 2 + ["mkdir b"] * 2 + ["mkdir c"] * 2
    os.rmdir(os.fsencode(folder / "a"))
    assert ops(seen) == ["rmdir a"] * 2
    file = os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=at)
    assert ops(seen) == ["open x"] * 2
    assert os.write(file, b"1234") == 4
    os.ftruncate(file, 3)
    os.fsync(file)
    os.fdatasync(file)
    assert ops(seen) == [each for op in ("write", "truncate", "fsync", "fsync") for each in [f"{op} x"] * 2]
    os.truncate(folder / "x", 2)
    os.remove(folder / "x")
    assert ops(seen) == ["truncate x"] * 2 + ["unlink x"] * 2
    os.close(file)
    os.close(at)
    os.rename(folder / "b", folder / "d")
    assert ops(seen) == ["rename d", "rename b d"]
    os.replace(tmp_path / "in" / "d", tmp_path / "out")
    assert ops(seen) == ["rename d", "rename d"]
    os.rename(src=tmp_path / "out", dst=folder / "e")
    assert ops(seen) == ["rename e", "rename  e"]
    os.symlink("/no/where", folder / "s")
    assert ops(seen) == ["link s", "link  s"]
    os.rename(tmp_path / "link", tmp_path / "other")
    assert ops(seen) == ["rename ../link"] * 2


def test_a_raw_file_of_no_observer_is_cut_as_any_other(tmp_path: Path) -> None:
    with files._File(tmp_path / "x", "w") as raw:
        assert raw.write(b"1234") == 4
        assert raw.truncate(3) == 3
    assert (tmp_path / "x").read_bytes() == b"123"


def test_only_the_directories_and_what_is_below_are_seen(seen: Seen, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "inside")
    (tmp_path / "inside" / "x").write_text("x")
    assert (tmp_path / "inside" / "x").read_text() == "x"
    assert os.listdir(tmp_path / "inside") == ["x"]
    os.close(os.open(tmp_path / "inside" / "x", os.O_WRONLY))
    assert (ops(seen), seen.read) == ([], [])
    with pytest.raises(TypeError):
        os.mkdir(None)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(9999)
    with pytest.raises(ValueError, match="null"):
        os.mkdir("a\0b")
    os.listdir(tmp_path / "link")
    assert seen.read == ["../link"]


def test_looks_are_seen_and_find_nothing_that_is_hidden(seen: Seen, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("x", "y"):
        (folder / name).touch()
    ops(seen)
    seen.hidden = {"x"}
    seen.read.clear()
    assert os.access(folder / "y", os.R_OK)
    assert not os.access(folder / "x", os.R_OK)
    assert os.stat(path=folder / "y").st_size == 0
    for look in (os.stat, os.lstat, os.readlink, os.listdir, os.scandir):
        with pytest.raises(FileNotFoundError, match=r"^\[Errno 2\] No such file or directory: '.*/in/x'$"):
            look(folder / "x")
    assert seen.read == ["y", *["x"], "y", *["x"] * 5]
    assert os.listdir(folder) == ["y"]
    assert os.listdir(os.fsencode(folder)) == [b"y"]
    with os.scandir(folder) as entries:
        assert [each.name for each in entries] == ["y"]
    with pytest.raises(FileNotFoundError):
        os.open(folder / "x", os.O_RDONLY)
    os.close(os.open(folder / "y", os.O_RDONLY))
    assert ops(seen) == []
    os.close(os.open(folder / "x", os.O_RDWR))
    os.close(os.open(folder / "x", os.O_WRONLY))
    os.close(os.open(folder / "x", os.O_RDONLY | os.O_CREAT))
    assert ops(seen) == ["open x"] * 6


@pytest.mark.parametrize(
    ("mode", "buffering", "kind"),
    [
        ("w", -1, io.TextIOWrapper),
        ("wb", -1, io.BufferedWriter),
        ("w+b", -1, io.BufferedRandom),
        ("xb", 0, io.FileIO),
        ("a+", 1, io.TextIOWrapper),
    ],
)
def test_a_file_that_is_written_is_as_of_open(
    seen: Seen, tmp_path: Path, mode: str, buffering: int, kind: type
) -> None:
    path = tmp_path / "in" / "x"
    with open(path, mode, buffering) as file:
        assert isinstance(file, kind)
        assert ops(seen) == ["open x"] * 2
        assert file.mode == {"w+b": "rb+", "xb": "xb"}.get(mode, mode)
        data: Any = b"one\n" if "b" in mode else "one\n"
        assert file.write(data) == 4
        assert ops(seen) == (["write x"] * 2 if buffering in (0, 1) else [])
        assert file.name == path
    assert ops(seen) == ([] if buffering in (0, 1) else ["write x"] * 2)
    assert path.read_bytes() == b"one\n"


def test_the_options_of_open_are_those_of_a_file(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "in" / "x"
    with open(path, "w", -1, "utf-16-le", "replace", "\r\n") as file:
        assert (file.encoding, file.errors) == ("utf-16-le", "replace")
        file.write("a\n")
    assert path.read_bytes() == "a\r\n".encode("utf-16-le")
    with open(path, "wb", buffering=2) as small:
        ops(seen)
        small.write(b"abc")
        assert ops(seen) == ["write x"] * 2
    opened: list[Any] = []

    def opener(name: Any, flags: int) -> int:
        opened.append(name)
        return os.open(name, flags)

    with open(path, "w", opener=opener):
        assert opened == [path]
    ops(seen)
    descriptor = os.open(path, os.O_RDWR)
    ops(seen)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(b"x")
    assert ops(seen) == ["write x"] * 2
    assert os.fstat(descriptor).st_size == 1
    os.close(descriptor)


def test_modes_that_open_refuses_write_nothing(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "in" / "x"
    for mode, options in (
        ("wb", {"encoding": "utf-8"}),
        ("wb", {"errors": "replace"}),
        ("wb", {"newline": "\n"}),
        ("w", {"buffering": 0}),
    ):
        with pytest.raises(ValueError, match=r"binary|text"):
            path.open(mode, **options)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        path.open(3)  # type: ignore[call-overload]
    assert ops(seen) == []
    seen.hidden = {"x"}
    with pytest.raises(FileNotFoundError, match="in/x"):
        path.open()
    assert seen.read[-1] == "x"


def test_what_the_observer_and_a_thread_of_its_own_do_is_not_seen(seen: Seen, tmp_path: Path) -> None:
    path = tmp_path / "in" / "x"
    calls: FileCalls = vars(seen)["calls"]
    with calls.unseen():
        with calls.unseen():
            path.touch()
        path.unlink()
        other = threading.Thread(target=path.touch, daemon=True)
        other.start()
        other.join(60)
    assert {op.split()[0] for op in ops(seen)} <= {"open"}
    path.unlink()
    assert ops(seen) == ["unlink x"] * 2


def test_functions_are_restored(tmp_path: Path) -> None:
    before = {name: getattr(os, name) for name in dir(os)}, io.open, builtins.open
    installed = FileCalls([str(tmp_path)], Seen(tmp_path)).installed()
    installed.__enter__()
    changed = {name for name in dir(os) if getattr(os, name) is not before[0][name]}
    assert io.open is builtins.open is not before[1]
    with pytest.raises(ZeroDivisionError):
        installed.gen.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    assert changed == {
        *files._BY_PATH,
        *files._BY_DESCRIPTOR,
        *files._BY_TWO_PATHS,
        *files._READS,
        "open",
        "copy_file_range",
    }
    assert ({name: getattr(os, name) for name in dir(os)}, io.open, builtins.open) == before
