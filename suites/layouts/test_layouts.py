"""An engine is one axis of a layout, and the others are cut by hand: all train as the unsharded model does.

The model sums by itself over the axes that are not the engine's. So the engine is given the gradients of its
own axis, and a mean over other ranks, or by another number, is wrong.
"""

import copy
import gc
import math
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.assertions.parity import sgd_with_momentum
from lockstep.conformance import Capability, require
from lockstep.conformance.models import parted
from lockstep.layouts import Layout, assert_same_as_unsharded, keep_labels, witness_batches

FROZEN_UNITS = ("blocks.0", "blocks.1", "blocks.0.experts")
BATCHES = witness_batches(vocab=11, sequences=12, tokens=6, steps=2)
ROWS = ("dp", "fsdp", "ep")  # each rank of these axes has rows of its own, each of cp a part of the sequence

FRONTS = ["FULL_SHARD-orig", "NO_SHARD-flat", "fully_shard"]
fronts = pytest.mark.parametrize("front", FRONTS, indirect=True)


@dataclass(frozen=True)
class Run:
    """The training of an engine in a layout.

    Attributes:
        axes: over which it shards or replicates, as over one.
        experts: whether experts are units of their own, over fsdp alone.
        no_sync: whether all microbatches of a step but the last are without sync.
        forwards_first: whether those of all microbatches come before the first backward.
    """

    axes: tuple[str, ...] = ("fsdp",)
    units: tuple[str, ...] = parted.PartedModel.units
    experts: bool = False
    no_sync: bool = False
    forwards_first: bool = False


class Trainer:
    """The trainer that `assert_same_as_unsharded` is given.

    DTensors say themselves which part they are. Else `model` is a copy of full parameters and gradients.
    """

    def __init__(self, front, bare, layout, run):
        self.front, self.layout, self.run = front, layout, run
        by_hand = tuple(axis for axis in ("ep", "cp") if axis not in run.axes)
        _, self.size = layout.part(run.axes)
        cuts = parted.Cuts(layout, by_hand, 1 / layout["ep"] if run.experts else 1.0)
        bare.cut(cuts)
        shown = None if front.is_composable else copy.deepcopy(bare)
        self.sharded = self.shard(bare)
        self.model = shown or self.sharded
        self.optimizer = front.optimizer(self.sharded, sgd_with_momentum)
        self.show_parameters()

    def shard(self, bare):
        front, run, layout = self.front, self.run, self.layout
        names = [name for name, _ in bare.named_modules()]
        experts = tuple(name for name in names if name.endswith("experts")) if run.experts else ()
        units = tuple(name for name in run.units if name in names)
        if run.axes == ("dp", "fsdp"):  # replicas of shards
            return front.shard(bare, units=units, mesh=layout.mesh[run.axes])
        if not front.is_composable:
            groups = {"unit_groups": dict.fromkeys(experts, layout.group("fsdp"))} if experts else {}
            group = layout.group(*run.axes)
            return front.shard(bare, units=units, process_group=group, **groups)
        bare.to(front.device)
        for name in experts:
            front(bare.get_submodule(name), mesh=layout.mesh["fsdp"])
        if len(run.axes) == 1:
            return front.shard(bare, units=units, mesh=layout.mesh[run.axes[0]])
        mesh = DeviceMesh.from_group(layout.group(*run.axes), front.device.type)
        return front.shard(bare, units=units, mesh=mesh)

    def __call__(self, batch, microbatches):
        mine = (self.layout.slice(self.layout.slice(each, ROWS), "cp", dim=1) for each in batch.values())
        pieces = list(zip(*(each.to(self.front.device).chunk(microbatches) for each in mine), strict=True))
        total = torch.zeros((), dtype=torch.float64, device=self.front.device)
        done = []
        for number, (tokens, labels) in enumerate(pieces):
            with self.sync(number == microbatches - 1):
                done.append((number, self.forward(tokens, labels, batch)))
                if not self.run.forwards_first:
                    total += self.backward(*done.pop()[1])
        for number, forward in done:
            with self.sync(number == microbatches - 1):
                total += self.backward(*forward)
        self.show_gradients()
        if self.is_inner_stage:
            return None
        return self.sum_over(total, (*ROWS, "cp"))

    @property
    def is_inner_stage(self):
        return self.layout.at("pp") < self.layout["pp"] - 1

    def sync(self, wanted):
        return self.front.no_sync(self.sharded) if self.run.no_sync and not wanted else nullcontext()

    def forward(self, tokens, labels, batch):
        """Return a scalar to go backward from, and its input; what is between stages is sent and received."""
        stage, pp = self.layout.at("pp"), self.layout["pp"] > 1 and self.layout.group("pp")
        hidden = None
        if stage:
            hidden = torch.empty(*tokens.shape, 6, dtype=torch.float64, device=tokens.device)
            dist.recv(hidden, group=pp, group_src=stage - 1)
            hidden.requires_grad_()
        output = self.sharded(tokens if hidden is None else hidden)
        if self.is_inner_stage:
            dist.send(output.detach().contiguous(), group=pp, group_dst=stage + 1)
            return output, hidden
        return parted.share(output, labels, batch), hidden

    def backward(self, output, hidden):
        """Go backward from the loss times the size of the axis, as a mean is taken; return the loss."""
        stage, pp = self.layout.at("pp"), self.layout["pp"] > 1 and self.layout.group("pp")
        if self.is_inner_stage:
            gradient = torch.empty_like(output)
            dist.recv(gradient, group=pp, group_src=stage + 1)
            self.front.backward(self.sharded, (output * gradient).sum())
            return 0.0
        self.front.backward(self.sharded, output * self.size)
        if stage:
            dist.send(hidden.grad.contiguous(), group=pp, group_dst=stage - 1)
        return output.detach()

    def sum_over(self, tensor, axes):
        if axes := [axis for axis in axes if self.layout[axis] > 1]:
            dist.all_reduce(tensor, group=self.layout.group(*axes))
        return tensor

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.show_parameters()

    def show_parameters(self):
        if self.model is self.sharded:
            return
        full = self.front.full_parameters(self.sharded)
        for name, parameter in self.model.named_parameters():
            parameter.data = full[name].cpu()

    def show_gradients(self):
        if self.model is self.sharded:
            return
        full = self.front.full_gradients(self.sharded)
        for name, parameter in self.model.named_parameters():
            parameter.grad = None if full[name] is None else full[name].cpu()


class TrainerWithNorm(Trainer):
    """Its total norm is the engine's, summed over the other axes; what those have alike counts once."""

    def grad_norm(self):
        own = self.front.clip_grad_norm_(self.sharded, math.inf).square()
        for name, gradient in self.front.full_gradients(self.sharded).items():
            copied = {"ep", "cp", "tp"} - set(self.run.axes) - parted.SHARDS.axes(name)
            if any(self.layout.at(axis) for axis in copied):
                own = own - gradient.square().sum()
        return self.sum_over(own, ("pp", "ep", "cp", "tp")).sqrt()


def hold(layout, front, run=Run(), build=parted.build, trainer=Trainer):
    """Hold training in a layout to the unsharded one: a step of three microbatches, and one of one."""

    def parallelize(bare, layout):
        return trainer(front, bare, layout, run)

    assert_same_as_unsharded(
        *(layout, build, parallelize, BATCHES, parted.loss),
        shards=parted.SHARDS,
        microbatches=(3, 1),
        parts=keep_labels,
    )


# training


@pytest.mark.layouts(pp=(1, 2), fsdp=(2,), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
@pytest.mark.parametrize("front", ["FULL_SHARD-flat", "fully_shard"], indirect=True)
def test_shards_train_as_the_unsharded_model(layout, front):
    """By themselves, and beside a pipeline, experts, a sequence or features that are cut by hand."""
    hold(layout, front)


@pytest.mark.layouts(pp=(1, 2), dp=(2,), ep=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
@pytest.mark.parametrize("front", ["NO_SHARD-flat", "replicate"], indirect=True)
def test_replicas_train_as_the_unsharded_model(layout, front):
    """By themselves, and beside the same."""
    hold(layout, front, Run(axes=("dp",)))


@pytest.mark.layouts(pp=(1, 2), fsdp=(2,))
@fronts
def test_microbatches_without_sync_wait_for_the_last_one(layout, front):
    require(front, Capability.NO_SYNC)
    hold(layout, front, Run(no_sync=True))


@pytest.mark.layouts(pp=(2,), fsdp=(2,))
@fronts
def test_a_stage_may_run_all_forwards_before_its_backwards(layout, front):
    """The schedule of GPipe."""
    hold(layout, front, Run(forwards_first=True))


@pytest.mark.layouts(fsdp=(2,), tp=(2,))
@fronts
def test_tied_weights_are_one(layout, front):
    hold(layout, front, build=parted.build_tied)


@pytest.mark.layouts(fsdp=(2,), ep=(2,))
@fronts
def test_frozen_experts_stay(layout, front):
    hold(layout, front, Run(units=FROZEN_UNITS), parted.build_frozen)


# the axis


@pytest.mark.layouts(fsdp=(2,), cp=(2,))
@fronts
def test_it_may_have_two_axes_as_one(layout, front):
    """The ranks that have other tokens, whether of other rows or of the same."""
    hold(layout, front, Run(axes=("fsdp", "cp")))


@pytest.mark.layouts(fsdp=(2,), ep=(2,))
@fronts
def test_experts_may_have_an_axis_of_their_own(layout, front):
    """All else is shared by the ranks of both, and averaged over twice as many."""
    hold(layout, front, Run(axes=("fsdp", "ep"), experts=True))


@pytest.mark.layouts(dp=(2,), fsdp=(2,))
@pytest.mark.parametrize("hybrid_front", ["HYBRID_SHARD", "fully_shard"], indirect=True)
def test_it_may_be_replicated_over_another(layout, hybrid_front):
    hold(layout, hybrid_front, Run(axes=("dp", "fsdp")))


@pytest.mark.ranks(4)
@fronts
def test_layouts_may_follow_each_other_in_one_process(world, front):
    """Its ranks are neighbours in one, and not in the other; both have their groups all the time."""
    layouts = [Layout(sizes, world.device.type) for sizes in ({"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2})]
    for layout in (*layouts, layouts[0]):
        hold(layout, front)
    for layout in layouts:
        layout.close()
    gc.collect()  # as the fixture `layout` does


@pytest.mark.layouts(fsdp=(2,), tp=(2,))
@pytest.mark.parametrize("front", ["FULL_SHARD-flat", "fully_shard"], indirect=True)
@pytest.mark.inside
def test_it_sends_to_the_ranks_of_its_axis_alone(layout, front, collectives):
    require(front, Capability.TRAFFIC)
    trainer = Trainer(front, parted.build(), layout, Run())
    trainer(BATCHES[0], 1)
    traffic = front.engine.traffic(collectives)
    assert {each.group_size for each in (*traffic.gathers, *traffic.reductions)} == {2}, collectives


# the norm


@pytest.mark.layouts(pp=(1, 2), fsdp=(2,), tp=(1, 2), at_most=4)
@fronts
def test_its_norm_is_a_part_of_the_total_one(layout, front):
    require(front, Capability.CLIPPING)
    hold(layout, front, trainer=TrainerWithNorm)
