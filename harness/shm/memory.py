"""Anonymous memory that ranks of one host share: made here, or a peer's. Linux; imports torch only.

A segment has no name in any file system. A peer opens it through /proc, by the numbers of the process and of
the descriptor, and compares the inode, so that it never maps something else.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.shm.errors import OutOfSharedMemory

__tracebackhide__ = True  # under pytest a failure points to the call

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

# Small copies cost less with the lock of the interpreter held; large ones would stop other threads.
_copy_small = ctypes.PyDLL(None).memmove
_copy_large = ctypes.CDLL(None).memmove
for _function in (_copy_small, _copy_large):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None
_LARGE = 1 << 16

# Larger pieces are written past the caches, from which peers could read them. All-gathers of 8 MiB a rank
# took 2.15 ms in one piece, 2.05 in pieces of 64 KiB, 1.85 of 256 KiB, 2.40 of 1 MiB; 1.6 ms with
# `copy_to_both`.
_PIECE = 1 << 18

# What is smaller is not compared with the memory that is left: reading that takes 0.05 ms.
_WORTH_A_LOOK = 1 << 24

OUT_OF = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of a process that is out of memory or of descriptors."""
WHAT_TO_RAISE = (
    "Raise the limit of memory (`ulimit -v`, the control group) or of descriptors (`ulimit -n`), or send "
    "less at once"
)


def copy(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from address to address."""
    if nbytes < _LARGE:
        _copy_small(to, source, nbytes)
        return
    for start in range(0, nbytes, _PIECE):
        _copy_large(to + start, source + start, min(_PIECE, nbytes - start))


def copy_to_both(first: int, second: int, source: int, nbytes: int) -> None:
    """Copy bytes to two addresses, reading them from memory once."""
    for start in range(0, nbytes, _PIECE):
        size = min(_PIECE, nbytes - start)
        copy(first + start, source + start, size)
        copy(second + start, source + start, size)


@dataclass(frozen=True, slots=True)
class Handle:
    """The place where a process finds a segment of another.

    Attributes:
        fd: The descriptor in the process that made it.
        inode: Number, which no other segment has while this one lives.
        nbytes: Size of the segment.
    """

    fd: int
    inode: int
    nbytes: int


class Segment:
    """Memory of one rank, mapped into this process.

    It is unmapped when the last tensor over it is gone.

    Attributes:
        handle: What peers need to open it.
        address: Where it is in this process.
        memory: The segment as bytes.
        words: The segment as 64-bit words.
    """

    def __init__(self, handle: Handle, fd: int, populate: bool) -> None:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        address = _libc.mmap(None, handle.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.handle = handle
        self.address: int = address
        self._mapping = (ctypes.c_char * handle.nbytes).from_address(address)
        unmap = weakref.finalize(self._mapping, _libc.munmap, address, handle.nbytes)
        unmap.atexit = False  # tensors may be in use until the end
        self.memory = memoryview(self._mapping).cast("B")
        self.words = self.memory.cast("Q")

    @staticmethod
    def create(nbytes: int, populate: bool = True) -> Segment:
        """Make a segment; its descriptor stays open until `close`.

        Args:
            nbytes: Size; it is rounded up to whole pages.
            populate: Whether to take all of its memory now, and not when it is first touched.

        Raises:
            OSError: there is no memory, or no descriptor.
        """
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("lockstep-shm", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            if populate:
                # Where this fails there is an error; a page that cannot be had later is a SIGBUS.
                os.posix_fallocate(fd, 0, nbytes)
            return Segment(Handle(fd, os.fstat(fd).st_ino, nbytes), fd, populate)
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def open(pid: int, handle: Handle, populate: bool = True) -> Segment:
        """Map a segment of another process.

        Raises:
            OSError: the process or the segment is gone, or there are too few descriptors.
        """
        fd = os.open(f"/proc/{pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != handle.inode:
                raise FileNotFoundError(f"process {pid} has closed the segment {handle.inode}")
            return Segment(handle, fd, populate)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the descriptor of a segment that was made here."""
        os.close(self.handle.fd)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements of the segment, from `offset` bytes on, as a 1-D tensor that keeps it mapped."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=numel, offset=offset)


def in_words(nbytes: float) -> str:
    """Return a size as people read it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def available() -> int:
    """Return how many bytes this process may still take: of the machine, and of its control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        root = Path("/sys/fs/cgroup")
        of_group = Path("/proc/self/cgroup").read_text().split("0::", 1)[1].splitlines()[0].lstrip("/")
        limit = (root / of_group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((root / of_group / "memory.current").read_text())
            left = min(left, int(limit) - used)
    except (OSError, IndexError, ValueError):  # no version 2 of control groups: the machine's memory counts
        pass
    return left


class Arena:
    """The segments that one rank fills for its peers in one group: reused, and more of them on demand.

    A segment is in use from `take` to `give`; it is never shared by two contributions.
    """

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._segments: dict[int, Segment] = {}
        self._lent: dict[int, Segment] = {}
        """Segments that are lent, by address; `_starts` are their addresses in order."""
        self._starts: list[int] = []
        self._returned: deque[int] = deque()
        """Addresses of lent segments without a tensor by now."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return sum(segment.handle.nbytes for segment in self._segments.values())

    def take(self, nbytes: int, why: object) -> Segment:
        """Return the smallest free segment of at least `nbytes`, or a new one instead of a smaller one.

        Args:
            nbytes: The size.
            why: The operation, for the error.

        Raises:
            OutOfSharedMemory: there is no memory, or no descriptor.
        """
        fitting = [segment for segment in self._free if segment.handle.nbytes >= nbytes]
        if fitting:
            segment = min(fitting, key=lambda one: one.handle.nbytes)
            self._free.remove(segment)
            return segment
        if self._free:  # so that small ones do not pile up while sizes grow
            self._drop(max(self._free, key=lambda one: one.handle.nbytes))
        wanted = 1 << max(nbytes - 1, (1 << 16) - 1).bit_length()
        if wanted > 1 << 24:  # half of a large power of two may never be used
            wanted = -(-nbytes // (1 << 21)) << 21
        segment = self._create(wanted, why)
        self._segments[segment.handle.inode] = segment
        return segment

    def give(self, segment: Segment) -> None:
        """Let a segment be taken again."""
        if segment.handle.inode in self._segments and segment.address not in self._lent:
            self._free.append(segment)

    def lend(self, numel: int, dtype: torch.dtype, why: str) -> Tensor:
        """Return a tensor in a segment of its own, which comes back when the tensor is gone."""
        segment = self.take(max(numel, 1) * dtype.itemsize, why)
        self._lent[segment.address] = segment
        self._starts = sorted(self._lent)
        mapping = (ctypes.c_char * segment.handle.nbytes).from_address(segment.address)
        mapping.segment = segment  # type: ignore[attr-defined] # it stays mapped when the group has ended
        # Called in any thread, at any time: it only notes it.
        weakref.finalize(mapping, self._returned.append, segment.address).atexit = False
        return torch.frombuffer(mapping, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def find(self, address: int) -> tuple[Segment, int] | None:
        """Return the lent segment in which an address is, and its offset there."""
        if not self._starts:
            return None
        segment = self._lent[self._starts[bisect(self._starts, address) - 1]]
        offset = address - segment.address
        return (segment, offset) if 0 <= offset < segment.handle.nbytes else None

    def take_back(self, in_use: Collection[Segment]) -> None:
        """Let segments be taken again when their tensor is gone, but for those that are `in_use`."""
        for _ in range(len(self._returned)):
            address = self._returned.popleft()
            segment = self._lent.get(address)
            if segment is None:  # lent before `close`
                continue
            if segment in in_use:
                self._returned.append(address)
            else:
                del self._lent[address]
                self._starts = sorted(self._lent)
                self.give(segment)

    def close(self) -> None:
        """Give back all memory, but what tensors still use."""
        for segment in self._segments.values():
            segment.close()
        self._segments, self._lent, self._free = {}, {}, []
        self._starts = []
        self._returned.clear()

    def _drop(self, segment: Segment) -> None:
        self._free.remove(segment)
        del self._segments[segment.handle.inode]
        segment.close()

    def _create(self, nbytes: int, why: object) -> Segment:
        left = available() if nbytes >= _WORTH_A_LOOK else nbytes
        try:
            if left < nbytes:
                raise MemoryError(f"{in_words(left)} are left")
            return Segment.create(nbytes)
        except (OSError, MemoryError) as error:
            raise OutOfSharedMemory(
                f"{why} needs {in_words(nbytes)} of memory that peers can read, besides the "
                f"{in_words(self.nbytes)} that the group holds: {error}. {WHAT_TO_RAISE}."
            ) from error
