"""Time collectives of the backend shm and of gloo, in turns, and what copying the memory takes.

    python benchmarks/collectives.py [--worlds 2,4] [--dtypes fp32,bf16,fp16] [--sizes 4K,64K,1M,16M,64M]
                                     [--ops all_gather,...] [--repeats 7] [--json FILE] [--check]

Every rank is a member of two groups, one of each backend, with one torch thread. The size of a collective
is that of its larger side on one rank: of an all-gather the output, of a reduce-scatter the input. The
limit is a copy of as many bytes from one tensor to another, on all ranks at once. Backends take turns
within each round, so that a noisy minute falls on both; a sample is the mean of the calls of one turn on
the slowest rank, and what is shown is the median of the samples.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from figures import Table, describe_machine, verdicts, write_json
from torch.multiprocessing.spawn import start_processes

import lockstep.shm  # noqa: F401 (registers the backend)

# torch 2.13 renamed them; there the older names warn.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = {"4K": 1 << 12, "64K": 1 << 16, "1M": 1 << 20, "16M": 1 << 24, "64M": 1 << 26}
BACKENDS = ("gloo", "shm")
LIMIT = "copy"

SHARDING = ("all_gather", "reduce_scatter")
"""The collectives of a sharding engine, for which something is wanted."""

SECONDS_PER_TURN = 0.02
MOST_CALLS = 300


@dataclass
class Measured:
    """Seconds of a call, by backend, in each round.

    Attributes:
        op: Name of the collective.
        world: Number of ranks.
        dtype: Of the elements.
        size: Name of its size.
        seconds: The samples.
    """

    op: str
    world: int
    dtype: str
    size: str
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def of(self, name: str) -> float:
        return median(self.seconds[name])


Make = Callable[[int, torch.dtype, dist.ProcessGroup], Callable[[], object]]


def _all_gather(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    full, shard = torch.zeros(numel, dtype=dtype), torch.ones(numel // group.size(), dtype=dtype)
    return lambda: all_gather(full, shard, group=group)


def _all_gather_list(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    shard = torch.ones(numel // group.size(), dtype=dtype)
    shards = [torch.zeros_like(shard) for _ in range(group.size())]
    return lambda: dist.all_gather(shards, shard, group=group)


def _reduce_scatter(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    full, shard = torch.ones(numel, dtype=dtype), torch.zeros(numel // group.size(), dtype=dtype)
    return lambda: reduce_scatter(shard, full, group=group)


def _all_reduce(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    full = torch.zeros(numel, dtype=dtype)
    return lambda: dist.all_reduce(full, group=group)


def _broadcast(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    full = torch.zeros(numel, dtype=dtype)
    return lambda: dist.broadcast(full, 0, group=group)


def _reduce(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    full = torch.zeros(numel, dtype=dtype)
    return lambda: dist.reduce(full, 0, group=group)


def _gather(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    shard = torch.ones(numel // group.size(), dtype=dtype)
    shards = [torch.zeros_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    return lambda: dist.gather(shard, shards, 0, group=group)


def _scatter(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    shard = torch.ones(numel // group.size(), dtype=dtype)
    shards = [torch.zeros_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
    return lambda: dist.scatter(shard, shards, 0, group=group)


def _all_to_all(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    sent, received = torch.ones(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    return lambda: dist.all_to_all_single(received, sent, group=group)


def _send_recv(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    tensor, rank = torch.ones(numel, dtype=dtype), group.rank()
    if rank == 0:
        return lambda: (dist.send(tensor, 1, group=group), dist.recv(tensor, 1, group=group))
    if rank == 1:
        return lambda: (dist.recv(tensor, 0, group=group), dist.send(tensor, 0, group=group))
    return lambda: None


def _barrier(numel: int, dtype: torch.dtype, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.barrier(group=group)


OPS: dict[str, Make] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_gather (list)": _all_gather_list,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send and recv, there and back": _send_recv,
    "barrier": _barrier,
}


def turn(call: Callable[[], object], calls: int, group: dist.ProcessGroup) -> float:
    """Return the seconds of a call, on the slowest rank."""
    call()
    dist.barrier(group=group)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = torch.tensor((time.perf_counter() - began) / calls, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


def measure(op: str, dtype: str, size: str, groups: dict[str, dist.ProcessGroup], repeats: int) -> Measured:
    """Time one collective of one size; the same on every rank."""
    numel = SIZES[size] // DTYPES[dtype].itemsize
    source, target = torch.ones(numel, dtype=DTYPES[dtype]), torch.zeros(numel, dtype=DTYPES[dtype])
    calls: dict[str, Callable[[], object]] = {
        name: OPS[op](numel, DTYPES[dtype], group) for name, group in groups.items()
    }
    calls[LIMIT] = lambda: target.copy_(source)
    found = Measured(op, dist.get_world_size(), dtype, size, {name: [] for name in calls})
    often = {}
    for name, call in calls.items():
        once = turn(call, 2, groups["shm"])  # the same on all ranks
        often[name] = max(1, min(MOST_CALLS, int(SECONDS_PER_TURN / max(once, 1e-7))))
    for _ in range(repeats):
        for name, call in calls.items():
            found.seconds[name].append(turn(call, often[name], groups["shm"]))
    return found


def run_rank(rank: int, world: int, options: argparse.Namespace, base: Path) -> None:
    """Be one rank of a world: measure all that is asked for; rank 0 writes what it found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(base / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    groups = {"gloo": dist.group.WORLD, "shm": dist.new_group(backend="shm")}
    found = []
    for dtype in options.dtypes:
        for op in options.ops:
            for size in options.sizes[: 1 if op == "barrier" else None]:
                found.append(asdict(measure(op, dtype, size, groups, options.repeats)))
                if rank == 0:
                    print(f"world {world}, {dtype}, {op}, {size}", file=sys.stderr)
    if rank == 0:
        (base / f"found-{world}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def report(found: Sequence[Measured]) -> Table:
    header = ["world", "dtype", "collective", "size", "gloo", "shm", "gloo / shm", "copy", "shm / copy"]
    rows = [
        [
            *(str(one.world), one.dtype, one.op, one.size, shown(one.of("gloo")), shown(one.of("shm"))),
            f"{one.of('gloo') / one.of('shm'):.1f}",
            shown(one.of(LIMIT)),
            f"{one.of('shm') / one.of(LIMIT):.1f}",
        ]
        for one in found
    ]
    return Table(header, rows)


def wanted(found: Sequence[Measured]) -> dict[str, bool]:
    """Return what is wanted of the figures, and whether it is so."""
    held = {}
    for one in found:
        if one.world == 2 and one.op in SHARDING:
            what = f"{one.op} of {one.size} {one.dtype} at world 2"
            faster = one.of("gloo") / one.of("shm")
            held[f"{what}: at least 4 times as fast as gloo: {faster:.1f}"] = faster >= 4
            if one.size == "4K":
                held[f"{what}: at most 40 us: {shown(one.of('shm'))}"] = one.of("shm") <= 40e-6
            if one.size == "64M":
                times = one.of("shm") / one.of(LIMIT)
                held[f"{what}: at most 2.5 times a copy: {times:.1f}"] = times <= 2.5
    return held


def parse() -> argparse.Namespace:
    def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse_list(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
            return names

        return parse_list

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4])
    parser.add_argument("--dtypes", type=listed(list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--sizes", type=listed(list(SIZES)), default=list(SIZES))
    parser.add_argument("--ops", type=listed(list(OPS)), default=list(OPS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write all samples")
    parser.add_argument("--check", action="store_true", help="exit with 1 if something wanted is missed")
    return parser.parse_args()


def main() -> int:
    options = parse()
    machine = describe_machine()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for world in options.worlds:
            start_processes(run_rank, (world, options, Path(folder)), world, start_method="spawn")
            entries = json.loads((Path(folder) / f"found-{world}.json").read_text())
            found += [Measured(**entry) for entry in entries]
    print(machine)
    table = report(found)
    print(table)
    held = wanted(found)
    print(verdicts(held))
    write_json(options.json, machine, {"all": table}, [asdict(one) for one in found])
    return int(options.check and not all(held.values()))


if __name__ == "__main__":
    sys.exit(main())
