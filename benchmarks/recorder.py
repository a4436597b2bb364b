"""Time an all_reduce with and without torch's flight recorder, from which reports know what is in flight.

    python benchmarks/recorder.py [--repeats 8] [--json FILE]

Runs with the recorder and without take turns, each a pytest process with one test on two ranks; which comes
first changes. What counts is the CPU time of rank 0, its threads included; most of the wall time is two
processes waking each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from figures import Table, describe_machine, ratio, write_json

COLLECTIVES = 15_000
TEST = f"""
import time
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
def test_collectives(world):
    tensor = torch.ones(1)
    for _ in range(1000):
        dist.all_reduce(tensor)
    start = time.process_time(), time.perf_counter()
    for _ in range({COLLECTIVES}):
        dist.all_reduce(tensor)
    took = time.process_time() - start[0], time.perf_counter() - start[1]
    if world.rank == 0:
        with open("taken.txt", "w") as file:
            print(*took, file=file)
"""
SIZES = {"without": "0", "with": None}
"""TORCH_FR_BUFFER_SIZE: none, and what the harness chooses."""


def measure(folder: Path, size: str | None) -> tuple[float, float]:
    """Return microseconds of CPU and of time for one all_reduce."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environ |= {} if size is None else {"TORCH_FR_BUFFER_SIZE": size}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=folder, env=environ, stdout=sys.stderr, timeout=300, check=True)
    cpu, wall = (float(word) / COLLECTIVES * 1e6 for word in (folder / "taken.txt").read_text().split())
    return cpu, wall


def shown(taken: list[float]) -> str:
    return f"{median(taken):.0f} µs ({min(taken):.0f} to {max(taken):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="turns (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for all samples")
    options = parser.parse_args()
    machine = describe_machine()
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_recorder.py").write_text(TEST)
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        for turn in range(options.repeats):
            for name in sorted(SIZES, reverse=turn % 2 == 0):
                samples[name].append(measure(Path(folder), SIZES[name]))
    cpu = {name: [sample[0] for sample in taken] for name, taken in samples.items()}
    wall = {name: [sample[1] for sample in taken] for name, taken in samples.items()}
    rows = [[name, shown(cpu[name]), shown(wall[name])] for name in SIZES]
    note = f"Median (least to most). With / without: {ratio(cpu['with'], cpu['without']):.2f} of the CPU."
    table = Table(["the recorder", "CPU of an all_reduce", "time of it"], rows, note)
    print(table)
    print(machine)
    write_json(options.json, machine, {"all": table}, samples)


if __name__ == "__main__":
    main()
