"""The adapter of torch's `DistributedDataParallel`: every rank holds the model in full. Inside a rank."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness.adapters.capabilities import Capability, NotOffered, require
from harness.adapters.composed import asked
from harness.adapters.face import Composable, Group, Traffic
from harness.adapters.spec import ShardSpec, chosen_modules
from harness.recorders import Collective

__all__ = ["TorchDdp"]


class TorchDdp:
    """Replicas: of the strategies NO_SHARD alone; units are accepted, and gradients go in torch's buckets."""

    name = "torch-ddp"
    capabilities = frozenset(
        {Capability.SYNC_STATES, Capability.UNSYNCED_GRADIENTS, Capability.PLAIN_PARAMETERS}
    )

    @property
    def composable(self) -> Composable:
        raise NotOffered(self.name, Capability.COMPOSABLE)

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        require(self, *asked(spec))
        if spec.device is not None:
            model.to(spec.device)
        wanted = (*spec.units, *spec.unit_groups, *spec.unit_precisions)
        chosen_modules(model, wanted, "units")
        ignored = chosen_modules(model, spec.ignored, "ignored")
        names = [f"{n}.{p}" for n, m in model.named_modules() if m in ignored for p in m.state_dict()]
        # torch's own way to leave parts of a model alone; it has no public name.
        leave_alone: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        leave_alone(model, names)
        return DistributedDataParallel(model, process_group=spec.process_group)

    def bare(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = model.no_sync()
        return context

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def groups(self, model: nn.Module) -> Sequence[Group]:
        raise NotOffered(self.name, Capability.GROUPS)

    def pre_backward_hooks(self, output: Tensor) -> int:
        raise NotOffered(self.name, Capability.HOOKS)

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.bare(model).named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        gradients = {name: p.grad for name, p in self.bare(model).named_parameters()}
        return {name: None if g is None else g.clone() for name, g in gradients.items()}

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self.bare(model).state_dict()

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        raise NotOffered(self.name, Capability.SUMMON)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        raise NotOffered(self.name, Capability.TRAFFIC)

    def grad_scaler(
        self, model: nn.Module, *, process_group: object = None, **settings: Any
    ) -> torch.amp.GradScaler:
        # Gradients are the same on all ranks, and so is what a scaler finds in them.
        return torch.amp.GradScaler("cpu" if not torch.cuda.is_available() else "cuda", **settings)
