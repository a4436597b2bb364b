"""The states of a group: the table of transitions is what the group does."""

from itertools import product

import pytest
import torch
from torch import nn

from lockstep.engine import FullyShardedDataParallel, GroupState, fully_shard
from lockstep.engine.param_group import TRANSITIONS

pytestmark = pytest.mark.ranks(2)

VERBS = {
    "prefetch": lambda group: group.prefetch(),
    "unshard": lambda group: group.unshard(),
    "retain": lambda group: group.retain(),
    "reshard": lambda group: group.reshard(),
    "reshard_to": lambda group: group.reshard_to(group.config.mesh.shard),
    "summon": lambda group: group.summon(torch.zeros(group.shard.layout.padded_numel), None),
    "end_summon": lambda group: group.end_summon(writeback=False),
}


def wrapped():
    return FullyShardedDataParallel(nn.Linear(3, 2))._unit.group


def composed():
    return fully_shard(nn.Linear(3, 2))._composed_unit.group


def lead_to(group, state):
    """Bring `group` from between steps to `state` by verbs alone."""
    if state is not group.state:
        before, verb = next(pair for pair, after in TRANSITIONS.items() if after is state)
        lead_to(group, before)
        VERBS[verb](group)
    assert group.state is state


def test_the_table_names_all_verbs_and_states():
    assert {verb for _, verb in TRANSITIONS} == set(VERBS)
    assert {state for state, _ in TRANSITIONS} == set(TRANSITIONS.values()) == set(GroupState)


@pytest.mark.parametrize("make", [wrapped, composed])
def test_each_verb_leads_where_the_table_says_and_else_nowhere(world, make):
    for state, verb in product(GroupState, VERBS):
        group = make()
        lead_to(group, state)
        if (state, verb) == (GroupState.SUMMONED, "unshard"):
            with pytest.raises(RuntimeError, match="leave it first"):
                VERBS[verb](group)
        else:
            VERBS[verb](group)
        assert group.state is TRANSITIONS.get((state, verb), state), (state, verb)


@pytest.mark.parametrize("make", [wrapped, composed])
def test_values_survive_every_way_to_resharding_and_back(world, make):
    group = make()
    group.unshard()
    values = [leaf.clone() for leaf in group.leaves]
    for state in (s for s, verb in TRANSITIONS if verb == "unshard"):
        group.reshard()
        lead_to(group, state)
        group.unshard()
        assert all(map(torch.equal, group.leaves, values)), state


def test_what_is_freed_is_nan_to_a_late_reader(world, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")
    bare, seen = nn.Sequential(FullyShardedDataParallel(nn.Linear(3, 2))), []
    bare[0].module.register_forward_hook(lambda layer, *_: seen.append(layer.weight.detach()))
    model = FullyShardedDataParallel(bare)
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert seen[0].isnan().all()
