"""Groups under any legal order of a user's actions: values are fresh, whole and counted once."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, ShardSpec, offers
from lockstep.conformance.models.strategies import trees

SETTINGS = settings(stateful_step_count=30)  # of the profile under which this is imported
STRATEGIES = st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
OPTIONS = {
    "use_orig_params": st.just(True),
    "forward_prefetch": st.just(True),
}


class Life(RuleBasedStateMachine):
    """A sharded model and the same one unsharded, whose gradients are averaged by hand.

    `pending`: losses of both whose backward has not come. `unsynced`: gradients of the bare model that
    only this rank knows. `is_synced`: whether gradients may have the shape of shards, zeros too.
    `is_clean`: whether nothing can be left of a forward whose backward will not come.
    """

    def __init__(self, world, engine, offered):
        super().__init__()
        self.world, self.engine, self.offered = world, engine, offered
        self.pending, self.unsynced, self.number = [], {}, 0
        self.is_synced = self.is_clean = True

    @initialize(
        tree=trees(max_parts=4), options=st.fixed_dictionaries({"strategy": STRATEGIES}, optional=OPTIONS)
    )
    def shard(self, tree, options):
        tree, options = self.offered(tree, options)
        if tree.has_mixed_groups():
            options["use_orig_params"] = True
        self.tree = tree
        self.bare = tree.build().to(self.world.device)
        self.model = self.engine.shard(
            copy.deepcopy(self.bare), ShardSpec(units=tree.units, device=self.world.device, **options)
        )
        sgd = partial(torch.optim.SGD, lr=0.1)
        self.optimizers = [sgd(self.bare.parameters()), self.engine.optimizer(self.model, sgd)]

    def batch(self):
        self.number += 1
        generator = torch.Generator().manual_seed(100 * self.number + self.world.rank)
        return self.tree.batch(generator).to(self.world.device)

    def at_rest(self):
        return not self.pending

    def all_synced(self):
        return not self.pending and self.is_synced

    @precondition(lambda self: len(self.pending) < 3)
    @rule()
    def forward(self):
        x = self.batch()
        losses = [self.tree.loss(module(x, self.number)) for module in (self.bare, self.model)]
        assert torch.equal(*losses)
        self.pending.append(losses)
        self.is_clean = True

    @precondition(lambda self: self.pending)
    @rule(index=st.integers(0, 2), sync=st.booleans(), twice=st.booleans())
    def backward(self, index=0, sync=True, twice=False):
        of_bare, of_model = self.pending.pop(index % len(self.pending))
        sync = sync or not offers(self.engine, Capability.NO_SYNC)
        for retain_graph in (True, False) if twice else (False,):
            self.of_bare_alone(of_bare, retain_graph, sync)
            with nullcontext() if sync else self.engine.no_sync(self.model):
                self.engine.backward(self.model, of_model, retain_graph=retain_graph)
        self.is_synced = sync

    def of_bare_alone(self, of_bare, retain_graph, sync):
        synced = {name: p.grad for name, p in self.bare.named_parameters()}
        self.bare.zero_grad()
        of_bare.backward(retain_graph=retain_graph)
        for name, p in self.bare.named_parameters():
            if p.grad is not None:
                self.unsynced[name] = p.grad + self.unsynced.get(name, 0)
            p.grad = synced[name]
            if sync and name in self.unsynced:
                mean = self.unsynced.pop(name)
                dist.all_reduce(mean)
                mean /= self.world.size
                p.grad = mean if p.grad is None else p.grad + mean

    @precondition(at_rest)
    @rule(no_sync=st.sampled_from([(False,), (True, False), (False, True, False)]), steps=st.booleans())
    def accumulate(self, no_sync, steps):
        for unsynced in no_sync:
            self.forward()
            self.backward(sync=not unsynced)
        if steps:
            self.step(after_a_forward=False)

    @precondition(lambda self: self.pending)
    @rule()
    def forget_a_loss(self):
        self.pending.pop()
        self.is_clean = False

    @rule(mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
    def evaluate(self, mode):
        x = self.batch()
        with mode():
            assert torch.equal(self.bare.eval()(x, self.number), self.model.eval()(x, self.number))
        self.bare.train(), self.model.train()

    @precondition(all_synced)
    @rule(after_a_forward=st.booleans())
    def step(self, after_a_forward):
        if after_a_forward:
            self.forward()
            self.forget_a_loss()
        for optimizer in self.optimizers:
            optimizer.step()

    @precondition(at_rest)
    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        if not (self.is_synced or offers(self.engine, Capability.UNSYNCED_GRADIENTS)):
            return  # it would not see them
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        self.unsynced = {}
        self.is_synced = self.is_synced or set_to_none

    @precondition(at_rest)
    @rule()
    def change_summoned(self):
        if not offers(self.engine, Capability.SUMMON):
            return
        with self.engine.summon(self.model, writeback=True), torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            for parameter in self.bare.parameters():
                parameter.mul_(0.5)

    @rule()
    def compute_while_summoned(self):
        """Go forward, or backward if there is a loss; both are refused."""
        if not offers(self.engine, Capability.SUMMON):
            return
        refused = pytest.raises(RuntimeError, match="inside summon_full_params")
        with self.engine.summon(self.model), refused:
            if self.pending:
                self.is_clean = False
                self.engine.backward(self.model, self.pending.pop()[1])
            else:
                self.model(self.batch(), self.number)

    @precondition(at_rest)
    @rule()
    def save_and_load(self):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    @rule(what=st.sampled_from(["state", "parameters", "gradients"]))
    def look_at(self, what):
        if what == "gradients" and not self.all_synced():
            return
        own = dict(self.bare.named_parameters())
        expected = {
            "state": self.bare.state_dict(),
            "parameters": own,
            "gradients": self.without_none({name: p.grad for name, p in own.items()}),
        }
        actual = self.without_none(getattr(self.engine, f"full_{what}")(self.model))
        assert_named_close(actual, expected[what], EXACT)

    def without_none(self, gradients):
        like = dict(self.bare.named_parameters())
        return {name: torch.zeros_like(like[name]) if g is None else g for name, g in gradients.items()}

    @invariant()
    def nothing_is_kept_at_rest(self):
        if (
            hasattr(self, "model")
            and self.at_rest()
            and self.is_clean
            and offers(self.engine, Capability.GROUPS)
        ):
            found = {(group.state.name, group.gathered_bytes) for group in self.engine.groups(self.model)}
            assert found == {("SHARDED", 0)}


@pytest.mark.ranks(1, 2)
def test_values_are_fresh_whole_and_counted_once_in_any_order(world, engine, offered):
    run_state_machine_as_test(lambda: Life(world, engine, offered), settings=SETTINGS)
