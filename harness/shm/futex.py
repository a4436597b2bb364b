"""Wait for a word in shared memory to change, and wake those who wait. Imports the standard library only.

A writer stores and then wakes. A waiter reads, decides that it has to wait, and sleeps only if the word still
is what it read: the kernel compares, so that no wake-up is lost. Linux only.
"""

from __future__ import annotations

import ctypes
import platform

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1

IS_OFFERED = bool(_SYS_FUTEX)
"""True if this machine's system call is known here."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


SLICE = 0.005
"""Seconds that a wait lasts at most: after it the waiter looks for dead peers, and for the time."""

_slice = ctypes.byref(_Timespec(0, int(SLICE * 1e9)))

_ARGUMENTS = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)

# Other threads run while one waits. A wake-up is over sooner than the lock of the interpreter changes hands.
_waiting = ctypes.CDLL(None).syscall
_waiting.argtypes = _ARGUMENTS
_waking = ctypes.PyDLL(None).syscall
_waking.argtypes = _ARGUMENTS


def wait(address: int, value: int) -> None:
    """Sleep until the word at `address` is woken, at most `SLICE`; not at all if it is not `value`."""
    _waiting(_SYS_FUTEX, address, _WAIT, value & 0xFFFFFFFF, _slice, None, 0)


def wake(address: int) -> None:
    """Wake all who wait for the word at `address`, in any process."""
    _waking(_SYS_FUTEX, address, _WAKE, _ALL, None, None, 0)


def fence(address: int) -> None:
    """Let what this thread has loaded and stored so far come before what it loads and stores next.

    x86-64 keeps loads in order, and stores, also after loads. Elsewhere the kernel's side of a wake-up is a
    barrier.
    """
    if _needs_fence:
        wake(address)


_needs_fence = platform.machine() != "x86_64"
