"""CPU seconds to shard 100 Linear layers, and to train one step, as one rank of worlds of 8 to 1,024 ranks.

    python benchmarks/scale.py [--json FILE]

In fake worlds (torch's `fake` process group): nothing is sent, so what is left is the work of the host.
torch's FSDP2 is measured in turn, in the same process. A gather of the fake group itself copies as many
pieces as there are ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from figures import Table, describe_machine, write_json
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import engine as ours

NUM_UNITS = 100
SIZES = (8, 64, 1024)
TURNS = 3

Shard = Callable[[nn.Module], nn.Module]


def wrapped(model: nn.Module) -> nn.Module:
    return ours.FullyShardedDataParallel(model, auto_wrap_policy=is_linear)


def is_linear(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, nn.Linear)


def composed(front: Callable[[nn.Module], object]) -> Shard:
    def shard(model: nn.Module) -> nn.Module:
        for layer in model.children():
            front(layer)
        front(model)
        return model

    return shard


FRONTS: dict[str, Shard] = {
    "FullyShardedDataParallel": wrapped,
    "fully_shard": composed(ours.fully_shard),
    "torch's fully_shard": composed(torch.distributed.fsdp.fully_shard),
}


def seconds(shard: Shard) -> tuple[float, float]:
    """Return the CPU seconds of construction and of one step."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(NUM_UNITS)))
    begun = time.process_time()
    model = shard(layers)
    made = time.process_time()
    model(torch.ones(2, 64)).sum().backward()
    return made - begun, time.process_time() - made


def row(name: str, size: int, found: Sequence[tuple[float, float]]) -> list[str]:
    made, step = (statistics.median(each) for each in zip(*found, strict=True))
    return [name, f"{size:,}", f"{made:.2f} s", f"{step:.2f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for all samples")
    options, machine = parser.parse_args(), describe_machine()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(TURNS + 1):
        for size in SIZES:
            dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
            for name, shard in FRONTS.items():
                found.setdefault((name, size), []).append(seconds(shard))
            dist.destroy_process_group()
    measured = {key: turns[1:] for key, turns in found.items()}  # the first one imports and compiles
    rows = [row(name, size, turns) for (name, size), turns in sorted(measured.items())]
    table = Table([f"CPU seconds for {NUM_UNITS} units", "ranks", "construction", "a step"], rows)
    print(table)
    print(machine)
    samples = {f"{name} at {size}": turns for (name, size), turns in measured.items()}
    write_json(options.json, machine, {"all": table}, samples)


if __name__ == "__main__":
    main()
