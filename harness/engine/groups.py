"""All groups of a model, whichever front made them, as they are now. Runs on ranks."""

from collections.abc import Mapping

from torch import nn

from lockstep.engine.api import GroupInfo
from lockstep.engine.fsdp_module import FSDPModule
from lockstep.engine.param import joined
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.torch_internals import gradient_hooks
from lockstep.engine.unit import Unit
from lockstep.engine.wrapper import FullyShardedDataParallel


def groups(model: nn.Module) -> tuple[GroupInfo, ...]:
    """Return a snapshot of each group of `model`, outer before inner.

    A group of several modules has the name of the first.
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[Unit, nn.Module] = {}
    for module in names:
        if isinstance(module, FullyShardedDataParallel):
            found[module._unit] = module
        elif isinstance(module, FSDPModule):
            found.setdefault(module._composed_unit, module)
    return tuple(_info(unit.group, module, names) for unit, module in found.items() if unit.group)


def _info(group: ParamGroup, module: nn.Module, names: Mapping[nn.Module, str]) -> GroupInfo:
    """Return a snapshot of `group`, named after `module`, without touching memory that comes and goes."""
    shard, layout, dtypes = group.shard, group.shard.layout, group.dtypes
    gradients = group.gradients.visible()
    return GroupInfo(
        name=names[module],
        parameters=tuple(joined(names[p.refs[0].module], p.refs[0].name) for p in shard.params),
        state=group.state,
        sharding_strategy=group.config.strategy,
        original_dtype=shard.flat.dtype,
        compute_dtype=dtypes.compute,
        reduce_dtype=dtypes.reduce,
        flat_dtype=shard.flat.dtype,
        gradient_dtype=gradients[0].dtype if gradients else None,
        post_backward_hooks=tuple(len(gradient_hooks(leaf) or ()) for leaf in group.leaves),
        local_numel=layout.shard_numel,
        full_numel=layout.padded_numel,
        padding=layout.padding,
        local_bytes=shard.flat.numel() * shard.flat.itemsize,
        gathered_bytes=group.unsharded_bytes,
        low_precision_bytes=group.low_precision_bytes,
        training=module.training,
    )
