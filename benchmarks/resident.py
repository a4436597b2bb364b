"""Show how much memory the ranks of a world hold over a long run: small tests, or tests that are named.

    python benchmarks/resident.py [--tests 10000] [--every 1000] [--json FILE] [--check] [PYTEST ARGUMENTS]

Without arguments for pytest it writes a file of small tests: an all-reduce, a fixture that requests the
world, two cases of `run_subtests` with a backward. With some, `suites` for example, it runs those. Each rank
of the world that runs the most tests notes its resident memory after every so many of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from string import Template

from figures import Table, describe_machine, verdicts, write_json

AT_MOST_GROWTH = 1.1
"""What a rank may hold after the last test, by what it held after the first so many."""

PLUGIN = """
import mmap, os
from pathlib import Path

count = 0

def pytest_runtest_logfinish():
    global count
    count += 1
    if "RANK" in os.environ and count % int(os.environ["RESIDENT_EVERY"]) == 0:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with open(os.environ["RESIDENT_LOG"], "a") as log:
            log.write(f"{os.environ['RANK']} {os.getpid()} {count} {pages * mmap.PAGESIZE}\\n")
"""

TESTS = Template(
    """
import pytest, torch
import torch.distributed as dist
from torch import nn

@pytest.fixture
def ones(world):
    return torch.ones(3)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range($tests))
def test_small(world, ones, run_subtests, number):
    dist.all_reduce(ones)
    assert ones.tolist() == [2, 2, 2]

    def claim(size):
        model = nn.Linear(size, size)
        model(torch.ones(2, size)).sum().backward()
        assert world.gather(size) == [size] * 2

    if number % 2:
        run_subtests({"size": [2, 4]}, claim)
"""
)


def measure(arguments: list[str], tests: int, every: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Run pytest; return by rank and process how many tests it had run, and the bytes it held then."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "resident.txt")
        log.touch()
        Path(directory, "resident_plugin.py").write_text(PLUGIN)
        if not arguments:
            Path(directory, "pytest.ini").write_text("[pytest]\n")
            Path(directory, "test_small.py").write_text(TESTS.substitute(tests=tests))
            arguments = ["-p", "no:cacheprovider", "--rootdir", directory, directory]
        path = os.pathsep.join(filter(None, (directory, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": path,
            "RESIDENT_LOG": str(log),
            "RESIDENT_EVERY": str(every),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "resident_plugin", *arguments]
        subprocess.run(command, env=environment, check=True)
        noted = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    found = defaultdict(list)
    for rank, process, count, held in noted:
        found[rank, process].append((count, held))
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", type=int, default=10_000, help="how many small tests (default: 10000)")
    parser.add_argument("--every", type=int, default=1000, help="tests between two notes (default: 1000)")
    parser.add_argument("--json", type=Path, help="file for the table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a rank has grown by too much")
    options, arguments = parser.parse_known_args()
    machine = describe_machine()
    found = measure(arguments, options.tests, options.every)
    most = max(len(notes) for notes in found.values())
    longest = {place: notes for place, notes in sorted(found.items()) if len(notes) == most}
    print(machine)
    header = ["tests", *(f"rank {rank}, MiB" for rank, _ in longest)]
    rows = [
        [str(notes[0][0]), *(f"{held / 2**20:.0f}" for _, held in notes)]
        for notes in zip(*longest.values(), strict=True)
    ]
    table = Table(header, rows)
    print(table)
    write_json(options.json, machine, {"all": table})
    held = {
        f"rank {rank} holds at most {AT_MOST_GROWTH} times what it held after {notes[0][0]} tests": notes[-1][
            1
        ]
        <= AT_MOST_GROWTH * notes[0][1]
        for (rank, _), notes in longest.items()
    }
    print(verdicts(held))
    if options.check and not all(held.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
