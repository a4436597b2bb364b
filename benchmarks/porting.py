"""Run tests of other launchers, and what they became on ranks, in turns: times, and verdicts of faults.

    python benchmarks/porting.py [--kinds spawn,pool] [--faults [killed,hangs]] [--deepspeed DIR]
                                 [--json FILE]

The files are those of `examples/porting`, which the porting guide explains. Each side is one command.
The CPU time is of all its processes: this one adopts those that outlive their parents. A test's time comes
from the report of pytest, and the first test, which may pay for processes of its class, does not count.

DIR is the folder `tests` of DeepSpeed's repository, where DeepSpeed is installed; without it a short launcher
of the same kind runs. DeepSpeed's ranks compile a C++ operator when they first make a group: here into a
folder of this run, before anything is measured, unless `$TORCH_EXTENSIONS_DIR` names one that has it. In the
user's own, `~/.cache/torch_extensions`, a run that was killed may have left a file `lock`, for which every
later rank waits without end (`torch.utils.file_baton`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from figures import Table, describe_machine, ratio, write_json

PROJECT = Path(__file__).parents[1]
EXAMPLES = PROJECT / "examples" / "porting"
STAND_IN = PROJECT / "suites" / "selftest" / "projects" / "adopt" / "distributed_test" / "launcher.py"
KINDS = {
    "multi_process": "`MultiProcessTestCase`",
    "continuous": "`MultiProcContinuousTest`",
    "spawn": "`mp.spawn`",
    "torchrun": "`torchrun -m pytest`",
    "deepspeed": "`DistributedTest`",
    "pool": "pool",
}
"""Name of each launcher, by its folder."""
STANDS_IN = ", a short launcher of its kind"
FAULTS = ("killed", "exits", "hangs", "deadlocks", "skips", "leaks")

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): orphans become children of this process."""


@dataclass(frozen=True)
class Run:
    """One command, in seconds.

    Attributes:
        wall: from its start to its end.
        cpu: of all its processes.
        tests: of each test but the first.
        status: exit status, or None if it was ended at its limit.
        output: of all its processes.
        left: names of processes that were alive after it.
    """

    wall: float
    cpu: float
    tests: list[float]
    status: int | None
    output: str
    left: list[str]


def run(kind: str, side: str, folder: Path, *args: str, limit: float = 240) -> Run:
    """Run the tests of one side of a kind; what it leaves is ended."""
    options = ["-q", "-p", "no:cacheprovider", "--junitxml=report-$RANK.xml", *args]
    start = [sys.executable, "-m", "pytest"]
    if side == "after":
        options += ["-p", "lockstep"]
    elif kind == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "pytest"]
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "4", "GLOO_SOCKET_IFNAME": "lo"}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environ.pop("RANK", None)
    begun, used = time.monotonic(), cpu_of_children()
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            [*start, *options],
            cwd=folder,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        left: list[str] = []
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
            wall = time.monotonic() - begun
        finally:
            left += end_children(process)
        output.seek(0)
        text = output.read()
    return Run(wall, cpu_of_children() - used, times(folder), status, text, left)


def cpu_of_children() -> float:
    """Return the CPU seconds of all ended processes below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def end_children(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> list[str]:
    """End and reap all processes below this one; return the names of those that were left."""
    left: list[str] = []
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.3)  # helpers of multiprocessing end when they see that their parent has
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            pid, _ = os.waitpid(child, os.WNOHANG)
            if pid == 0:
                left.append(Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip())
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return left


def times(folder: Path) -> list[float]:
    """Return the seconds of all tests but the first, of the rank that took longest for each."""
    of_ranks = []
    for report in folder.glob("report-*.xml"):
        with contextlib.suppress(ElementTree.ParseError):
            of_ranks.append(
                [float(case.attrib["time"]) for case in ElementTree.parse(report).iter("testcase")]
            )
    return [max(seconds) for seconds in zip(*of_ranks, strict=False)][1:]


def copy(kind: str, base: Path, deepspeed: Path | None) -> Path:
    """Copy the examples to a folder; return that of the kind."""
    folder = Path(tempfile.mkdtemp(dir=base))
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if kind == "deepspeed":
        if deepspeed:
            (folder / kind / "unit").symlink_to(deepspeed.resolve() / "unit")
        else:
            (folder / kind / "unit").mkdir()
            shutil.copy(STAND_IN, folder / kind / "unit" / "common.py")
    return folder / kind


def build_operators(base: Path, deepspeed: Path) -> None:
    """Let DeepSpeed's ranks compile what they use, so that no run that is measured does."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(base / "extensions")
    done = run(
        "deepspeed", "before", copy("deepspeed", base, deepspeed), "before/test_dist.py", "-x", limit=900
    )
    if done.status != 0:
        raise SystemExit(f"DeepSpeed's own launcher: {done.status}\n{done.output[-2000:]}")


def lines(kind: str, side: str) -> int:
    """Return how many lines of code the tests of a side have, without empty ones."""
    files = [path for path in (EXAMPLES / kind / side).glob("*.py") if path.name != "faulty.py"]
    return sum(1 for path in files for line in path.read_text().splitlines() if line.strip())


def measure(kinds: list[str], repeats: int, base: Path, deepspeed: Path | None) -> Table:
    """Run both sides of each kind so many times, in turns; return the table."""
    runs: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for kind in kinds:
        for _ in range(repeats):
            for side in ("before", "after"):
                done = run(kind, side, copy(kind, base, deepspeed), side)
                if done.status != 0:  # None: ended at its limit
                    raise SystemExit(f"{kind}, {side}: {done.status}\n{done.output[-2000:]}")
                runs[kind, side].append(done)
    rows = []
    for kind in kinds:
        before, after = runs[kind, "before"], runs[kind, "after"]
        tests = [[second for one in side for second in one.tests] for side in (before, after)]
        rows.append(
            [
                KINDS[kind] + (STANDS_IN if kind == "deepspeed" and not deepspeed else ""),
                f"{lines(kind, 'before')} to {lines(kind, 'after')}",
                f"{median(one.wall for one in before):.1f} to {median(one.wall for one in after):.1f}",
                f"{median(one.cpu for one in before):.1f} to {median(one.cpu for one in after):.1f}",
                " to ".join(map(median_ms, tests)),
                figure(ratio(*tests)) if all(tests) else "-",
            ]
        )
    head = ["launcher", "lines", "the file, s", "the same, CPU s", "a test, ms", "before / after"]
    return Table(head, rows)


def median_ms(seconds: list[float]) -> str:
    """Return the median in milliseconds; a file of one test has no other than the first."""
    return figure(1000 * median(seconds)) if seconds else "-"


def figure(value: float) -> str:
    """Return a number with what of it means something."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def judge(kinds: list[str], faults: list[str], base: Path, deepspeed: Path | None, limit: float) -> Table:
    """Run each fault under each launcher and on ranks; return what was said of it."""
    rows = []
    for kind in kinds:
        for fault in faults:
            side = "after" if kind == "ranks" else "before"
            folder = copy(kind, base, deepspeed)
            if kind == "ranks":
                folder = folder.parent
            file = "faulty.py" if kind == "ranks" else "before/faulty.py"
            done = run(kind, side, folder, file, "-rA", "-k", fault, limit=limit)
            status = f"still ran after {limit:.0f} s" if done.status is None else f"exit status {done.status}"
            left = f"; left: {', '.join(done.left)}" if done.left else ""
            rows.append([kind, fault, status, f"{done.wall:.1f}", summary(done.output) + left])
            print(f"==== {kind}, {fault}\n{done.output}", file=sys.stderr)
    return Table(["kind", "fault", "pytest", "s", "its summary"], rows)


def summary(output: str) -> str:
    """Return the lines of pytest's summary, of each rank that printed one."""
    found = re.findall(
        r"^(?:(?:PASSED|FAILED|SKIPPED|ERROR) .*|\d+ (?:passed|failed|skipped).*)$", output, re.MULTILINE
    )
    return "; ".join(found) or "nothing"


def main() -> None:
    """Print the table that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", help=f"(default: {','.join(KINDS)}, and with --faults also ranks)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both sides (default: %(default)s)")
    every = ",".join(FAULTS)
    parser.add_argument("--faults", nargs="?", const=every, help=f"show verdicts, and not times ({every})")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a fault (default: %(default)s)")
    parser.add_argument("--deepspeed", type=Path, help="the folder `tests` of DeepSpeed's repository")
    parser.add_argument("--json", type=Path, help="file for the table")
    options, machine = parser.parse_args(), describe_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended first
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kinds = options.kinds.split(",") if options.kinds else [*KINDS, *(["ranks"] if options.faults else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        if options.deepspeed and "deepspeed" in kinds and "TORCH_EXTENSIONS_DIR" not in os.environ:
            build_operators(Path(base), options.deepspeed)
        if options.faults:
            table = judge(kinds, options.faults.split(","), Path(base), options.deepspeed, options.limit)
        else:
            table = measure(kinds, options.repeats, Path(base), options.deepspeed)
    print(table)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json(options.json, machine, {"all": table})


if __name__ == "__main__":
    main()
