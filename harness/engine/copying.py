"""Copies of units within their process: equal values, nothing shared but process groups. Runs on ranks."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from harness.engine.local_shard import LocalShard
from harness.engine.param import ParamRef
from harness.engine.param_group import ParamGroup
from harness.engine.unit import Unit


def copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return a unit that drives the copies of ``unit``'s modules, which ``memo`` knows already.

    Like copies of an `nn.Module`, it starts without gradients.
    """
    group = _copy_group(unit.group, memo) if unit.group else None
    settings = replace(unit.settings, precision=deepcopy(unit.settings.precision, memo))
    copied = Unit(group, deepcopy(unit.buffers, memo), settings)
    # What is told to be gathered ahead belongs to the original.
    copied.options = replace(unit.options, forward_prefetch=(), backward_prefetch=())
    return copied


def _copy_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    group.shard.reclaim()
    params = [
        replace(
            param,
            parameter=deepcopy(param.parameter, memo),
            refs=tuple(_copy_ref(ref, memo) for ref in param.refs),
        )
        for param in group.shard.params
    ]
    settings = replace(group.settings, precision=deepcopy(group.settings.precision, memo))
    shard = LocalShard(params, settings, flat=deepcopy(group.shard.flat, memo))
    return ParamGroup(shard, group.gradients.like(shard))


def _copy_ref(ref: ParamRef, memo: dict[int, Any]) -> ParamRef:
    return ParamRef(deepcopy(ref.module, memo), ref.name)
