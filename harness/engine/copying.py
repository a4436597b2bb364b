"""Copies of units within their process: equal values, nothing shared but process groups. Runs on ranks."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from harness.engine.group import ShardGroup
from harness.engine.hooks import Unit
from harness.engine.parameters import Slot
from harness.engine.shard import LocalShard


def copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return a unit that drives the copies of ``unit``'s modules, which ``memo`` knows already.

    Like copies of an `nn.Module`, it starts without gradients.
    """
    group = _copy_group(unit.group, memo) if unit.group else None
    settings = replace(unit.settings, precision=deepcopy(unit.settings.precision, memo))
    copied = Unit(group, deepcopy(unit.buffers, memo), settings)
    # What is told to be gathered ahead belongs to the original.
    copied.switches = replace(unit.switches, forward_prefetch=(), backward_prefetch=())
    return copied


def _copy_group(group: ShardGroup, memo: dict[int, Any]) -> ShardGroup:
    group.shard.reclaim()
    entries = [
        replace(
            entry,
            parameter=deepcopy(entry.parameter, memo),
            slots=tuple(_copy_slot(slot, memo) for slot in entry.slots),
        )
        for entry in group.shard.entries
    ]
    settings = replace(group.settings, precision=deepcopy(group.settings.precision, memo))
    shard = LocalShard(entries, settings, flat=deepcopy(group.shard.flat, memo))
    return ShardGroup(shard, group.gradients.like(shard))


def _copy_slot(slot: Slot, memo: dict[int, Any]) -> Slot:
    return Slot(deepcopy(slot.module, memo), slot.name)
