"""Pipelines that hang: the report says so, with the ranks, what they wait in, and for whom."""

from __future__ import annotations

import re

import pytest

from suites.selftest.project import Project

TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch import nn
from lockstep.layouts import ShardMap, assert_same_as_unsharded

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()

def loss(model, batch):
    return model(batch).square().mean()

class Stage:
    def __init__(self, model, layout):
        self.at = layout.at("pp")
        self.model = nn.Sequential(model[self.at])

    def run(self, batch, microbatches):
        for part in batch.chunk(microbatches):
            if self.at == 0:
                sent = self.model(part)
                self.send(sent.detach())
                sent.backward(self.receive(sent))
            else:
                received = self.receive(part).requires_grad_()
                loss = self.model(received).square().mean() / microbatches
                loss.backward()
                self.send(received.grad)

    __call__ = run

    def send(self, tensor):
        dist.send(tensor, 1 - self.at)

    def receive(self, like):
        found = torch.empty_like(like)
        dist.recv(found, 1 - self.at)
        return found

class WrongOrder(Stage):
    def __call__(self, batch, microbatches):
        if self.at == 0:
            self.receive(batch)
        self.run(batch, microbatches)

class AsManyAsStages(Stage):
    def __call__(self, batch, microbatches):
        self.run(batch, microbatches)
        if self.at:
            self.run(batch, 1)

@pytest.mark.parametrize("plan", [WrongOrder, AsManyAsStages])
@pytest.mark.layouts(pp=(1, 2), timeout=6)
def test_plan(layout, plan):
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(12, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    rename = ShardMap(rename=lambda name, layout: name.replace("0.", f"{layout.at('pp')}."))
    arguments = (layout, build, plan, batches, loss)
    assert_same_as_unsharded(*arguments, shards=rename, microbatches=(1, 1, 1))
"""


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    (shared_project.path / "test_sample.py").write_text(TESTS)
    shared_project.write_ini("")
    return shared_project.run("-v")


def test_receives_on_both_sides_are_a_deadlock(output: str) -> None:
    both = [
        f"rank {rank} waits to receive float64 [12, 4] from rank {1 - rank} (recv at test_sample.py:39)"
        for rank in (0, 1)
    ]
    assert f"deadlock: {'; '.join(both)}" in output.splitlines()


def test_fewer_microbatches_than_stages_are_a_hang(output: str) -> None:
    report = output.partition("_ test_plan[pp2-AsManyAsStages] _")[2]
    where = r"which rank 1 never reached: it waits to receive .* from rank 0 \(recv at test_sample.py:39\)"
    assert re.search(rf"rank 0 waits in all_reduce #2 \(long \[\d+\]\), {where}", report), report
    end = r"rank 1 of 2 (timed out after 6 s|killed by the harness after [\d.]+ s), in recv at"
    assert re.search(end, report), report
