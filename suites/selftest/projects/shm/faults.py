"""Ranks that die, run out of something, or do not belong together: prints as JSON what each rank met.

    python faults.py

Ranks are forked, and meet in a file.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import lockstep.shm
from lockstep.shm import meeting

Scenario = Callable[[int], object]


def join(rank: int, size: int, timeout: float = 20.0) -> None:
    dist.init_process_group(
        "shm",
        store=dist.FileStore("store", size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )


def error_of(call: Callable[[], object]) -> list[str]:
    """Return the class and the text of what `call` raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", "nothing was raised"]


def leave_descriptors(number: int) -> None:
    """Use up all descriptors of this process but some."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4096))
    opened = []
    try:
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for fd in opened[-number:]:
            os.close(fd)


def leave_memory(mebibytes: int) -> None:
    """Limit the address space of this process to so much more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def die() -> None:
    Path("died").write_text(f"{time.monotonic()} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)


def killed(rank: int) -> object:
    """Rank 1 is killed while the others wait for it."""
    join(rank, 3)
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)
        die()
    error = error_of(dist.barrier)
    died, pid = Path("died").read_text().split()
    return [*error, int(pid), time.monotonic() - float(died)]


def killed_after_its_part(rank: int) -> object:
    """Rank 1 is killed when it has handed over its part, which is small: it lies in memory that all map."""
    join(rank, 2)
    tensor = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        die()
    while not Path("died").exists():
        time.sleep(0.01)
    time.sleep(0.05)
    work.wait()
    return tensor.tolist()


def all_killed(rank: int) -> object:
    """All ranks are killed with memory in use."""
    join(rank, 2)
    tensor = torch.ones(1 << 22)
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def exits_early(rank: int) -> object:
    """Rank 0 returns, without destroying the group, before rank 1 has read its part."""
    join(rank, 2)
    tensor = torch.full((1 << 20,), rank + 1.0)
    if rank == 1:
        work = dist.broadcast(tensor, 0, async_op=True)
        time.sleep(0.3)
        work.wait()
    else:
        dist.broadcast(tensor, 0)
    return float(tensor.sum())


def too_few_descriptors(rank: int) -> object:
    if rank == 1:
        leave_descriptors(4)
    return error_of(lambda: join(rank, 8))


def no_descriptor_for_its_own(rank: int) -> object:
    if rank == 1:
        leave_descriptors(1)
    return error_of(lambda: join(rank, 2))


def out_of_memory(rank: int) -> object:
    """Rank 1 may not take 256 MiB more; the group works on afterwards."""
    join(rank, 2)
    tensor = torch.ones(1 << 26)
    if rank == 1:
        leave_memory(64)
    error = error_of(lambda: dist.all_reduce(tensor))
    small = torch.ones(4)
    dist.all_reduce(small)
    return [*error, small.tolist()]


def no_room_for_a_peers_memory(rank: int) -> object:
    """Rank 1 may not map the 64 MiB that rank 0 has handed over; the group works on afterwards."""
    join(rank, 2)
    tensor = torch.ones(1 << 24)
    if rank == 1:
        leave_memory(32)
    error = error_of(lambda: dist.broadcast(tensor, 0))
    small = torch.ones(4)
    dist.all_reduce(small)
    return [*error, small.tolist()]


def another_version(rank: int) -> object:
    if rank == 1:
        meeting.PROTOCOL += 1
    return error_of(lambda: join(rank, 3))


def another_torch(rank: int) -> object:
    if rank == 1:
        torch.__version__ = "2.0"
    return error_of(lambda: join(rank, 2))


def another_host(rank: int) -> object:
    if rank == 1:
        meeting.this_host = lambda: "elsewhere (boot 1)"
    return error_of(lambda: join(rank, 2))


def one_does_not_come(rank: int) -> object:
    if rank == 1:
        return None
    return error_of(lambda: join(rank, 2, timeout=0.3))


def given_back(rank: int) -> object:
    """Groups come and go: descriptors, mappings and memory are those of before."""
    join(rank, 2)

    def use() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1 << 18), group=group)
        dist.destroy_process_group(group)

    def held() -> list[int]:
        maps = Path("/proc/self/maps").read_text()
        return [len(os.listdir("/proc/self/fd")), maps.count("memfd:")]

    use()
    before = held()
    for _ in range(5):
        use()
    return [before, held()]


def forked(rank: int) -> object:
    """A child that a rank forks may not use the group, nor wait for its parent, nor end it by exiting."""
    join(rank, 2)
    tensor = torch.full((1 << 16,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, json.dumps([error_of(call) for call in (dist.barrier, work.wait)]).encode())
        sys.exit(0)
    os.waitpid(child, 0)
    work.wait()
    dist.barrier()
    return [json.loads(os.read(reader, 4096)), float(tensor.sum())]


SCENARIOS: dict[Scenario, int] = {
    killed: 3,
    killed_after_its_part: 2,
    all_killed: 2,
    exits_early: 2,
    too_few_descriptors: 8,
    no_descriptor_for_its_own: 2,
    out_of_memory: 2,
    no_room_for_a_peers_memory: 2,
    another_version: 3,
    another_torch: 2,
    another_host: 2,
    one_does_not_come: 2,
    given_back: 2,
    forked: 2,
}


OF_EXITS = (exits_early, forked)


def run(scenario: Scenario, rank: int) -> NoReturn:
    """Run a scenario on a rank, and end: as an ordinary program where it is about that.

    Elsewhere what is to be done at exit is done, too, but objects are not freed: of torch they are many.
    """
    try:
        result = scenario(rank)
    except Exception:
        result = traceback.format_exc()
    Path(f"result-{rank}").write_text(json.dumps(result))
    if scenario in OF_EXITS:
        sys.exit(0)
    atexit._run_exitfuncs()
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, list[object]] = {}
    base = Path(tempfile.mkdtemp())  # no context manager: children would leave it too
    for scenario, size in SCENARIOS.items():
        folder = base / scenario.__name__
        folder.mkdir()
        os.chdir(folder)
        children = []
        for rank in range(size):
            if not (child := os.fork()):
                run(scenario, rank)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        results = [Path(f"result-{rank}") for rank in range(size)]
        found[scenario.__name__] = [
            json.loads(path.read_text()) if path.exists() else None for path in results
        ]
    shutil.rmtree(base)
    print(json.dumps(found))


if __name__ == "__main__":
    assert lockstep.shm
    main()
