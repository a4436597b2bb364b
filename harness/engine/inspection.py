"""What a unit shows of itself, read without touching memory that comes and goes. Runs on ranks."""

from collections.abc import Mapping

from torch import nn

from harness.engine.api import GroupInfo
from harness.engine.param import joined
from harness.engine.param_group import ParamGroup
from harness.engine.unit import Unit


def describe(unit: Unit) -> str:
    """Return one line on how ``unit`` shards: strategy, dtypes, local and full numel, state."""
    strategy = unit.settings.strategy.name
    if unit.group is None:
        return f"{strategy}, no parameters of its own"
    shard, layout = unit.group.shard, unit.group.shard.layout
    return (
        f"{strategy}, {unit.group.state.name}, numel={layout.shard_numel}/{layout.padded_numel}, "
        f"dtype={shard.original_dtype}, compute={shard.dtypes.compute}, reduce={shard.dtypes.reduce}"
        + (", offloaded" if unit.group.settings.offload_device else "")
    )


def info(name: str, group: ParamGroup, training: bool, names: Mapping[nn.Module, str]) -> GroupInfo:
    """Return a snapshot of the group of the unit that is called ``name`` in its model.

    ``names``: of the model's modules.
    """
    shard, layout = group.shard, group.shard.layout
    gradients = group.gradients.visible()
    return GroupInfo(
        name=name,
        parameters=tuple(joined(names[e.refs[0].module], e.refs[0].name) for e in shard.params),
        state=group.state,
        sharding_strategy=group.settings.strategy,
        original_dtype=shard.original_dtype,
        compute_dtype=shard.dtypes.compute,
        reduce_dtype=shard.dtypes.reduce,
        flat_dtype=shard.flat.dtype,
        gradient_dtype=gradients[0].dtype if gradients else None,
        post_backward_hooks=tuple(len(leaf._post_accumulate_grad_hooks or ()) for leaf in group.leaves),
        local_numel=layout.shard_numel,
        full_numel=layout.padded_numel,
        padding=layout.padding,
        local_bytes=shard.flat.numel() * shard.flat.itemsize,
        gathered_bytes=group.gathered_bytes,
        low_precision_bytes=group.low_precision_bytes,
        training=training,
    )
