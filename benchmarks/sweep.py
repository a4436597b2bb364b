"""Time a sweep: a fault of each kind at every collective and every operation on a file of a saver.

    python benchmarks/sweep.py [--saves 7] [--only KIND] [--json FILE] [--check]

The saver is the model of the self-tests, of 40 lines: each of two ranks writes its part aside, syncs and
renames it, and rank 0 writes the marker once all have. One pytest process runs a sweep for each kind that is
on by default, with all points that it has. Seconds are from the start of the test to its report; those of
the processors are user and system time of pytest, of the server and of all ranks. What other processes take
is in the seconds, and hardly in those of the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from figures import Table, describe_machine, verdicts, write_json

AT_LEAST, AT_MOST = 500, 120.0
"""Points, and seconds that they may take on two cores."""
ROOT = Path(__file__).parents[1]
SAVER = ROOT / "suites/selftest/projects/sweep/saver.py"
SECONDS_PER_RUN = 900.0

TESTS = Template(
    """
import pytest
import saver
from lockstep.features.sweep.points import DEFAULT_KINDS

@pytest.mark.ranks(2)
def test_first(world):
    pass  # the start of the server and of the first world does not count

@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [kind for kind in DEFAULT_KINDS if kind != "order"])
def test_sweep(world, sweep, kind):
    folder = world.shared_tmp_path / "files"
    folder.mkdir(exist_ok=True)

    def save():
        for step in range(2, 2 + $saves):
            saver.save(folder, step)

    def claim(crash):
        step, data = saver.load(folder)
        assert step == 1 + $saves or crash.kind is not None
        assert data == bytes([step] * 16)

    sweep(save, prepare=lambda: saver.save(folder, 1), then=claim, files=folder, kinds=[kind])
"""
)

CONFTEST = Template(
    """
import json, os, re, time
from pathlib import Path
import pytest

TICKS = os.sysconf("SC_CLK_TCK")
found = {}

def cpu_seconds():
    fields = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
    below = {os.getpid()}
    while more := {pid for pid, each in fields.items() if int(each[1]) in below} - below:
        below |= more
    return sum(int(number) for pid in below if pid in fields for number in fields[pid][11:15]) / TICKS

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if "RANK" in os.environ or item.name == "test_first":
        return (yield)
    begun, cpu = time.monotonic(), cpu_seconds()
    result = yield
    took = {"seconds": time.monotonic() - begun, "cpu": cpu_seconds() - cpu}
    with open("$log", "a") as log:
        print(json.dumps({"kind": item.callspec.params["kind"], **took, **found}), file=log)
    return result

def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == "sweep":
            held, points = re.match(r"(\\d+) of (\\d+) points held", value).groups()
            found.update(held=int(held), points=int(points))
"""
)


@dataclass(frozen=True)
class Swept:
    """The points of one kind: how many held, and what all of them took."""

    kind: str
    points: int
    held: int
    seconds: float
    cpu: float
    """Seconds of the processors."""


@dataclass(frozen=True)
class Figures:
    """A run of pytest: its sweeps, and seconds from its start to its end."""

    sweeps: tuple[Swept, ...]
    seconds: float

    @property
    def points(self) -> int:
        return sum(each.points for each in self.sweeps)


def measure(saves: int, only: str) -> Figures:
    """Run the sweeps of all kinds, or of one.

    Raises:
        SystemExit: one did not come to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log"
        (folder / "test_sweep.py").write_text(TESTS.substitute(saves=saves))
        (folder / "conftest.py").write_text(CONFTEST.substitute(log=log))
        (folder / "saver.py").write_text(SAVER.read_text())
        (folder / "pytest.ini").write_text("[pytest]\n")
        # Where this is set each new rank compiles what pytest rewrites.
        environ = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        begun = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--sweep-points=all"),
                *(["-k", f"test_first or [{only}]"] if only else []),
            ],
            cwd=folder,
            env=environ,
            text=True,
            capture_output=True,
            timeout=SECONDS_PER_RUN,
            check=False,
        )
        took = time.monotonic() - begun
        if not log.exists() or "error" in done.stdout:
            sys.exit(done.stdout[-3000:] + done.stderr[-1000:])
        sweeps = tuple(Swept(**json.loads(line)) for line in log.read_text().splitlines())
        return Figures(sweeps, took)


def report(sweeps: Sequence[Swept]) -> Table:
    """Return a row for each kind, and one for all."""
    every = Swept(
        "all of them",
        *(sum(each.points for each in sweeps), sum(each.held for each in sweeps)),
        *(sum(each.seconds for each in sweeps), sum(each.cpu for each in sweeps)),
    )
    rows = [
        [
            *(each.kind, str(each.points), str(each.held), f"{each.seconds:.1f} s", f"{each.cpu:.1f} s"),
            *(f"{1000 * took / each.points:.0f} ms" for took in (each.seconds, each.cpu)),
        ]
        for each in (*sweeps, every)
    ]
    header = ["kind", "points", "held", "seconds", "of processors", "a point", "of processors"]
    return Table(header, rows)


def main() -> int:
    """Return 1 if `--check` was asked for and a point did not hold, or all of them took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=7, help="saves in a row (default: %(default)s)")
    parser.add_argument("--only", default="", help="the kind of faults to run alone")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--check", action="store_true", help="exit 1 if something wanted is missed")
    options = parser.parse_args()
    machine = describe_machine()
    found = measure(options.saves, options.only)
    table = report(found.sweeps)
    print(table)
    print(f"pytest from start to end {found.seconds:.1f} s")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    num_held = sum(each.held for each in found.sweeps)
    held = {f"{num_held} of {found.points} points held": num_held == found.points}
    if not options.only:
        held[f"{found.points} points, at least {AT_LEAST}"] = found.points >= AT_LEAST
        rate = AT_LEAST / found.points * found.seconds
        held[f"{AT_LEAST} points take {rate:.0f} s, at most {AT_MOST:.0f}"] = rate <= AT_MOST
    print("\n" + verdicts(held))
    write_json(options.json, machine, {"all": table}, asdict(found))
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
