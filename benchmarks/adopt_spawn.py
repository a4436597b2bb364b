"""Faults of spawned functions, under torch's own `spawn` and adopted, in turns: verdicts and seconds.

    python benchmarks/adopt_spawn.py [--only raises,dies] [--limit 80] [--json FILE]

Each side is one call of pytest on the same file: a test without a fault, the fault, another one without. A
side that takes longer than the limit is ended with all that it has started, by this command.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from figures import Table, describe_machine, write_json

SIDES = {
    "torch": ("-p", "no:lockstep"),
    "warm ranks": ("-p", "lockstep", "--ranks-adopt=spawn"),
    "processes": ("-p", "lockstep", "--ranks-adopt=spawn", "-oranks_adopt_spawn=processes"),
}
FAULTS = {
    "raises": "rank 1 raises, rank 0 is in a collective",
    "exits_0": "rank 1 calls `sys.exit(0)`, rank 0 is in a collective",
    "exits_3": "rank 1 calls `sys.exit(3)`, rank 0 is in a collective",
    "dies": "rank 1 is killed, rank 0 is in a collective",
    "oom": "rank 1 is killed as it allocates memory, rank 0 is in a collective",
    "memory": "rank 1 has no memory left (`RLIMIT_AS`), rank 0 is in a collective",
    "returns": "rank 1 returns, rank 0 waits in a collective for it",
    "sleeps": "rank 1 sleeps without end, rank 0 is in a collective",
    "receives": "rank 1 waits in `recv` for rank 0, which is in a collective",
    "leaves": "rank 1 leaves a process of `subprocess`",
    "unseen": "a `Process` fails, and the test only joins it",
    "running": "the test leaves a `Process` running",
}
TESTS = """
import multiprocessing, os, resource, signal, subprocess, sys, time
import pytest, torch, torch.distributed as dist, torch.multiprocessing as mp


def run(rank, how, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        match how:
            case "raises":
                raise ValueError("of rank 1")
            case "exits_0":
                sys.exit(0)
            case "exits_3":
                sys.exit(3)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "oom":
                memory = bytearray(1 << 26)  # what the kernel does where memory is out
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory":
                used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
                held = []
                while True:
                    held.append(torch.ones(1 << 18))
            case "returns":
                return
            case "sleeps":
                time.sleep(10_000)
            case "receives":
                dist.recv(torch.ones(1), 0)
            case "leaves":
                subprocess.Popen(["sleep", "9876"])
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def fail():
    raise ValueError("of the process")


def test_before(tmp_path):
    mp.spawn(run, ("nothing", str(tmp_path)), nprocs=2)


def test_fault(tmp_path):
    how = os.environ["FAULT"]
    context = multiprocessing.get_context("spawn")
    if how == "unseen":
        process = context.Process(target=fail)
        process.start()
        process.join()
    elif how == "running":
        context.Process(target=time.sleep, args=(10_000,), daemon=True).start()
    else:
        mp.spawn(run, (how, str(tmp_path)), nprocs=2)


def test_after(tmp_path):
    mp.spawn(run, ("nothing", str(tmp_path)), nprocs=2)
"""


@dataclass(frozen=True)
class Result:
    """One side of one fault."""

    verdict: str
    seconds: float
    after: str
    """Outcome of the test after it."""
    left: int
    """Number of processes that were alive when pytest had ended, or was ended."""


def main() -> None:
    """Run the faults that are named, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--limit", type=float, default=80)
    parser.add_argument("--json", type=Path, help="file for the table")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what a side leaves is ours
    machine = describe_machine()
    rows = []
    for fault in options.only.split(","):
        for side, arguments in SIDES.items():
            result = run_side(fault, arguments, options.limit)
            seconds = f"{result.seconds:.1f}"
            what = FAULTS[fault] if side == "torch" else ""
            rows.append((what, side, result.verdict, seconds, result.after, str(result.left)))
            print(*rows[-1], sep=" | ", flush=True)
    header = ("fault", "spawn of", "verdict", "s", "the test after it", "left")
    table = Table(header, rows, f"A hang was ended after {options.limit:g} s.")
    print(table)
    print(machine)
    write_json(options.json, machine, {"all": table})


def run_side(fault: str, arguments: tuple[str, ...], limit: float) -> Result:
    """Run the three tests on one side; end what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "test_faults.py").write_text(TESTS)
        (path / "pytest.ini").write_text("[pytest]\nranks_preload =\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
        environ = os.environ | {
            "FAULT": fault,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (path / "output").open("w") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=path,
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                process.wait(limit)
                hung = False
            except subprocess.TimeoutExpired:
                hung = True
            left = len(alive(fault)) if hung else 0
            if not hung:
                time.sleep(0.5)
                left = len(alive(fault))
            end_all(fault)
            process.wait()
        if hung:
            return Result("none: it hangs", limit, "not run", left)
        return read(path, left)


def read(path: Path, left: int) -> Result:
    """Return the result of a side that ended."""
    cases = {case.attrib["name"]: case for case in ElementTree.parse(path / "report.xml").iter("testcase")}
    case = cases["test_fault"]
    children = [child for child in case if child.tag in ("failure", "error")]
    verdict = "passed"
    if children:
        text = [line for line in (children[0].text or "").splitlines() if line.strip()]
        ours = text[0].startswith(("rank", "all"))
        message = (children[0].get("message") or "").splitlines()[0]
        said = " / ".join(dict.fromkeys((message, *text[:2]))) if ours else last_message(text)
        verdict = f"failed: {said}"
    elif warning := [line for line in (path / "output").read_text().splitlines() if "left behind" in line]:
        verdict = f"passed, and a warning: {warning[0].partition('Warning: ')[2]}"
    after = "failed" if any(child.tag == "failure" for child in cases["test_after"]) else "passed"
    return Result(verdict.replace("|", "\\|")[:260], float(case.attrib["time"]), after, left)


def last_message(text: list[str]) -> str:
    """Return what the exception says, without the marks of pytest."""
    said = [line[1:].strip() for line in text if line.startswith("E ")]
    wanted = [line for line in said if line and not line.startswith(("Traceback", "File", "^", "-- "))]
    last = wanted[-1] if len(wanted) > 1 else ""
    return f"{wanted[0].removeprefix('torch.multiprocessing.spawn.')} {last}".strip()


def alive(fault: str) -> list[int]:
    """Return the living processes of this benchmark's tests, which have its variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = f"FAULT={fault}\0".encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if is_ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(int(entry.name))
    return found


def end_all(fault: str) -> None:
    """Kill them, and wait for those that are children of this process."""
    for pid in alive(fault):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
