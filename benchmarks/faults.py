"""Reports of faults in ranks, and the time they take: one session, a healthy test after each fault.

    python benchmarks/faults.py [--repeats 3] [--json FILE]        the table of docs/reference/faults.md
    python benchmarks/faults.py --endurance 500                     so many tests, every tenth one a fault
    python benchmarks/faults.py --backend shm                       either of them, of ranks in shared memory
    python benchmarks/faults.py --hosts                             either of them, rank 1 on another host

The table names for each fault the first line of the report, the seconds from the start of the test to its
verdict (median), and what PyTorch's two harnesses made of it: figures taken by hand on two cores, with their
time-outs lowered to 30 s (they are 300 s), because several of them end neither the test nor the session.
The endurance run checks every verdict, and prints the memory of controller and server and what is left over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import indent
from xml.etree import ElementTree

from figures import Table, describe_machine, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))

from suites.selftest.hosts.bed import Bed, two_hosts

SECONDS_PER_RUN = 900.0
DEADLINE = 5.0
"""Seconds a test has, for the faults that nothing but the deadline ends."""

HEADER = f"""
import ctypes, os, signal, subprocess, sys, threading, time
import pytest, torch, torch.distributed as dist
from torch import nn
pytestmark = pytest.mark.ranks(2, timeout={DEADLINE})
"""
CONFTEST = """
import os, time
started = {}

def pytest_runtest_logstart(nodeid):
    started[nodeid] = time.monotonic()

def pytest_runtest_logfinish(nodeid):
    with open(os.environ["BENCHMARK_LOG"], "a") as log:
        print(nodeid.split("::")[-1], time.monotonic() - started[nodeid], file=log)
"""


@dataclass(frozen=True)
class Fault:
    """A test that goes wrong on rank 1, and what has to be said of it."""

    name: str
    body: str
    verdict: str
    """A pattern that the report must contain."""
    multi_process: str = ""
    """What MultiProcessTestCase makes of it."""
    continuous: str = ""
    """What MultiProcContinuousTest makes of it."""
    on_shm: str = ""
    """What the report must contain on shm, where that is something else."""


FAULTS = [
    Fault(
        "assertion on one rank",
        "assert world.rank == 0",
        "rank 1 of 2 failed",
        "right, 'Process 1 exited with error code 10'",
        "no rank named; later tests of the class skipped",
    ),
    Fault(
        "the same while rank 0 waits in a collective",
        "assert world.rank == 0\ndist.barrier()",
        "rank 1 of 2 failed",
        "right",
        "30 s, and the assertion appears nowhere",
    ),
    Fault(
        "rank 1 calls `os._exit(0)`",
        "if world.rank: os._exit(0)",
        "rank 1 of 2 exited with code 0",
        "PASSED",
        "13 to 86 s, class lost",
    ),
    Fault(
        "rank 1 is killed",
        "if world.rank: os.kill(os.getpid(), signal.SIGKILL)",
        "rank 1 of 2 died: SIGKILL",
        "PASSED",
        "13 to 86 s, class lost",
    ),
    Fault(
        "the same before a collective",
        "if world.rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        "rank 1 of 2 died: SIGKILL",
        "blames rank 0: connection reset",
        "blames rank 0",
    ),
    Fault(
        "segmentation fault",
        "if world.rank: ctypes.string_at(0)",
        "rank 1 of 2 died: SIGSEGV, at test_faults.py",
    ),
    Fault(
        "all_reduce against all_gather",
        "if world.rank: dist.all_gather([torch.ones(3)] * 2, torch.ones(3))\n"
        "else: dist.all_reduce(torch.ones(3))",
        "mismatch: rank 0 is in all_reduce #1 .* while rank 1 is in all_gather #1",
        "30 s, no word of a mismatch",
        "tear-down hangs",
        on_shm="mismatch: rank 0 was in all_reduce #1 .* while rank 1 was in all_gather #1",
    ),
    Fault(
        "different shapes",
        "dist.all_reduce(torch.ones(3 + world.rank))",
        "mismatch: rank 0 .* all_reduce #1 .float .3.. while rank 1 is in all_reduce #1 .float .4..",
        "as above",
        "as above",
        on_shm="mismatch: rank 0 was in all_reduce #1 .float .3.. while rank 1 was in .* .float .4..",
    ),
    Fault(
        "different dtypes",
        "dist.all_reduce(torch.ones(3, dtype=(torch.float32, torch.float64)[world.rank]))",
        "died: SIGABRT",
        on_shm="mismatch: rank 0 was in all_reduce #1 .float .3.. while rank 1 was in all_reduce #1 .double",
    ),
    Fault(
        "one rank leaves a collective out",
        "if world.rank == 0: dist.all_reduce(torch.ones(3))",
        "rank 0 waits in all_reduce #1 .*, which rank 1 never reached: it has ended the test",
        "30 s",
        "30 s, class lost",
    ),
    Fault(
        "two groups in opposite order",
        "groups = [dist.new_group([0, 1]) for _ in range(2)]\n"
        "for group in groups[:: 1 - 2 * world.rank]: dist.all_reduce(torch.ones(3), group=group)",
        "deadlock: rank 0 waits in all_reduce #1 .*; rank 1 waits in all_reduce #1",
        "30 s",
        "30 s, class lost",
    ),
    Fault(
        "both ranks receive before they send",
        "dist.recv(torch.ones(3), 1 - world.rank)\ndist.send(torch.ones(3), 1 - world.rank)",
        "deadlock: rank 0 waits to receive float32 .3. from rank 1",
    ),
    Fault(
        "stopped by a signal",
        "if world.rank: os.kill(os.getpid(), signal.SIGSTOP)\ndist.barrier()",
        "rank 0 waits in barrier #1, which rank 1 did not reach: it is stopped",
    ),
    Fault(
        f"sleeps for ever (deadline {DEADLINE:g} s)",
        "if world.rank: time.sleep(1000)\ndist.barrier()",
        "rank 0 waits in barrier #1, which rank 1 never reached: it is at test_faults.py",
        "30 s, stacks in a log",
        "tear-down hangs, processes left",
    ),
    Fault(
        f"endless loop (deadline {DEADLINE:g} s)",
        "while world.rank: pass\ndist.barrier()",
        "rank 0 waits in barrier #1, which rank 1 never reached: it is at test_faults.py",
        "30 s",
        "tear-down hangs",
    ),
    Fault(
        f"holds the GIL (deadline {DEADLINE:g} s)",
        "if world.rank: 10 ** 10 ** 9\ndist.barrier()",
        "rank 1 did not reach: it is not responding, at test_faults.py",
    ),
    Fault(
        "skip on one rank",
        "if world.rank: pytest.skip('not today')",
        r"rank 1 of 2 skipped \(not today\) and others did not: ranks disagree",
        "PASSED",
        "FAILED, class lost",
    ),
    Fault(
        "one bad subtest of three, in a collective",
        "def claim(n):\n    if (world.rank, n) != (1, 2): dist.all_reduce(torch.ones(n))\n"
        "run_subtests({'n': [1, 2, 3]}, claim)",
        "rank 0 waits in all_reduce #2 .*, which rank 1 never reached: it has ended the subtest .n=2.",
        "setting not named, the rest not run",
        "the same",
    ),
]


@dataclass(frozen=True)
class Verdict:
    """The verdict of a session on one test."""

    outcome: str
    text: str
    seconds: float


def write(path: Path, bodies: list[tuple[str, str]]) -> None:
    """Write a test file with these tests, by name and body."""
    tests = [f"def test_{name}(world, run_subtests):\n{indent(body, '    ')}\n" for name, body in bodies]
    (path / "test_faults.py").write_text("\n".join([HEADER, *tests]))
    (path / "conftest.py").write_text(CONFTEST)
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "tmp").mkdir(exist_ok=True)


@dataclass(frozen=True)
class Session:
    """The place of a run of pytest: a directory, and the two hosts where it is on one of them."""

    path: Path
    backend: str
    bed: Bed | None = None

    def write(self, bodies: list[tuple[str, str]]) -> None:
        for path in [self.path] if self.bed is None else [self.bed.directory(host) for host in range(2)]:
            write(path, bodies)

    def start(self, mark: str = "") -> subprocess.Popen[str] | subprocess.Popen[bytes]:
        if self.bed is None:
            return start(self.path, self.backend, mark)
        log = str(self.path / "log")
        # Ranks load the conftest, too: those of the other host write a log there.
        self.bed.by_hand(1, MARK=mark, BENCHMARK_LOG=str(self.bed.directory(1) / "log"))
        words = ("-q", "--junitxml=report.xml", "--backend", self.backend, "--ranks-hosts=2")
        return self.bed.by_hand(0, *words, MARK=mark, BENCHMARK_LOG=log)

    def last_line(self) -> str:
        text = self.bed.output(self.bed.started[-1]) if self.bed else (self.path / "output").read_text()
        return text.splitlines()[-1]


@contextlib.contextmanager
def session(backend: str, on_hosts: bool) -> Iterator[Session]:
    """Make the place of a run."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as name, contextlib.ExitStack() as stack:
        bed = stack.enter_context(two_hosts(Path(name))) if on_hosts else None
        yield Session(bed.directory(0) if bed else Path(name), backend, bed)


def start(path: Path, backend: str, mark: str = "") -> subprocess.Popen[bytes]:
    """Start pytest on what was written; its processes carry the mark in their environment."""
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "-p", "no:cacheprovider"]
    command += ["--backend", backend]
    environ = {**os.environ, "BENCHMARK_LOG": str(path / "log"), "TMPDIR": str(path / "tmp"), "MARK": mark}
    with (path / "output").open("wb") as output:
        return subprocess.Popen(command, cwd=path, env=environ, stdout=output, stderr=subprocess.STDOUT)


def read(path: Path) -> dict[str, Verdict]:
    """Read what the session said, by name of the test."""
    seconds = dict(line.split() for line in (path / "log").read_text().splitlines())
    found: dict[str, Verdict] = {}
    for case in ElementTree.parse(path / "report.xml").iter("testcase"):
        name = case.attrib["name"].split(" ")[0]
        bad = [child for child in case if child.tag in ("failure", "error")]
        text = "\n".join(child.text or "" for child in bad)
        before = found.get(name, Verdict("passed", "", 0.0))
        outcome = bad[0].tag if bad else before.outcome
        found[name] = Verdict(outcome, before.text + text, float(seconds[name]))
    return found


def is_right(fault: Fault, verdict: Verdict, backend: str) -> bool:
    said = (fault.on_shm if backend == "shm" else "") or fault.verdict
    text = re.sub(r" \(host [ab]\)", "", verdict.text)
    return verdict.outcome != "passed" and re.search(said, text) is not None


def run_table(repeats: int, backend: str, on_hosts: bool) -> tuple[list[list[str]], bool]:
    """Run all faults so often, a healthy test after each; return the rows, and whether all was right."""
    healthy = "assert world.gather(world.rank) == [0, 1]"
    bodies = [("warm_up", healthy)]
    for number, fault in enumerate(FAULTS):
        bodies += [(f"fault_{number}", fault.body), (f"healthy_{number}", healthy)]
    runs = []
    for _ in range(repeats):
        with session(backend, on_hosts) as place:
            place.write(bodies)
            place.start().wait(SECONDS_PER_RUN)
            runs.append(read(place.path))
    rows, all_right = [], True
    for number, fault in enumerate(FAULTS):
        verdicts = [run[f"test_fault_{number}"] for run in runs]
        right = all(is_right(fault, verdict, backend) for verdict in verdicts)
        healed = all(run[f"test_healthy_{number}"].outcome == "passed" for run in runs)
        all_right = all_right and right and healed
        said = verdicts[0].text.splitlines()[0] if verdicts[0].text else "nothing"
        seconds = f"{median(verdict.seconds for verdict in verdicts):.2f}"
        ours = f"`{said}`" if right and healed else f"WRONG: `{said}`"
        rows.append([fault.name, ours, seconds, fault.multi_process, fault.continuous])
    return rows, all_right


def memory(pid: int) -> float:
    """Return the resident memory of a process, MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def processes(mark: str) -> dict[int, str]:
    """Return the living processes that carry the mark, with their command lines."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


def run_endurance(tests: int, backend: str, on_hosts: bool) -> bool:
    """Run so many tests, every tenth a fault; print what was wrong, memory over time, and what is left."""
    quick = [fault for fault in FAULTS if "deadline" not in fault.name]
    bodies, faults = [], {}
    for number in range(tests):
        fault = quick[number // 10 % len(quick)] if number % 10 == 9 else None
        bodies.append((f"{number}", fault.body if fault else "assert world.gather(world.rank) == [0, 1]"))
        faults[f"test_{number}"] = fault
    mark = uuid.uuid4().hex
    with session(backend, on_hosts) as place:
        place.write(bodies)
        process = place.start(mark)
        samples = watch(process, mark)
        verdicts = read(place.path)
        tmp = place.path / "tmp"
        left = [entry.name for entry in tmp.iterdir() if not entry.name.startswith("pytest-of-")]
        print(place.last_line())
        alive = processes(mark)
    wrong = [name for name, fault in faults.items() if not is_as_meant(fault, verdicts.get(name), backend)]
    count = sum(fault is not None for fault in faults.values())
    print(f"{tests} tests, {count} of them faults; wrong verdicts: {wrong or 'none'}")
    print(f"left over: processes {alive or 'none'}, files {left or 'none'}")
    print("memory, MB:", Table(["seconds", "controller", "server"], samples), sep="\n")
    return not (wrong or alive or left)


def is_as_meant(fault: Fault | None, verdict: Verdict | None, backend: str) -> bool:
    if verdict is None:
        return False
    return verdict.outcome == "passed" if fault is None else is_right(fault, verdict, backend)


def watch(process: subprocess.Popen[str] | subprocess.Popen[bytes], mark: str) -> list[list[str]]:
    """Sample the memory of the session's controller and server until it ends."""
    samples, begun = [], time.monotonic()
    while process.poll() is None:
        time.sleep(5)
        servers = [
            pid
            for pid, line in processes(mark).items()
            if "forkserver" in line and parent(pid) == process.pid
        ]
        if process.poll() is None and servers:
            row = [
                f"{time.monotonic() - begun:.0f}",
                f"{memory(process.pid):.1f}",
                f"{memory(servers[0]):.1f}",
            ]
            samples.append(row)
    return samples


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--endurance", type=int, metavar="TESTS")
    parser.add_argument("--backend", choices=("gloo", "shm"), default="gloo")
    parser.add_argument("--hosts", action="store_true", help="rank 0 on one host, rank 1 on another one")
    parser.add_argument("--json", type=Path, help="where to write the table, too")
    options = parser.parse_args()
    machine = describe_machine()
    print(machine)
    if options.endurance:
        return 0 if run_endurance(options.endurance, options.backend, options.hosts) else 1
    rows, all_right = run_table(options.repeats, options.backend, options.hosts)
    header = [
        "fault on rank 1 of 2",
        "the report begins",
        "seconds",
        "MultiProcessTestCase, by hand",
        "MultiProcContinuousTest, by hand",
    ]
    table = Table(header, rows)
    print(table)
    write_json(options.json, machine, {"all": table})
    return 0 if all_right else 1


if __name__ == "__main__":
    raise SystemExit(main())
