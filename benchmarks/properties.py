"""Time an example of a property test on ranks, over the same example without ranks.

    python benchmarks/properties.py [--worlds 2,4] [--repeats 5] [--json FILE] [--check]

One pytest process runs the same property in turns: in the controller, where it is Hypothesis alone, and on
each world. The body does nothing, so what is left is the price of an example: on ranks the same engine runs
on each of them, and all vote once. The first turn does not count: processes, caches and connections are new.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from string import Template

from figures import Table, describe_machine, verdicts, write_json

AT_MOST_MS = 2.0
"""Milliseconds that an example may cost on two ranks beyond what it costs Hypothesis alone."""
EXAMPLES = 500
SECONDS_PER_RUN = 600.0

TESTS = Template(
    """
import os, time
import pytest
from hypothesis import given, settings, strategies as st

@settings(max_examples=$examples, deadline=None, database=None, derandomize=True)
@given(st.integers(), st.lists(st.floats()))
def hold(number, numbers):
    pass

def measure(name):
    start = time.perf_counter()
    hold()
    took = (time.perf_counter() - start) / $examples
    if os.environ.get("RANK", "0") == "0":
        with open("$log", "a") as log:
            log.write(f"{name} {took}\\n")

@pytest.mark.parametrize("turn", range($turns))
class TestInTurns:
    def test_alone(self, turn):
        measure("alone")
$worlds
"""
)
IN_TURNS = """
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.callspec.params["turn"])
"""
ON_A_WORLD = """
    @pytest.mark.ranks({size})
    def test_on_{size}(self, turn):
        measure("{size}")
"""
Samples = Mapping[str, Sequence[float]]


def measure(worlds: Sequence[int], repeats: int) -> Samples:
    """Return seconds an example, by world size or "alone", without those of the first turn."""
    samples: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        on_worlds = "".join(ON_A_WORLD.format(size=size) for size in worlds)
        tests = TESTS.substitute(examples=EXAMPLES, log=log, turns=repeats + 1, worlds=on_worlds)
        (Path(folder) / "test_turns.py").write_text(tests)
        (Path(folder) / "conftest.py").write_text(IN_TURNS)
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=sys.stderr,
            timeout=SECONDS_PER_RUN,
            check=True,
        )
        for line in log.read_text().splitlines():
            name, seconds = line.split()
            samples[name].append(float(seconds))
    return {name: taken[1:] for name, taken in samples.items()}


def report(samples: Samples, worlds: Sequence[int]) -> Table:
    """Return the table: an example alone and on each world, and the difference."""
    rows = [
        [name, f"{1000 * median(samples[name]):.2f} ms", f"{overhead(samples, name):.2f} ms"]
        for name in ("alone", *map(str, worlds))
    ]
    return Table(["ranks", "an example", "more than alone"], rows)


def overhead(samples: Samples, name: str) -> float:
    """Return milliseconds."""
    return 1000 * (median(samples[name]) - median(samples["alone"]))


def main() -> int:
    """Return 1 if `--check` was asked for and an example on two ranks costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="2,4", help="world sizes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="exit 1 if two ranks cost too much")
    options = parser.parse_args()
    worlds = [int(size) for size in options.worlds.split(",")]
    machine = describe_machine()
    samples = measure(worlds, options.repeats)
    table = report(samples, worlds)
    print(table)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    cost = overhead(samples, str(worlds[0]))
    held = {f"an example on {worlds[0]} ranks costs {cost:.2f} ms more than alone": cost <= AT_MOST_MS}
    print("\n" + verdicts(held))
    write_json(options.json, machine, {"all": table}, samples)
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
