"""Time `pytest suites`: on gloo, on gloo with two workers of pytest-xdist, and on shm.

    python benchmarks/suites.py [--json FILE] [ARGUMENT ...]      # arguments of pytest, such as `-k parity`

Each is a run of its own, from the start of pytest to its end. CPU seconds are user and system time of pytest,
of its workers, of the servers and of all ranks.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from figures import ROOT, Table, describe_machine, write_json

RUNS: dict[str, list[str]] = {"gloo": [], "gloo, `-n 2`": ["-n", "2"], "shm": ["--backend", "shm"]}
PASSED = re.compile(r"^(\d+) passed\b(?:.* (\d+) subtests passed)?", re.MULTILINE)
SECONDS_PER_RUN = 3600


def run(options: list[str], chosen: list[str]) -> tuple[list[str], dict[str, float]]:
    """Return tests, subtests, seconds and CPU seconds of a run, as the table has them; and both seconds."""
    before, began = cpu_seconds(), time.monotonic()
    command = [sys.executable, "-m", "pytest", "suites", "-q", *options, *chosen]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS_PER_RUN, check=False
    )
    seconds, cpu = time.monotonic() - began, cpu_seconds() - before
    counts = PASSED.search(done.stdout)
    if done.returncode or counts is None:
        sys.exit(f"{done.stdout}\n{' '.join(command)}: status {done.returncode}")
    passed = [f"{int(count or 0):,}" for count in counts.groups()]
    return [*passed, f"{seconds:.0f}", f"{cpu:.0f}"], {"seconds": seconds, "cpu": cpu}


def cpu_seconds() -> float:
    """Return what all children that have ended, and theirs, took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options, chosen = parser.parse_known_args()
    machine, rows, samples = describe_machine(), [], {}
    for name, arguments in RUNS.items():
        cells, samples[name] = run(arguments, chosen)
        rows.append([name, *cells])
    table = Table(["`pytest suites` on", "tests", "subtests", "seconds", "CPU seconds"], rows)
    print(table)
    write_json(options.json, machine, {"suites": table}, samples)


if __name__ == "__main__":
    main()
