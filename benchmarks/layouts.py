"""Time all layouts of five plans, held to the unsharded model, and a layout under torchrun beside them.

    python benchmarks/layouts.py [--backends shm,gloo] [--only NAME] [--json FILE] [--check]

The plans are those of `examples/layouts`, of a Llama of 4 blocks with experts: three steps on every layout
of their axes of sizes 1, 2 and 4, on at most 8 ranks. Each plan is one pytest process, timed from its start
to its end. Under torchrun the same plan trains the same steps, and compares nothing: new processes for each
layout are what people have today. Threads and memory are those of rank 0 after its layout: the first and the
last of those with as many ranks, on the same warm processes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from string import Template

from figures import Table, describe_machine, verdicts, write_json

ROOT = Path(__file__).parents[1]
SECONDS_PER_RUN = 900.0
RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Plan:
    """One plan.

    Attributes:
        made_by: module and class of `examples/layouts`.
        axes: of sizes 1, 2 and 4, but where others are given.
        at_most: seconds that all layouts may take, by backend.
    """

    name: str
    made_by: str
    axes: str
    at_most: dict[str, float]


def of_sizes(*axes: str, **others: str) -> str:
    return ", ".join(f"{axis}={others.get(axis, '(1, 2, 4)')}" for axis in axes)


ALL = ("pp", "dp", "fsdp", "ep", "cp", "tp")
UNEVEN = dict.fromkeys(("dp", "fsdp"), "(1, 2, 3, 4, 5, 6, 8)")  # 24 rows: the last rank of 5 has fewer
PLANS = (
    Plan("by hand", "pipeline.Plan", of_sizes("pp", "dp", "ep", "cp", "tp"), {"shm": 30, "gloo": 60}),
    Plan("by hand, fsdp too", "fsdp_by_hand.Plan", of_sizes(*ALL), {}),
    Plan("FSDP2", "six_axes.Plan", of_sizes(*ALL), {"shm": 100}),
    Plan("our fully_shard", "six_axes.PlanWithOurs", of_sizes(*ALL), {"shm": 100}),
    Plan("DTensor, FSDP2", "by_dtensor.Plan", of_sizes("dp", "fsdp", "tp", **UNEVEN), {"shm": 60}),
)

TESTS = Template(
    """
import functools, gc, os, time, threading
import pytest
import model
model.KV_HEADS = 4  # tp4 cuts them, too
import $module
from lockstep.layouts import assert_same_as_unsharded, witness_batches

BATCHES, SHARDS = witness_batches(model.VOCAB), getattr($module.Plan, "shards", None)
build = functools.partial(model.build, blocks=4)

def of_process(name):
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith(name))

@pytest.mark.layouts($axes, at_most=8, timeout=120)
def test_plan(layout):
    begun = time.perf_counter()
    assert_same_as_unsharded(layout, build, $module.$made, BATCHES, model.loss, shards=SHARDS)
    if layout.rank == 0:
        took = time.perf_counter() - begun
        with open("$log", "a") as log:
            size = len(layout.members(layout.large))
            print(layout.name, size, took, of_process("Threads"), of_process("VmRSS"), file=log)
"""
)

UNDER_TORCHRUN = """
import torch, torch.distributed as dist
import model, pipeline
from lockstep.layouts import Layout, witness_batches

dist.init_process_group("gloo")
layout = Layout({"dp": dist.get_world_size()})
trainer = pipeline.Plan(model.build(blocks=4), layout)
optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
for batch, microbatches in zip(witness_batches(model.VOCAB), (1, 3, 1)):
    optimizer.zero_grad()
    trainer(batch, microbatches)
    optimizer.step()
layout.close()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Ran:
    """One layout: its ranks, the seconds of its comparison, and rank 0 after it, memory in MiB."""

    layout: str
    ranks: int
    seconds: float
    threads: int
    memory: float


@dataclass(frozen=True)
class Figures:
    """All layouts of a plan on a backend; seconds from the start of pytest to its end."""

    plan: str
    backend: str
    seconds: float
    held: int
    of: int
    layouts: tuple[Ran, ...]

    def of_ranks(self, ranks: int) -> list[Ran]:
        return [each for each in self.layouts if each.ranks == ranks]


def measure(plan: Plan, backend: str, folder: Path) -> Figures:
    """Run all layouts of a plan.

    Raises:
        SystemExit: pytest printed no line on layouts.
    """
    module, made = plan.made_by.split(".")
    log = folder / "log"
    log.write_text("")
    tests = TESTS.substitute(module=module, made=made, axes=plan.axes, log=log)
    (folder / "test_layouts.py").write_text(tests)
    filters = "filterwarnings = ignore:FSDP2-wrapped module .* returned a view"
    (folder / "pytest.ini").write_text(f"[pytest]\n{filters}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--backend", backend]
    begun = time.monotonic()
    done = run([*command, "test_layouts.py"], folder)
    took = time.monotonic() - begun
    found = re.search(r"layouts of .*: (\d+) of (\d+) held", done)
    if found is None:
        sys.exit(f"{plan.name} on {backend}:\n{done[-3000:]}")
    layouts = [line.split() for line in log.read_text().splitlines()]
    ran = tuple(
        Ran(name, int(ranks), float(seconds), int(threads), int(kib) / 1024)
        for name, ranks, seconds, threads, kib in layouts
    )
    return Figures(plan.name, backend, took, int(found[1]), int(found[2]), ran)


def run(command: Sequence[str], folder: Path) -> str:
    """Return what a command prints, of a process that imports the example plans."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples/layouts"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, timeout=SECONDS_PER_RUN, text=True, capture_output=True, check=False
    )
    return done.stdout + done.stderr


def under_torchrun(folder: Path) -> dict[int, float]:
    """Return the seconds of one layout in new processes, by its ranks."""
    (folder / "train.py").write_text(UNDER_TORCHRUN)
    found = {}
    for ranks in RANKS:
        begun = time.monotonic()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "train.py"]
        printed = run([sys.executable, *torchrun], folder)
        found[ranks] = time.monotonic() - begun
        if "Error" in printed:
            sys.exit(f"torchrun:\n{printed[-3000:]}")
    return found


def report(figures: Sequence[Figures], peer: dict[int, float]) -> Table:
    """Return a row for each plan on each backend, and one for torchrun."""
    rows = []
    for each in figures:
        by_ranks = [1000 * median(one.seconds for one in each.of_ranks(ranks)) for ranks in RANKS]
        growth = defaultdict(list)
        for ranks in RANKS:
            first, *_, last = each.of_ranks(ranks)
            growth["threads"].append(f"{first.threads} to {last.threads}")
            growth["memory"].append(f"{first.memory:.0f} to {last.memory:.0f}")
        rows.append(
            [
                *(each.plan, each.backend, f"{each.held} of {each.of}", f"{each.seconds:.1f} s"),
                *(" / ".join(f"{one:.0f}" for one in by_ranks) + " ms", ", ".join(growth["threads"])),
                ", ".join(growth["memory"]) + " MiB",
            ]
        )
    seconds = " / ".join(f"{1000 * one:.0f}" for one in peer.values()) + " ms"
    rows.append(["by hand, torchrun", "gloo", "not compared", "", seconds, "", ""])
    of_ranks = f"a layout of {' / '.join(map(str, RANKS))} ranks"
    return Table(["plan", "backend", "held", "all layouts", of_ranks, "threads", "memory"], rows)


def main() -> int:
    """Return 1 if `--check` was asked for and a layout differs, or all of them took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="shm,gloo", help="(default: %(default)s)")
    parser.add_argument("--only", help="the plans with this in their names")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="exit 1 if something wanted is missed")
    options = parser.parse_args()
    machine, figures, held = describe_machine(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        peer = under_torchrun(Path(folder))
        for plan in PLANS:
            for backend in options.backends.split(","):
                if options.only and options.only not in plan.name:
                    continue
                found = measure(plan, backend, Path(folder))
                figures.append(found)
                held[f"{plan.name}, {backend}: {found.held} of {found.of} layouts held"] = (
                    found.held == found.of
                )
                if (most := plan.at_most.get(backend)) is not None:
                    what = f"{plan.name}, {backend}: {found.seconds:.0f} s, at most {most:.0f}"
                    held[what] = found.seconds <= most
    table = report(figures, peer)
    print(table)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print("\n" + verdicts(held))
    samples = {"torchrun": peer, "layouts": [asdict(each) for each in figures]}
    write_json(options.json, machine, {"all": table}, samples)
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
