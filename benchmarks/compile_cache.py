"""Time parities of compiled models with an empty compile cache, and again with what that run has kept.

    python benchmarks/compile_cache.py [--repeats 1] [--backends eager,aot_eager,inductor] [--json FILE]
                                       [--check]

Two ranks hold torch's FSDP2 and the engine's `fully_shard`, compiled by block or as a whole model, to DDP
that is not compiled: with three backends these are twelve parities. Each run is a pytest process of its own.
Only code of inductor is kept: what dynamo takes to trace, and the other backends, is paid each time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

from figures import Table, describe_machine, ratio, verdicts, write_json

AT_MOST = 1 / 3
"""Time of a run with the kept cache over that of a run with an empty one."""
BACKENDS = ("eager", "aot_eager", "inductor")
NUM_OF_BACKEND = 4
"""Number of parities: two engines, by block or as a whole."""
SECONDS_PER_RUN = 1800.0

TESTS = """
import copy, os

import pytest, torch, torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import engine
from lockstep.assertions import Trainee, Training, assert_parity, per_rank_batches

FULLY_SHARD = {"FSDP2": torch.distributed.fsdp.fully_shard, "ours": engine.fully_shard}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.widen, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        heads = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.widen(self.after(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", os.environ["BENCHMARK_BACKENDS"].split(","))
@pytest.mark.parametrize("way", ["blocks", "whole"])
@pytest.mark.parametrize("name", FULLY_SHARD)
def test_parity(name, way, backend, compiles, world):
    compiles.require_compiler()
    torch.manual_seed(0)
    reference = DistributedDataParallel(Model())
    model = copy.deepcopy(reference.module)
    for block in model.blocks:
        if way == "blocks":
            block.compile(backend=backend)
        FULLY_SHARD[name](block)
    FULLY_SHARD[name](model)
    if way == "whole":
        model.compile(backend=backend)
    tokens = per_rank_batches(lambda g: torch.randint(16, (2, 9), generator=g), world.seed, world.rank)
    assert_parity(Trainee(reference), Trainee(model), Training(tokens, loss))
    if world.rank == 0:
        with open(os.environ["BENCHMARK_LOG"], "a") as log:
            print(compiles.cache_hits, compiles.cache_misses, file=log)
"""
INI = """
[pytest]
ranks_preload = torch._dynamo
"""


@dataclass(frozen=True)
class Session:
    """A run of all parities."""

    seconds: float
    """Seconds of the whole process, start of the ranks included."""
    cpu_seconds: float
    """Seconds of CPU that it and its ranks have used."""
    by_backend: dict[str, float]
    """Seconds of the parities of each backend."""
    hits: int
    """Number of graphs on rank 0 that torch's caches had."""
    misses: int


def run(path: Path, backends: Sequence[str]) -> Session:
    """Run the parities with what the folder `kept` has by now.

    Raises:
        RuntimeError: one does not hold, or was skipped.
    """
    log, report = path / "log", path / "report.xml"
    log.write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", f"--junitxml={report}", "--compile-cache=kept"]
    environ = {**os.environ, "BENCHMARK_BACKENDS": ",".join(backends), "BENCHMARK_LOG": str(log)}
    start, used = time.monotonic(), _cpu_seconds_of_children()
    done = subprocess.run(
        [*command, "--world-timeout=600"],
        cwd=path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_RUN,
        check=False,
    )
    seconds, used = time.monotonic() - start, _cpu_seconds_of_children() - used
    if done.returncode or f"{NUM_OF_BACKEND * len(backends)} passed" not in done.stdout:
        raise RuntimeError(done.stdout + done.stderr)
    taken = dict.fromkeys(backends, 0.0)
    for case in ElementTree.parse(report).iter("testcase"):
        taken[case.attrib["name"].rpartition("-")[2].rstrip("]")] += float(case.attrib["time"])
    hits, misses = zip(*(map(int, line.split()) for line in log.read_text().splitlines()), strict=True)
    return Session(seconds, used, taken, sum(hits), sum(misses))


def _cpu_seconds_of_children() -> float:
    used = os.times()
    return used.children_user + used.children_system


def measure(backends: Sequence[str], repeats: int) -> dict[str, list[Session]]:
    """Run the parities so often in pairs: with an empty cache, and with what that run has kept."""
    sessions: dict[str, list[Session]] = {"empty": [], "kept": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_parities.py").write_text(TESTS)
            (Path(folder) / "pytest.ini").write_text(INI)
            for each in sessions.values():
                each.append(run(Path(folder), backends))
    return sessions


def report(sessions: dict[str, list[Session]], backends: Sequence[str]) -> Table:
    """Return the table: the whole process, and the parities of each backend."""
    empty, kept = sessions["empty"], sessions["kept"]
    rows = [
        _row("the run", [each.seconds for each in empty], [each.seconds for each in kept]),
        _row("its CPU time", [each.cpu_seconds for each in empty], [each.cpu_seconds for each in kept]),
    ]
    for name in backends:
        before, after = ([each.by_backend[name] for each in runs] for runs in (empty, kept))
        rows.append(_row(f"{NUM_OF_BACKEND} parities of {name}", before, after))
    graphs = [f"{runs[-1].hits} of {runs[-1].hits + runs[-1].misses}" for runs in (empty, kept)]
    rows.append(["graphs of rank 0 that the cache had", *graphs, ""])
    return Table(["", "empty cache", "kept cache", "ratio"], rows)


def _row(name: str, empty: Sequence[float], kept: Sequence[float]) -> list[str]:
    return [name, f"{median(empty):.1f} s", f"{median(kept):.1f} s", f"{ratio(kept, empty):.2f}"]


def main() -> int:
    """Return 1 if `--check` was asked for and the second run takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=1, help="pairs of runs (default: %(default)s)")
    parser.add_argument(
        "--backends", default=",".join(BACKENDS), help="of torch.compile (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="exit 1 if the kept cache saves too little")
    options = parser.parse_args()
    backends = options.backends.split(",")
    machine = describe_machine()
    sessions = measure(backends, options.repeats)
    table = report(sessions, backends)
    print(table)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    taken = {name: [each.seconds for each in runs] for name, runs in sessions.items()}
    found = ratio(taken["kept"], taken["empty"])
    held = {f"a run with the kept cache takes {found:.2f} of one with an empty one": found <= AT_MOST}
    print("\n" + verdicts(held))
    samples = {name: [asdict(each) for each in runs] for name, runs in sessions.items()}
    write_json(options.json, machine, {"all": table}, samples)
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
