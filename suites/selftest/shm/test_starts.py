"""Programs without pytest: torchrun, spawned and forked processes, each kind of store."""

from __future__ import annotations

import os
import re
from pathlib import Path

import lockstep.shm
from suites.selftest.shared_memory import left_in_shared_memory, names_in_shared_memory
from suites.selftest.warm_pytest import run_module

PROGRAMS = Path(__file__).parents[1] / "projects" / "shm"


def environment() -> dict[str, str]:
    """Return that of a program: pytest's import mode does not put the root of the repository on the path."""
    return {**os.environ, "PYTHONPATH": str(Path(lockstep.shm.__file__).parents[2])}


def test_torchrun_with_a_plain_script() -> None:
    options = ("--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=0")
    program = ("--standalone", *options, str(PROGRAMS / "train.py"))
    done = run_module("torch.distributed.run", *program, cwd=PROGRAMS, environ=environment())
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 2: [[1.5, 1.5]]",
        "rank 1 of 2: [[1.5, 1.5]]",
    ]


def test_forked_and_spawned_ranks_on_each_store(tmp_path: Path) -> None:
    methods = ("fork:file", "fork:tcp", "fork:prefix", "spawn:file")
    done = run_module("starts", str(tmp_path), *methods, cwd=PROGRAMS)
    assert done.returncode == 0, done.stderr
    expected = "200000.0 [0, 1], left [], []"
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{method} rank {rank}: {expected}" for method in methods for rank in range(2)
    )


def test_a_rank_alone_on_a_hash_store(tmp_path: Path) -> None:
    code = (
        "import torch, torch.distributed as dist, lockstep.shm\n"
        "dist.init_process_group('shm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(tensor := torch.ones(2))\n"
        "print(tensor.tolist(), dist.get_backend(), dist.get_backend_config())\n"
        "dist.destroy_process_group()\n"
    )
    (tmp_path / "alone.py").write_text(code)
    done = run_module("alone", cwd=tmp_path, environ=environment())
    assert (done.stdout, done.stderr) == ("[1.0, 1.0] shm cpu:shm\n", "")


def test_a_killed_rank_is_named_by_the_rank_that_waits(tmp_path: Path) -> None:
    before = names_in_shared_memory()
    ways = ("all_reduce", "future", "recv", "recv from any", "send", "future of a receive")
    done = run_module("deaths", str(tmp_path), *ways, cwd=PROGRAMS)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(ways)
    for line in lines:
        assert re.search(r"rank 1 \(pid \d+\) of group 0 is gone|all peers of group 0 are gone", line), line
    assert left_in_shared_memory(before) == []
