"""Each bug on each of its layouts, on warm ranks; what is found goes to the file of $LAYOUT_BUGS_LOG."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bug import Bug
from files import all_bugs, find, planted, right_plans, sizes_of
from torch.distributed.tensor import DTensor

from lockstep.assertions.parity import sgd_with_momentum
from lockstep.layouts import Layout, ShardMap, assert_same_as_unsharded, keep_labels

USUAL = ("loss", "norm", "gradients")
"""What usual tests compare."""


def shards_of(bug: Bug) -> ShardMap:
    plan = find(bug.plan)
    return find(bug.shards) if bug.shards else getattr(plan, "shards", ShardMap())


@cache
def unsharded(model: str) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """Return loss, norm and gradients of each step of an unsharded model."""
    module = model.partition(".")[0]
    made, steps = find(model)(), []
    optimizer = sgd_with_momentum(made.parameters())
    for batch in find(f"{module}.BATCHES"):
        optimizer.zero_grad()
        loss = find(f"{module}.loss")(made, batch)
        loss.backward()
        gradients = {name: each.grad.clone() for name, each in made.named_parameters()}
        norm = torch.stack([each.norm() for each in gradients.values()]).norm()
        steps.append((float(loss), float(norm), gradients))
        optimizer.step()
    return steps


@dataclass
class Watched:
    """A trainer, with the largest differences that a usual test would see, by what differs."""

    trainer: Any
    layout: Layout
    bug: Bug
    seen: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USUAL, 0.0))
    step_number: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def __call__(self, batch: Any, microbatches: int) -> Any:
        found = self.trainer(batch, microbatches)
        loss, norm, gradients = unsharded(self.bug.model)[self.step_number]
        self.step_number += 1
        if found is not None:
            self.see("loss", abs(float(found) / loss - 1))
        if hasattr(self.trainer, "grad_norm"):
            self.see("norm", abs(float(self.trainer.grad_norm()) / norm - 1))
        shards, model = shards_of(self.bug), getattr(self.trainer.model, "module", self.trainer.model)
        for own, each in model.named_parameters():
            if each.grad is None:  # as tests do
                continue
            name = shards.name(own, self.layout)
            if isinstance(each.grad, DTensor):
                self.see("gradients", (each.grad.full_tensor() - gradients[name]).abs().max())
            else:
                part = shards.cut(name, gradients[name], self.layout)
                self.see("gradients", (each.grad - part).abs().max())
        return found

    def see(self, what: str, difference: Any) -> None:
        self.seen[what] = max(self.seen[what], float(torch.as_tensor(difference).nan_to_num(float("inf"))))


def run(layout: Layout, bug: Bug) -> None:
    """Hold a plan with a bug to the unsharded model, and log the report."""
    module = bug.model.split(".")[0]
    build, loss, batches, terms = (find(f"{module}.{name}") for name in ("build", "loss", "BATCHES", "TERMS"))
    build, watched, report = find(bug.model), [], ""

    def parallelize(_: torch.nn.Module, layout: Layout) -> Watched:
        with planted(bug):
            trainer = Watched(find(bug.plan)(find(bug.model)(), layout), layout, bug)
        watched.append(trainer)
        return trainer

    given = {"shards": shards_of(bug), "microbatches": bug.microbatches, "parts": keep_labels, "terms": terms}
    try:
        assert_same_as_unsharded(layout, build, parallelize, batches, loss, **given)
    except AssertionError as error:
        report = str(error)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, watched[0].seen)
    if layout.rank == 0:
        largest = {what: max(each[what] for each in seen) for what in USUAL}
        entry = {"bug": bug.name, "layout": layout.name, "report": report, "differences": largest}
        with open(os.environ["LAYOUT_BUGS_LOG"], "a") as log:
            log.write(f"{json.dumps(entry)}\n")


def collect() -> dict[str, Any]:
    """Return a test for each layout; of bugs that hang one of their own, with a short timeout."""
    only, bugs = os.environ.get("LAYOUT_BUGS_ONLY", ""), all_bugs()
    wanted = [bug for bug in bugs if only in bug.name]
    of_layouts: dict[tuple[str, bool], list[Bug]] = {}
    for bug in (*wanted, *right_plans(wanted)):
        for layout in bug.layouts.split():
            of_layouts.setdefault((layout, bool(bug.hangs)), []).append(bug)
    made = {}
    for (layout, is_hang), here in of_layouts.items():
        test = pytest.mark.parametrize("bug", here, ids=[bug.name for bug in here])(make_test())
        test = pytest.mark.layouts(
            **{axis: (size,) for axis, size in sizes_of(layout).items()}, timeout=8 if is_hang else 60
        )(test)
        made[f"test_{layout.replace('-', '_')}{'_hang' * is_hang}"] = test
    return made


def make_test() -> Any:
    def test(layout: Layout, bug: Bug) -> None:
        run(layout, bug)

    return test


globals().update(collect())
