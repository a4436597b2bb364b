"""Time one trivial all_reduce test under PyTorch's own harnesses and under Lockstep, side by side.

    python benchmarks/harness.py [--worlds 2,4] [--repeats 3] [--warm [--mesh]] [--json FILE] [--check]

Every figure comes from `pytest` in a process of its own, on test files written to a temporary directory: the
same body, the same conftest, on gloo over the loopback. The time of a test runs from its start to the start
of the next, so nothing that a harness does between tests is free; the first test, which may pay for processes
of its class, has a column of its own, and the last, which may pay for ending them, counts nowhere. Harnesses
take turns within each repeat, so that a noisy minute falls on all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from string import Template

from figures import Table, describe_machine, ratio, verdicts, write_json

# What is wanted. A fresh world is compared with MultiProcessTestCase, which starts processes for each test; a
# warm one with MultiProcContinuousTest, which keeps them for a class.
FRESH_AT_LEAST_TIMES_CHEAPER = 20.0
WARM_AT_MOST_TIMES = 0.95
VERDICT_AT_MOST_TIMES_IMPORT = 1.3

# A hung peer must not hang the benchmark: MultiProcessTestCase was seen to take 21 s for a test on 4 ranks.
SECONDS_PER_RUN = 240.0

CONFTEST = """
import os, time

def _note(event):
    # Ranks may load this file too; the process id of a line shows which one it is of.
    with open(os.environ["BENCHMARK_LOG"], "a") as log:
        log.write(f"{os.getpid()} {event} {time.monotonic()}\\n")

_note("loaded")

def pytest_collection_finish():
    _note("collected")

def pytest_runtest_logstart():
    _note("start")

def pytest_runtest_logfinish():
    _note("finish")
"""

BODY = (
    "t = torch.full((4,), float(dist.get_rank())); dist.all_reduce(t); "
    "assert t.tolist() == [sum(range($world))] * 4"
)
MESH_BODY = (
    "mesh = init_device_mesh('cpu', ($world // 2, 2)); t = torch.ones(4); "
    "dist.all_reduce(t, group=mesh.get_group(1)); assert t.tolist() == [2] * 4"
)
IN_MESH = 62
"""Tests in a run whose tests each make a mesh: MultiProcContinuousTest keeps them until the class ends."""

MULTI_PROCESS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

def all_reduce(self):
    store = dist.FileStore(self.file_name, $world)
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=$world)
    $body

class TestAllReduce(MultiProcessTestCase):
    world_size = $world

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    for i in range($tests):
        vars()[f"test_{i}"] = all_reduce
"""

CONTINUOUS = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import MultiProcContinuousTest

def all_reduce(self):
    $body

class TestAllReduce(MultiProcContinuousTest):
    world_size = $world

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    for i in range($tests):
        vars()[f"test_{i}"] = all_reduce
"""

LOCKSTEP = """
import pytest, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

@pytest.mark.parametrize("i", range($tests))
@pytest.mark.ranks($world)
def test_all_reduce(world, i):
    $body
"""

# PyTorch's test classes inherit from one of this package, of which nothing runs here; where it is not
# installed, this stands in for it.
EXPECTTEST = """
import unittest

ACCEPT = False

class TestCase(unittest.TestCase):
    pass
"""


@dataclass(frozen=True)
class Harness:
    """One way to run the test.

    Attributes:
        name: as the tables call it.
        processes: when it starts processes.
        module: template of the test file, over $world, $tests and $body.
        tests: how many tests a run has.
        options: what to add to pytest's command line.
    """

    name: str
    processes: str
    module: Template
    tests: int
    options: tuple[str, ...] = ()


WITHOUT_US = ("-p", "no:lockstep")
MULTI = Harness(
    "MultiProcessTestCase", "new interpreters for each test", Template(MULTI_PROCESS), 4, WITHOUT_US
)
CONT = Harness("MultiProcContinuousTest", "kept for a class", Template(CONTINUOUS), 302, WITHOUT_US)
FRESH = Harness(
    "Lockstep, fresh worlds", "new ones for each test", Template(LOCKSTEP), 22, ("--fresh-worlds",)
)
WARM = Harness("Lockstep", "kept, as it comes", Template(LOCKSTEP), 302)
HARNESSES = (MULTI, CONT, FRESH, WARM)
FROM_COMMAND = (MULTI, CONT, WARM)  # of one test in one run each world is fresh
IMPORT_TORCH = 'python -c "import torch"'
PHASES = (
    "pytest starts, and loads conftest.py",
    "it collects, while the server imports torch",
    "it forks ranks when the server is done, and they load conftest.py",
    "they collect",
    "they form their group and run the test",
    "pytest ends",
)
"""Of a run of one test on warm ranks, each until the next."""


class RunError(Exception):
    """A run gave no figures: it failed, or was ended at its time limit."""


def run(command: Sequence[str], directory: Path) -> tuple[float, float, int]:
    """Run a command and return when it began and ended, in seconds, and its process id.

    Raises RunError if it fails or hangs.

    It has a process group of its own, which is ended as a whole: peers leave ranks behind when they hang.
    """
    environ = os.environ | {
        "BENCHMARK_LOG": str(directory / "log"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(directory),  # MultiProcessTestCase leaves a file there per test
    }
    begun = time.monotonic()
    with open(directory / "output", "w+") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(SECONDS_PER_RUN)
        except subprocess.TimeoutExpired:
            status = f"ended after {SECONDS_PER_RUN:.0f} s"
        ended = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if status != 0:
            output.seek(0)
            raise RunError(f"{' '.join(command)}: {status}\n{output.read()[-1500:]}")
    return begun, ended, process.pid


@dataclass(frozen=True)
class TestRun:
    """A run of a file of tests: points in time, in seconds.

    Attributes:
        begun: when pytest was started.
        ended: when it had ended.
        tests: (start, finish) of each test.
        loaded: when processes loaded conftest.py, pytest first.
        collected: when they had collected.
    """

    begun: float
    ended: float
    tests: list[tuple[float, float]]
    loaded: list[float]
    collected: list[float]

    @property
    def phases(self) -> list[float]:
        """The seconds of each of PHASES."""
        controllers = self.begun, self.loaded[0], self.collected[0]
        ranks = max(self.loaded), max(self.collected), self.tests[0][1]
        return [after - before for before, after in itertools.pairwise((*controllers, *ranks, self.ended))]


def run_tests(harness: Harness, world: int, tests: int, base: Path, body: str = BODY) -> TestRun:
    """Run a file of so many tests of that body."""
    directory = Path(tempfile.mkdtemp(dir=base))
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "pytest.ini").write_text("[pytest]\n")
    if find_spec("expecttest") is None:
        (directory / "expecttest.py").write_text(EXPECTTEST)
    body = Template(body).substitute(world=world)
    (directory / "one_test.py").write_text(harness.module.substitute(world=world, tests=tests, body=body))
    command = [sys.executable, "-m", "pytest", "-q", *harness.options, "one_test.py"]
    begun, ended, pid = run(command, directory)
    lines = [line.split() for line in (directory / "log").read_text().splitlines()]
    times = {
        event: [float(t) for p, e, t in lines if (int(p), e) == (pid, event)] for event in ("start", "finish")
    }
    loaded, collected = ([float(t) for _, e, t in lines if e == event] for event in ("loaded", "collected"))
    counts = {event: len(of_event) for event, of_event in times.items()}
    output = (directory / "output").read_text()
    # A skipped test would be a cheap one.
    if counts != {"start": tests, "finish": tests} or f"{tests} passed" not in output:
        raise RunError(f"{harness.name}: expected {tests} tests to pass, saw {counts}\n{output[-1500:]}")
    return TestRun(begun, ended, list(zip(times["start"], times["finish"], strict=True)), loaded, collected)


@dataclass
class Figures:
    """All samples, in seconds.

    Attributes:
        first: of the first test of each run, by (harness, world).
        each: of each test between the first and the last, by (harness, world).
        verdict: from the command to its end, by harness, or `IMPORT_TORCH`.
        phases: of Lockstep's runs of one test, by phase.
    """

    first: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    each: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    verdict: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def measure(worlds: Sequence[int], repeats: int, base: Path) -> Figures:
    """Run everything so many times, taking turns; of a run that fails the samples are missing."""
    figures = Figures()
    for repeat in range(repeats):
        print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr)
        with reporting_failure():
            begun, ended, _ = run([sys.executable, "-c", "import torch"], base)
            figures.verdict[IMPORT_TORCH].append(ended - begun)
        for harness in FROM_COMMAND:
            with reporting_failure():
                done = run_tests(harness, worlds[0], 1, base)
                figures.verdict[harness.name].append(done.ended - done.begun)
                if harness is WARM:
                    for phase, seconds in zip(PHASES, done.phases, strict=True):
                        figures.phases[phase].append(seconds)
        for world in worlds:
            for harness in HARNESSES:
                with reporting_failure():
                    done = run_tests(harness, world, harness.tests, base)
                    add_tests(figures, (harness.name, world), done.tests)
    return figures


def add_tests(figures: Figures, key: tuple[str, int], tests: Sequence[tuple[float, float]]) -> None:
    """Add the tests of one run, given as (start, finish)."""
    starts = [start for start, _ in tests]
    figures.first[key].append(tests[0][1] - tests[0][0])
    figures.each[key] += [after - start for start, after in itertools.pairwise(starts[1:])]


@contextlib.contextmanager
def reporting_failure() -> Iterator[None]:
    """Print a run that failed and go on."""
    try:
        yield
    except RunError as error:
        print(error, file=sys.stderr)


def show(seconds: Sequence[float]) -> str:
    """Return the median and the extremes, in the unit that reads best."""
    if not seconds:
        return "failed"
    factor, unit = (1.0, "s") if median(seconds) >= 1 else (1000.0, "ms")
    shown = [factor * each for each in (median(seconds), min(seconds), max(seconds))]
    middle, low, high = (f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in shown)
    return f"{middle} {unit} ({low} to {high})"


def report(figures: Figures, worlds: Sequence[int]) -> dict[str, Table]:
    """Return the tables: a test, the first test of a run, and from command to verdict."""
    on_ranks = [f"{world} ranks" for world in worlds]
    order = (MULTI, FRESH, CONT, WARM)
    each, first = (
        [
            [harness.name, harness.processes, *(show(times[harness.name, world]) for world in worlds)]
            for harness in order
        ]
        for times in (figures.each, figures.first)
    )
    for peer, ours in ((MULTI, FRESH), (CONT, WARM)):
        pairs = ((figures.each[peer.name, world], figures.each[ours.name, world]) for world in worlds)
        each.append([f"{peer.name} / {ours.name}", "", *(f"{ratio(*pair):.3g}" for pair in pairs)])
    imports = figures.verdict[IMPORT_TORCH]
    verdicts = [
        [name, show(figures.verdict[name]), f"{ratio(figures.verdict[name], imports):.2f}"]
        for name in (IMPORT_TORCH, *(harness.name for harness in FROM_COMMAND))
    ]
    start = [f"`pytest one_test.py`, one test on {worlds[0]} ranks", "to the end", "/ import torch"]
    phases = [[phase, show(figures.phases[phase])] for phase in PHASES]
    note = "Median (least to most)."
    return {
        "test": Table(["a test", "processes", *on_ranks], each, note),
        "first": Table(["the first test of a run", "processes", *on_ranks], first, note),
        "run": Table(start, verdicts, note),
        "phases": Table(["of Lockstep's run of one test", ""], phases, note),
    }


def compare_warm(worlds: Sequence[int], repeats: int, base: Path, in_mesh: bool) -> dict[str, bool]:
    """Time warm tests and `MultiProcContinuousTest` alone, in turns; print both, and say what held.

    Args:
        in_mesh: whether each test reduces over an axis of a mesh that it makes.
    """
    each: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _, world, harness in itertools.product(range(repeats), worlds, (CONT, WARM)):
        with reporting_failure():
            tests, body = (IN_MESH, MESH_BODY) if in_mesh else (harness.tests, BODY)
            starts = [start for start, _ in run_tests(harness, world, tests, base, body).tests]
            each[harness.name, world] += [after - start for start, after in itertools.pairwise(starts[1:])]
    held = {}
    for world in worlds:
        cont, warm = each[CONT.name, world], each[WARM.name, world]
        print(f"{world} ranks: {CONT.name} {show(cont)}, {WARM.name} {show(warm)}")
        held |= warm_held(world, warm, cont)
    return held


def warm_held(world: int, warm: Sequence[float], cont: Sequence[float]) -> dict[str, bool]:
    """Say whether a warm test was cheap enough."""
    dearer = ratio(warm, cont)
    return {f"world {world}: warm {dearer:.2f} times the cost of {CONT.name}": dearer <= WARM_AT_MOST_TIMES}


def wanted(figures: Figures, worlds: Sequence[int]) -> dict[str, bool]:
    """Say of each wanted ratio whether it held; one without samples did not."""
    held = {}
    for world in worlds:
        multi, cont, fresh, warm = (figures.each[harness.name, world] for harness in HARNESSES)
        cheaper = ratio(multi, fresh)
        held[f"world {world}: fresh {cheaper:.1f} times cheaper than {MULTI.name}"] = (
            cheaper >= FRESH_AT_LEAST_TIMES_CHEAPER
        )
        held |= warm_held(world, warm, cont)
    verdict = ratio(figures.verdict[WARM.name], figures.verdict[IMPORT_TORCH])
    held[f"verdict after {verdict:.2f} times import torch"] = verdict <= VERDICT_AT_MOST_TIMES_IMPORT
    return held


def samples(figures: Figures) -> dict[str, object]:
    """Return every sample, in seconds."""
    kinds = {"first": figures.first, "each": figures.each}
    per_test = {
        kind: {f"{name} at {world}": taken for (name, world), taken in by_key.items()}
        for kind, by_key in kinds.items()
    }
    return {**per_test, "verdict": figures.verdict, "phases": figures.phases}


def main() -> int:
    """Return 1 if `--check` was asked for and a wanted ratio did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="2,4", help="world sizes (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of all harnesses (default: %(default)s)"
    )
    parser.add_argument("--warm", action="store_true", help=f"only a warm test, against {CONT.name}")
    parser.add_argument("--mesh", action="store_true", help="of --warm: each test makes a mesh of two axes")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="exit 1 if a wanted ratio does not hold")
    options = parser.parse_args()
    if options.mesh and not options.warm:
        parser.error("--mesh is for --warm: add that")
    worlds = [int(size) for size in options.worlds.split(",")]
    machine = describe_machine()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        if options.warm:
            held = compare_warm(worlds, options.repeats, Path(base), options.mesh)
            print("\n" + verdicts(held))
            return int(options.check and not all(held.values()))
        figures = measure(worlds, options.repeats, Path(base))
    tables = report(figures, worlds)
    print(*tables.values(), sep="\n\n")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    held = wanted(figures, worlds)
    print("\n" + verdicts(held))
    write_json(options.json, machine, tables, samples(figures))
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
