"""Time training steps and measure their memory under torch's sharding engines and under ours, side by side.

    python benchmarks/engine.py [--worlds 2,4] [--repeats 5] [--json FILE] [--check] [and others, see --help]

Ranks are CPU processes with one torch thread each, on gloo over the loopback; `--backend shm` puts ours on
shared memory instead, and compares them with the others on gloo. What they train is in trainings.py. Before
anything is timed, three steps must give the losses of one process that trains on the data of all ranks, so
that no engine wins by doing less.

Time: engines take turns within each round, in an order that rotates, so that a noisy minute falls on all of
them. A turn is one step that does not count, to have its memory at hand again, and then some that do; its
sample is the slowest rank's time per step (forward, loss, backward, optimizer's step, zero_grad).

Memory: the bytes of all tensors, by whomever they are held, so that nothing depends on how an engine is
built: shards, gathered parameters, gradients, buffers of the reduction and what was forgotten all count (see
memory.py for what is not seen). Activations count too; the batch is one input per rank, so that they are
small, and the same for all. Every gradient is None when a forward starts: so "at rest" is what an engine
keeps of the parameters (FSDP1 also keeps its flat gradients until the next forward, DDP its buckets), the
peak of a forward adds what it gathers, and that of the whole step gradients. Shown is the rank with the most.
Steps that are timed are not watched.
"""

import argparse
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from figures import Table, describe_machine, ratio, verdicts, write_json
from memory import LiveMemory
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes
from trainings import (
    DDP,
    DTYPES,
    ENGINES,
    FSDP1,
    FSDP2,
    OURS,
    OURS_COMPOSABLE,
    PEERS,
    UNSHARDED,
    WORKLOADS,
    Case,
    Training,
)


@dataclass(frozen=True)
class Goal:
    """The most that `mine` may take of the time of `peer`, by world, on these models."""

    mine: str
    peer: str
    at_most: Mapping[int, float]
    models: Sequence[str] = tuple(WORKLOADS)


# By the backend of ours; the peers are on gloo.
_LINEAR, _TRANSFORMER = ("relu512x6",), ("transformer256x4",)
GOALS = {
    "gloo": (Goal(OURS, FSDP1, {2: 0.6, 4: 0.5}), Goal(OURS_COMPOSABLE, FSDP2, {2: 0.6})),
    "shm": tuple(
        goal
        for mine in (OURS, OURS_COMPOSABLE)
        for goal in (Goal(mine, DDP, {2: 0.8, 4: 0.6}, _LINEAR), Goal(mine, DDP, {2: 1, 4: 1}, _TRANSFORMER))
    ),
}

STEPS_PER_TURN = 3
# How far a loss may be off, as a part of what training has changed it by. Seen: 2e-6 in fp32; in bf16 2e-3 on
# linear layers, 9e-3 with layer norms, which autocast computes in fp32. With gradients that no rank averages:
# 6e-3 in fp32, 2e-2 in bf16.
TOLERANCE = {"fp32": 1e-3, "bf16": 1.5e-2}
COLLECTIVE_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Memory:
    """Bytes live on a rank before a step, and at most in its forward and in all of it."""

    rest: int
    forward: int
    step: int


@dataclass
class Figures:
    """Of one case, by engine: the samples of each round in seconds per step, and memory."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


def run_rank(rank: int, cases: Sequence[Case], options: argparse.Namespace, base: Path) -> None:
    """Be one rank of the world of `cases`: measure them all; rank 0 writes what it found."""
    torch.set_num_threads(1)
    world = cases[0].world
    store = dist.FileStore(str(base / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    mesh = DeviceMesh.from_group(group_of_ours(options.backend), "cpu")
    found = []
    for case in cases:
        if rank == 0:
            print(f"world {world}, {case.model}, {case.dtype}", file=sys.stderr)
        found.append(asdict(measure(case, options, mesh)))
    if rank == 0:
        (base / f"found-{world}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def group_of_ours(backend: str) -> dist.ProcessGroup:
    """Return the group of all ranks on `backend`."""
    if backend == "gloo":
        return dist.group.WORLD
    import_module(f"lockstep.{backend}")  # registers it
    return dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)


def measure(case: Case, options: argparse.Namespace, mesh: DeviceMesh) -> Figures:
    """Measure the memory of all engines on one case, check them, and time them; the same on every rank."""
    memory = {name: peak_memory(name, case, mesh) for name in options.engines}
    trainings = {name: Training(name, case, options.batch, mesh) for name in options.engines}
    check_losses(case, trainings, Training(UNSHARDED, case, options.batch, mesh, of_all_ranks=True))
    figures = Figures(case, {name: [] for name in options.engines}, memory)
    for number in range(options.repeats):
        first = number % len(options.engines)
        for name in options.engines[first:] + options.engines[:first]:
            figures.seconds[name].append(turn(trainings[name]))
    return figures


def check_losses(case: Case, trainings: Mapping[str, Training], reference: Training) -> None:
    """Raise RuntimeError unless each training's losses, averaged over ranks, are the reference's.

    The reference has the data of all ranks. An unsharded training has only its rank's data
    and is in step with no other rank, so only its first loss can be compared.
    """
    expected = torch.stack([reference.step() for _ in range(3)])
    allowed = TOLERANCE[case.dtype] * (expected[0] - expected[-1]).abs()
    for name, training in trainings.items():
        losses = torch.stack([training.step() for _ in range(3)])
        dist.all_reduce(losses)
        off = (losses / case.world - expected).abs()[: 1 if name == UNSHARDED else None]
        if not (off <= allowed).all():
            raise RuntimeError(
                f"{case}: {name} computes something else: losses {(losses / case.world).tolist()}, "
                f"one process with all data {expected.tolist()}, allowed difference {allowed:.2g}"
            )


def turn(training: Training) -> float:
    """Return the slowest rank's seconds per step."""
    training.step()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        training.step()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item() / STEPS_PER_TURN


def peak_memory(engine: str, case: Case, mesh: DeviceMesh) -> Memory:
    """Return the memory of a third step, on the rank with the most."""
    gc.collect()
    with LiveMemory() as memory:
        training = Training(engine, case, 1, mesh)
        for _ in range(2):  # what is made once, in the first steps, exists in all later ones
            training.step()
        gc.collect()
        rest = memory.live()
        memory.take_peak()
        loss = training.forward()
        forward = memory.take_peak()
        loss.backward()
        training.update()
        largest = torch.tensor([rest, forward, max(forward, memory.take_peak())])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return Memory(*largest.tolist())


@contextmanager
def ranks(world: int, *arguments: object) -> Iterator[ProcessContext]:
    """Run `run_rank` on new processes, which end with the context, however it ends."""
    context = start_processes(
        run_rank, arguments, nprocs=world, join=False, daemon=True, start_method="spawn"
    )
    try:
        yield context
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def run_world(cases: Sequence[Case], options: argparse.Namespace, base: Path) -> list[Figures]:
    """Measure cases of one world; raise torch's ProcessException, with a traceback, if a rank fails."""
    world = cases[0].world
    with ranks(world, cases, options, base) as context:
        while not context.join():
            pass
    found = json.loads((base / f"found-{world}.json").read_text())
    return [
        Figures(
            Case(**one["case"]),
            one["seconds"],
            {name: Memory(**memory) for name, memory in one["memory"].items()},
        )
        for one in found
    ]


def report(found: Sequence[Figures], engines: Sequence[str]) -> dict[str, Table]:
    """Return the tables of times, ratios and memory, a row for each case."""
    head = ["world", "model", "dtype"]
    pairs = compared(engines)
    times, ratios, memory = [], [], []
    for figures in found:
        case, seconds = [str(value) for value in asdict(figures.case).values()], figures.seconds
        times.append(case + [show(seconds[name]) for name in engines])
        ratios.append(case + [f"{ratio(seconds[mine], seconds[peer]):.2f}" for mine, peer in pairs])
        sizes = (asdict(figures.memory[name]).values() for name in engines)
        memory.append(case + [" / ".join(f"{size / 2**20:.2f}" for size in of_one) for of_one in sizes])
    on_a_rank = "MiB on a rank: at rest / at most in forward / at most in a step."
    return {
        "times": Table([*head, *engines], times, "Milliseconds of a step, median (quartiles)."),
        "ratios": Table([*head, *(f"{mine} / {peer}" for mine, peer in pairs)], ratios, "Of the medians."),
        "memory": Table([*head, *engines], memory, on_a_rank),
    }


def compared(engines: Sequence[str]) -> list[tuple[str, str]]:
    """Return each of ours among `engines` with each of its peers among them."""
    return [(mine, peer) for mine, peers in PEERS.items() for peer in peers if {mine, peer} <= {*engines}]


def show(seconds: Sequence[float]) -> str:
    """Return the median and the quartiles, in ms."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [*seconds] * 3
    return "{:.1f} ({:.1f} to {:.1f})".format(*(x * 1000 for x in (median(seconds), low, high)))


def wanted(found: Sequence[Figures], goals: Sequence[Goal]) -> dict[str, bool]:
    """Say of each ratio of ours to a peer that something is wanted of whether it held."""
    held = {}
    for figures, goal in itertools.product(found, goals):
        case, mine, peer = figures.case, goal.mine, goal.peer
        if not {mine, peer} <= set(figures.seconds) or case.model not in goal.models:
            continue
        name = f"world {case.world}, {case.model}, {case.dtype}: {mine}"
        times = ratio(figures.seconds[mine], figures.seconds[peer])
        if most := goal.at_most.get(case.world):
            held[f"{name}: {times:.2f} of {peer}'s time, at most {most}"] = times <= most
        for phase in ("forward", "step") if peer == FSDP1 else ():
            own, theirs = (getattr(figures.memory[engine], phase) for engine in (mine, peer))
            what = f"{name}: {own / theirs:.3f} of {peer}'s peak memory in a {phase}, at most 1"
            held[what] = own <= theirs
    return held


def parse() -> argparse.Namespace:
    """Return the options; exit with a sentence if they name what there is not."""

    def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def chosen(text: str) -> list[str]:
            if unknown := set(names := text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there is {', '.join(known)}")
            return names

        return chosen

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="2,4", help="world sizes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="inputs per rank (default: %(default)s)")
    parser.add_argument("--backend", choices=list(GOALS), default="gloo", help="of ours; the others use gloo")
    for option, known in (("models", WORKLOADS), ("dtypes", DTYPES), ("engines", ENGINES)):
        names = list(known)
        parser.add_argument(f"--{option}", type=some_of(names), default=names, help=f"of {','.join(names)}")
    parser.add_argument("--json", type=Path, help="file for all samples")
    parser.add_argument("--check", action="store_true", help="exit 1 if a wanted ratio does not hold")
    options = parser.parse_args()
    goals = GOALS[options.backend]
    if options.check and not any({goal.mine, goal.peer} <= set(options.engines) for goal in goals):
        pairs = " or ".join(dict.fromkeys(f"{goal.mine} with {goal.peer}" for goal in goals))
        parser.error(f"--check compares {pairs}; let --engines name both")
    return options


def main() -> int:
    """Return 1 if a rank failed, or if `--check` was asked for and a wanted ratio did not hold."""
    options = parse()
    machine = describe_machine()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that ranks and files go, as on Ctrl-C
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as base:
        for world in (int(size) for size in options.worlds.split(",")):
            cases = [Case(world, *rest) for rest in itertools.product(options.models, options.dtypes)]
            try:
                found += run_world(cases, options, Path(base))
            except ProcessException as error:
                print(error, file=sys.stderr)
                return 1
    tables = report(found, options.engines)
    print(*tables.values(), sep="\n\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json(options.json, machine, tables, [asdict(one) for one in found])
    held = wanted(found, GOALS[options.backend])
    print("\n" + verdicts(held))
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
