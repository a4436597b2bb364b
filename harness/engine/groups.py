"""All groups of a model, whichever front made them, as they are now. Runs on ranks."""

from torch import nn

from harness.engine import inspection
from harness.engine.api import GroupInfo
from harness.engine.fsdp_module import FSDPModule
from harness.engine.param import clean_name
from harness.engine.unit import Unit
from harness.engine.wrapper import FullyShardedDataParallel


def groups(model: nn.Module) -> tuple[GroupInfo, ...]:
    """Show all groups of ``model``, outer before inner; one of several modules has the name of the first."""
    names = {module: clean_name(name) for name, module in model.named_modules()}
    found: dict[Unit, nn.Module] = {}
    for module in names:
        if isinstance(module, FullyShardedDataParallel):
            found[module._unit] = module
        elif isinstance(module, FSDPModule):
            found.setdefault(module._composed_unit, module)
    return tuple(
        inspection.info(names[module], unit.group, module.training, names)
        for unit, module in found.items()
        if unit.group
    )
