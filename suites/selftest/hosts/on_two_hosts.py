"""Run pytest in this directory over two hosts of this machine: namespaces, or two addresses of the loopback.

    python -m suites.selftest.hosts.on_two_hosts suites/core --ranks-hosts 2

The arguments are those of pytest; the exit status is node 0's, or 1 if the other host ended with another one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from suites.selftest.hosts.bed import NAMES, Bed, two_hosts


def run(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments; return its exit status."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path)) as bed:
        processes = [_start(bed, host, arguments) for host in (1, 0)]
        other, status = [process.wait() for process in processes]
        return status if other == status else 1


def _start(bed: Bed, host: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    enter = ("ip", "netns", "exec", bed.namespaces[host]) if bed.namespaces else ()
    own = ("--name", NAMES[host], "--address", bed.addresses[host])
    place = ("--node", f"{host}/2", "--meet", f"{bed.addresses[0]}:{bed.port}")
    command = (sys.executable, "-m", "lockstep", "hosts", *own, *place, "--secret-file", f"{bed.path}/secret")
    return subprocess.Popen([*enter, *command, *(("--", *arguments) if host == 0 else ())])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
