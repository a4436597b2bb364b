"""A warm process that becomes `python -m MODULE ARGUMENTS` again and again, each time in a forked child.

It has imported pytest and the controller's side of the harness, so that a run costs a tenth of a second. An
order is a line of JSON on standard input, its result one on standard output. Without torch, unless it is one
of the modules given as arguments: it imports these alone then, and the server of ranks is a fork, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import runpy
import select
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

from lockstep import process_tree
from suites.selftest.warm_interpreter import end_with, import_all, offer_interpreters

WARM = (
    "pytest",
    "lockstep.plugin",
    "lockstep.commands",
    *(f"lockstep.{name}.command" for name in ("conformance", "features.hosts", "port")),
    *(f"lockstep.{name}" for name in ("controller.plugin", "conformance.plugin", "reporting.summary")),
    "libcst",
)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ADDRESS_SPACE = 16 << 30
"""Bytes that each process may map, for the sake of the machine: the judge asks what they really used."""
END_WITHIN = 5.0
"""Seconds that processes below an ended one get to end by themselves."""


def main() -> dict[str, Any] | None:
    """Serve orders until there are no more; in a child return the order that it is to carry out."""
    process_tree.adopt_orphans()
    import_all(sys.argv[1:] or WARM)
    while line := sys.stdin.readline():
        order = json.loads(line)
        started, child = time.monotonic(), os.fork()
        if child == 0:
            return order
        result = _wait(child, order["seconds"])
        result["seconds"] = time.monotonic() - started
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return None


def become(order: dict[str, Any]) -> None:
    """Carry out an order, as `python -m` would, with output into a file."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the tests may be killed
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(order["cwd"])
    os.environ.update(order["environ"])
    tempfile.tempdir = None  # found again, by the new environment
    sys.path[0] = order["cwd"]
    module, *sys.argv[1:] = order["command"]
    if "torch" in sys.modules:
        offer_interpreters()
        end_with(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _wait(child: int, seconds: float) -> dict[str, Any]:
    """Wait for a child and for all below it; kill what is still there after its time."""
    descriptor = os.pidfd_open(child)
    hung = not select.select([descriptor], [], [], seconds)[0]
    if hung:  # pytest then prints where it was
        os.kill(child, signal.SIGINT)
        select.select([descriptor], [], [], END_WITHIN)
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    _, status, usage = os.wait4(child, 0)
    peaks = [usage.ru_maxrss]
    deadline = time.monotonic() + (0 if hung else END_WITHIN)
    while (left := _reap(peaks)) and time.monotonic() < deadline:
        time.sleep(process_tree.POLL_EVERY)
    names = [_name(pid) for pid in left]
    process_tree.end(lambda: _reap(peaks), 0)
    code = os.waitstatus_to_exitcode(status)
    return {"status": code, "hung": hung, "left": [] if hung else names, "peak_mib": max(peaks) >> 10}


def _reap(peaks: list[int]) -> set[int]:
    """Take note of the memory of orphans that have ended; return those that have not."""
    with suppress(ChildProcessError):
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            peaks.append(ended[2].ru_maxrss)
    return process_tree.children_of(os.getpid())


def _name(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().replace(b"\0", b" ").decode(errors="replace")[:200] or f"process {pid}"
    return f"process {pid}"


if __name__ == "__main__" and (order := main()) is not None:
    become(order)
