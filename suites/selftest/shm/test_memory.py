"""Shared memory of one process: copies, segments, and what is used again."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

from lockstep.shm import memory
from lockstep.shm.errors import OutOfSharedMemory, ShmError
from lockstep.shm.memory import Arena, Segment, available, copy, copy_to_both, in_words

PAGE = mmap.PAGESIZE
PIECE = 1 << 18
KIB64 = 1 << 16


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")


@pytest.mark.parametrize("nbytes", [0, 1, KIB64 - 1, KIB64, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 5])
def test_copies_have_all_bytes_and_no_other(nbytes: int) -> None:
    source = torch.arange(nbytes + 2).to(torch.uint8)
    one, two, three = (torch.full((nbytes + 2,), 255, dtype=torch.uint8) for _ in range(3))
    copy(one.data_ptr() + 1, source.data_ptr() + 1, nbytes)
    copy_to_both(two.data_ptr() + 1, three.data_ptr() + 1, source.data_ptr() + 1, nbytes)
    source[[0, -1]] = 255
    assert one.equal(source)
    assert two.equal(source)
    assert three.equal(source)


def test_large_copies_are_made_in_pieces_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int, int, int]] = []
    monkeypatch.setattr(memory, "_copy_small", lambda *args: made.append(("small", *args)))
    monkeypatch.setattr(memory, "_copy_large", lambda *args: made.append(("large", *args)))
    copy(1000, 2000, KIB64 - 1)
    copy(1000, 2000, KIB64)
    copy(1000, 2000, PIECE + 7)
    assert made == [
        ("small", 1000, 2000, KIB64 - 1),
        ("large", 1000, 2000, KIB64),
        ("large", 1000, 2000, PIECE),
        ("large", 1000 + PIECE, 2000 + PIECE, 7),
    ]
    made.clear()
    copy_to_both(1000, 2000, 3000, PIECE + 7)
    assert made == [
        ("large", 1000, 3000, PIECE),
        ("large", 2000, 3000, PIECE),
        ("small", 1000 + PIECE, 3000 + PIECE, 7),
        ("small", 2000 + PIECE, 3000 + PIECE, 7),
    ]


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5 MiB"),
        (3 << 30, "3 GiB"),
        (1 << 40, "1 TiB"),
        (1 << 51, "2048 TiB"),
    ],
)
def test_sizes_are_given_as_people_read_them(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words


@pytest.mark.parametrize("groups", ["1:memory:/a\n", "0::/a\n", "0::"])
def test_without_limits_of_a_control_group_the_machine_counts(
    monkeypatch: pytest.MonkeyPatch, groups: str
) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n", "/proc/self/cgroup": groups}

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert available() == 5 << 10


@pytest.mark.parametrize("populate", [False, True])
@pytest.mark.parametrize(("nbytes", "rounded"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)])
def test_a_segment_has_whole_pages_which_may_be_taken_at_once(
    nbytes: int, rounded: int, populate: bool
) -> None:
    before = descriptors()
    segment = Segment.create(nbytes, populate)
    found = os.fstat(segment.handle.fd)
    assert segment.handle.nbytes == found.st_size == len(segment.memory) == 8 * len(segment.words) == rounded
    assert segment.handle.inode == found.st_ino
    assert not os.get_inheritable(segment.handle.fd)
    assert os.readlink(f"/proc/self/fd/{segment.handle.fd}").startswith("/memfd:lockstep-shm")
    assert found.st_blocks * 512 == (rounded if populate else 0)
    segment.words[1] = 7
    assert segment.memory[8] == ctypes.c_ubyte.from_address(segment.address + 8).value == 7
    segment.close()
    assert descriptors() == before


def test_memory_of_a_new_segment_is_taken_at_once_by_default() -> None:
    segment = Segment.create(3 * PAGE)
    assert os.fstat(segment.handle.fd).st_blocks * 512 == 3 * PAGE
    segment.close()


def test_a_segment_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, f"no {nbytes} bytes from {start}")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=f"no {PAGE} bytes from 0"):
        Segment.create(1)
    assert descriptors() == before


def test_memory_that_the_system_refuses_to_map_is_an_error() -> None:
    before = descriptors()
    with pytest.raises(OSError, match="Cannot allocate memory") as error:
        Segment.create(1 << 61, populate=False)
    assert error.value.errno == errno.ENOMEM
    assert descriptors() == before


def test_a_segment_is_mapped_until_its_last_tensor_is_gone() -> None:
    segment = Segment.create(PAGE)
    name = "lockstep-shm (deleted)"
    inode = str(segment.handle.inode)

    def is_mapped() -> bool:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return any(line.endswith(name) and inode in line.split() for line in maps)

    tensor = segment.tensor(16, 3, torch.int32)
    assert segment.tensor(8, 0, torch.int16).shape == (0,)
    assert segment.tensor(8, 0, torch.int16).dtype == torch.int16
    tensor[2] = 9
    assert segment.memory[24] == 9
    segment.close()
    del segment
    assert is_mapped()
    assert tensor.tolist() == [0, 0, 9]
    del tensor
    assert not is_mapped()


def test_an_opened_segment_keeps_no_descriptor() -> None:
    segment = Segment.create(PAGE)
    before = descriptors()
    again = Segment.open(os.getpid(), segment.handle)
    assert descriptors() == before
    assert again.handle == segment.handle
    segment.close()


@pytest.mark.parametrize(
    ("nbytes", "taken"),
    [
        (1, KIB64),
        (KIB64, KIB64),
        (KIB64 + 1, 2 * KIB64),
        ((1 << 23) + 1, 1 << 24),
        (1 << 24, 1 << 24),
        ((1 << 24) + 1, (1 << 24) + (1 << 21)),
        ((1 << 24) + (1 << 21), (1 << 24) + (1 << 21)),
    ],
)
def test_an_arena_takes_powers_of_two_and_less_of_large_ones(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, taken: int
) -> None:
    create = Segment.create
    monkeypatch.setattr(Segment, "create", lambda nbytes: create(nbytes, populate=False))
    arena = Arena()
    assert arena.take(nbytes, "a call").handle.nbytes == taken
    assert arena.nbytes == taken
    arena.close()


def test_the_smallest_free_segment_that_fits_is_taken() -> None:
    arena = Arena()
    small, large, middle = (arena.take(factor * KIB64, "a call") for factor in (1, 4, 2))
    for segment in (large, small, middle):
        arena.give(segment)
    assert arena.take(2 * KIB64, "a call") is middle
    assert arena.take(1, "a call") is small
    assert arena.take(1, "a call") is large
    arena.close()


def test_a_larger_segment_replaces_the_largest_free_one() -> None:
    arena = Arena()
    small, middle = (arena.take(factor * KIB64, "a call") for factor in (1, 2))
    arena.give(small)
    arena.give(middle)
    before = len(descriptors())
    large = arena.take(4 * KIB64, "a call")
    assert len(descriptors()) == before
    assert arena.nbytes == 5 * KIB64
    arena.give(middle)  # it is no longer one of the arena's
    assert arena.take(2 * KIB64, "a call") is not middle
    arena.give(large)
    arena.close()
    assert arena.nbytes == 0
    arena.give(large)
    assert arena.take(1, "a call") is not large
    arena.close()


def test_lent_memory_is_found_by_any_address_in_it() -> None:
    arena = Arena()
    assert arena.find(1) is None
    first, second = arena.lend(4, torch.int64, "a buffer"), arena.lend(KIB64, torch.int64, "a buffer")
    assert (first.shape, first.dtype) == ((4,), torch.int64)
    for tensor, nbytes in ((first, KIB64), (second, 8 * KIB64)):
        for offset in (0, 24, nbytes - 1):
            found = arena.find(tensor.data_ptr() + offset)
            assert found is not None
            assert (found[0].address, found[1]) == (tensor.data_ptr(), offset)
            assert found[0].handle.nbytes == nbytes
    low, high = sorted((first, second), key=torch.Tensor.data_ptr)
    assert arena.find(low.data_ptr() - 1) is None
    end = high.data_ptr() + (8 * KIB64 if high is second else KIB64)
    assert arena.find(end) is None
    empty = arena.lend(0, torch.int16, "a buffer")
    assert (empty.shape, empty.dtype) == ((0,), torch.int16)
    arena.close()
    assert arena.find(first.data_ptr()) is None


def test_lent_memory_is_not_taken_while_it_is_lent_or_in_use() -> None:
    arena = Arena()
    tensor = arena.lend(4, torch.int64, "a buffer")
    address = tensor.data_ptr()
    found = arena.find(address)
    assert found is not None
    segment = found[0]
    arena.give(segment)
    other = arena.take(1, "a call")
    assert other is not segment
    arena.take_back([])
    assert arena.find(address) is not None
    del tensor, found
    arena.take_back([segment])
    assert arena.find(address) is not None
    arena.take_back([other])
    assert arena.find(address) is None
    assert arena.take(1, "a call") is segment
    arena.close()


def test_a_lack_of_memory_is_an_error_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 24
    monkeypatch.setattr(memory, "available", lambda: limit - 1)
    arena = Arena()
    arena.take(1, "a call")
    with pytest.raises(OutOfSharedMemory) as error:
        arena.take(limit, "all_reduce")
    assert str(error.value) == (
        "all_reduce needs 16 MiB of memory that peers can read, besides the 64 KiB that the group holds: "
        f"16 MiB are left. {memory.WHAT_TO_RAISE}."
    )
    assert arena.nbytes == KIB64
    arena.take(limit >> 1, "all_reduce")  # so little is not compared with what is left
    monkeypatch.setattr(memory, "available", lambda: limit)
    assert arena.take(limit, "all_reduce").handle.nbytes == limit
    arena.close()


def test_a_segment_is_opened_by_its_inode_alone() -> None:
    segment = Segment.create(100)
    again = Segment.open(os.getpid(), segment.handle)
    segment.memory[7] = 5
    assert again.memory[7] == 5
    segment.close()
    other = Segment.create(100)
    assert other.handle.fd == segment.handle.fd
    with pytest.raises(FileNotFoundError, match="has closed"):
        Segment.open(os.getpid(), segment.handle)
    other.close()


@pytest.mark.parametrize(("limit", "left"), [("max", 4096 << 10), ("5000", 2000), ("8000000", 4096 << 10)])
def test_a_control_group_may_leave_less_memory(
    monkeypatch: pytest.MonkeyPatch, limit: str, left: int
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4096 kB\n",
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": f"{limit}\n",
        "/sys/fs/cgroup/a/b/memory.current": "3000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert available() == left


def test_a_segment_too_large_says_how_much_and_for_what() -> None:
    with pytest.raises(ShmError, match=r"all_reduce needs 1024 TiB .*iB are left.*`ulimit -v`"):
        Arena().take(1 << 50, "all_reduce")


def test_memory_that_was_lent_when_an_arena_closed_does_not_come_back() -> None:
    arena = Arena()
    lent = arena.lend(4, torch.float32, "a buffer")
    arena.close()
    del lent
    arena.take_back([])
    assert arena.nbytes == 0
