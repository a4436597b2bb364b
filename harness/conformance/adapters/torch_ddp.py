"""The adapter of torch's `DistributedDataParallel`: every rank holds the model in full. Inside a rank."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.conformance.adapters.replicated import Replicated
from lockstep.conformance.adapters.torch_internals import exclude_from_ddp
from lockstep.conformance.capabilities import Capability
from lockstep.conformance.spec import ShardSpec, chosen_modules


class TorchDdp(Replicated):
    """Replicas: of the strategies NO_SHARD alone; units are accepted, and gradients go in torch's buckets."""

    name = "torch-ddp"
    capabilities = Replicated.capabilities | {
        Capability.SYNC_STATES,
        Capability.NO_SYNC,
        Capability.UNSYNCED_GRADIENTS,
    }

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        self.check(spec)
        if spec.device is not None:
            model.to(spec.device)
        chosen_modules(model, (*spec.units, *spec.unit_groups, *spec.unit_precisions), "units")
        ignored = chosen_modules(model, spec.ignored, "ignored")
        names = [f"{n}.{p}" for n, m in model.named_modules() if m in ignored for p in m.state_dict()]
        exclude_from_ddp(model, names)
        return DistributedDataParallel(model, process_group=spec.process_group)

    def unwrapped(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = model.no_sync()
        return context
