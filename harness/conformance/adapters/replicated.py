"""A base for adapters of engines that shard no parameters. Inside a rank; imports torch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.conformance.adapters.adapter import Adapter
from lockstep.conformance.capabilities import Capability


class Replicated(Adapter):
    """An engine where each rank holds the whole model, in plain tensors under their own names.

    A subclass has a `name` and a method `shard`, which begins with `check`. Full parameters, gradients and
    state, clipping and the gradient scaler follow from whole parameters with the same gradients on all ranks.
    """

    capabilities = frozenset(
        {
            Capability.REPLICATION,
            Capability.PLAIN_PARAMETERS,
            Capability.OUTSIDE_READS,
            Capability.CLIPPING,
            Capability.GRAD_SCALER,
            Capability.OPTIMIZER_STATE,
        }
    )

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.unwrapped(model).named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        gradients = {name: p.grad for name, p in self.unwrapped(model).named_parameters()}
        # One that is sparse is a gradient of all elements, too.
        return {n: None if g is None else g.detach().to_dense().clone() for n, g in gradients.items()}

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        return self.unwrapped(model).state_dict()

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def grad_scaler(
        self, model: nn.Module, *, process_group: object = None, **settings: Any
    ) -> torch.amp.GradScaler:
        # Gradients are the same on all ranks, and so is what a scaler finds in them.
        return torch.amp.GradScaler(next(model.parameters()).device.type, **settings)
