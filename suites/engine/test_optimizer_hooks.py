"""The hooks that torch calls for every optimizer of the process: registered while there are units."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.engine import FullyShardedDataParallel, fully_shard

def count():
    gc.collect()
    return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)

counts = [count()]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
make = {"wrapper": FullyShardedDataParallel, "fully_shard": fully_shard}[FRONT]
first = make(nn.Sequential(make(nn.Linear(2, 2)), nn.Linear(2, 2)))
counts.append(count())
second = make(nn.Linear(2, 2))
counts.append(count())
del first
counts.append(count())
"""


def run(front: str, rest: str) -> str:
    code = f"FRONT = {front!r}\n{PROGRAM}\n{rest}"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_they_come_with_the_first_unit_and_go_with_the_last(front):
    found = run(front, "del second\ncounts.append(count())\nprint(counts)")
    assert found == "[(0, 0), (1, 1), (1, 1), (1, 1), (0, 0)]"


@pytest.mark.parametrize("front", ["wrapper", "fully_shard"])
def test_a_model_collected_in_a_step_hook_does_not_break_the_step(front):
    found = run(
        front,
        """
def last_model_dies(*_):
    global second
    second = None
    gc.collect()

optimizer.register_optimizer_step_pre_hook(last_model_dies)
optimizer.register_optimizer_step_post_hook(last_model_dies)
plain = nn.Linear(2, 2)
stepping = torch.optim.SGD(plain.parameters(), lr=0.1)
plain(torch.ones(2)).sum().backward()
stepping.step()
third = make(nn.Linear(2, 2))
before = count()
del third
print(before, count())
""",
    )
    assert found == "(2, 2) (1, 1)"
