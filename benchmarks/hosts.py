"""A test on two hosts against one on a single host, and against what projects do today: every rank a pytest.

    python benchmarks/hosts.py [--tests 100] [--json FILE]

The two hosts are network namespaces of this machine with a cable between them, where root may make them, else
two addresses of the loopback. Warm and fresh worlds of four ranks, two on each host, are measured in one
session, in turns with worlds of the same size on one host. From start to verdict `lockstep hosts` is
compared with `torchrun --nnodes 2 --nproc-per-node 2 -m pytest`: four processes, four whole pytest sessions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from figures import Table, describe_machine, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))

from suites.selftest.hosts.bed import Bed, two_hosts

ROUNDS = 4
"""Turns of blocks of tests on one host and on two."""
BODY = """
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 8
"""
HEADER = "import pytest, torch, torch.distributed as dist\n"
CONFTEST = """
import time
started = {}

def pytest_runtest_logstart(nodeid):
    started[nodeid] = time.monotonic()

def pytest_runtest_logfinish(nodeid):
    with open("log", "a") as log:
        print(nodeid.split("::")[-1], time.monotonic() - started[nodeid], file=log)
"""
TORCHRUN_CONFTEST = """
import pytest, torch.distributed as dist

@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()

@pytest.fixture
def world():
    return dist.group.WORLD
"""


def tests_in_turns(tests: int) -> str:
    """Return a test file: blocks of warm tests on one host and on two, then fresh ones, in turns."""
    parts = [HEADER]
    for turn in range(ROUNDS):
        for hosts in (1, 2):
            for fresh, count in ((False, tests // ROUNDS), (True, 3)):
                kind = "fresh" if fresh else "warm"
                parts.append(
                    f"@pytest.mark.ranks(4, hosts={hosts}, fresh={fresh})\n"
                    f"@pytest.mark.parametrize('n', range({count}))\n"
                    f"def test_{kind}_{hosts}_{turn}(world, n):{BODY}    assert len(world.hosts) == {hosts}\n"
                )
    return "\n".join(parts)


def in_turns(tests: int) -> dict[str, float]:
    """Return the median seconds of a test, by its kind: `warm_1`, `warm_2`, `fresh_1`, `fresh_2`."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path)) as bed:
        bed.write("test_turns.py", tests_in_turns(tests))
        bed.write("conftest.py", CONFTEST)
        bed.write("pytest.ini", "[pytest]\n")
        ended = bed.run("-q")
        if ended.statuses != (0, 0):
            raise SystemExit(ended.output)
        seconds: dict[str, list[float]] = {}
        for line in (bed.directory(0) / "log").read_text().splitlines():
            name, value = line.split()
            # The first of a block of warm tests may start its world.
            if not (name.startswith("test_warm") and name.endswith("[0]")):
                seconds.setdefault("_".join(name.split("_")[1:3]), []).append(float(value))
        return {kind: median(values) for kind, values in seconds.items()}


def start_to_verdict(tests: int) -> dict[str, float]:
    """Return the seconds of a whole run: of `hosts`, and of `torchrun` with every rank a pytest."""
    seconds = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path)) as bed:
        bed.write("pytest.ini", "[pytest]\n")
        body = f"@pytest.mark.parametrize('n', range({tests}))\ndef test_it(world, n):{BODY}"
        bed.write("test_it.py", f"{HEADER}@pytest.mark.ranks(4, hosts=2)\n{body}")
        begun = time.monotonic()
        ended = bed.run("-q")
        seconds["hosts"] = time.monotonic() - begun
        if ended.statuses != (0, 0):
            raise SystemExit(ended.output)
        bed.write("test_it.py", f"{HEADER}{body}")
        bed.write("conftest.py", TORCHRUN_CONFTEST)
        begun = time.monotonic()
        processes = [torchrun(bed, host) for host in (1, 0)]
        ended = bed.end(*processes)
        seconds["torchrun"] = time.monotonic() - begun
        if ended.statuses != (0, 0):
            raise SystemExit(ended.outputs[1])
    return seconds


def torchrun(bed: Bed, host: int) -> subprocess.Popen[str]:
    launcher = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}")
    place = ("--master-addr", bed.addresses[0], "--master-port", str(bed.port))
    local = ("--local-addr", bed.addresses[host])
    interface = "cable" if bed.namespaces else "lo"
    command = (sys.executable, *launcher, *place, *local, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    return bed.start(host, *command, GLOO_SOCKET_IFNAME=interface)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=int, default=100, help="warm tests on one host, and on two")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    options = parser.parse_args()
    machine = describe_machine()
    print(machine)
    kinds, runs = in_turns(options.tests), start_to_verdict(20)
    rows = []
    for kind in ("warm", "fresh"):
        one, two = kinds[f"{kind}_1"], kinds[f"{kind}_2"]
        rows.append([f"{kind} test", f"{one * 1000:.1f} ms", f"{two * 1000:.1f} ms", f"{two / one:.2f}"])
    tables = {"tests": Table(["4 ranks", "one host", "two hosts", "ratio"], rows)}
    whole = [["20 tests, start to verdict", f"{runs['hosts']:.1f} s", f"{runs['torchrun']:.1f} s"]]
    tables["run"] = Table(["", "lockstep hosts", "torchrun -m pytest"], whole)
    print(*tables.values(), sep="\n\n")
    write_json(options.json, machine, tables, {"tests": kinds, "runs": runs})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
