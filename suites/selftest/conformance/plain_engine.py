"""The adapter of `zero3`, which offers shards and mixed precision and no look inside; and with faults.

Each fault is one that a real engine had, and one that no error announces.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from zero3 import Dtypes, Shard, Unit, zero3

from harness.conformance import Capability, Precision, Replicated
from harness.conformance.spec import chosen_modules


class Zero3(Replicated):
    name = "zero3"
    capabilities = frozenset({Capability.SHARDING, Capability.MIXED_PRECISION})
    shard_class, unit_class = Shard, Unit

    def shard(self, model, spec):
        self.check(spec)
        if spec.device is not None:
            model.to(spec.device)
        units = chosen_modules(model, spec.units, "units") - {model}
        ignored = chosen_modules(model, spec.ignored, "ignored")
        p = spec.precision or Precision()
        dtypes = Dtypes(
            p.param_dtype,
            p.reduce_dtype or p.param_dtype,
            p.cast_root_forward_inputs,
            p.cast_forward_inputs,
        )
        classes = {"shard_class": self.shard_class, "unit_class": self.unit_class}
        return zero3(model, units, ignored, spec.process_group, dtypes, **classes)

    def full(self, tensor, parameter):
        sharded = tensor is not None and hasattr(parameter, "shard")
        return parameter.shard.gather(tensor) if sharded else tensor

    def full_parameters(self, model):
        return {name: self.full(p.detach(), p).clone() for name, p in model.named_parameters()}

    def full_gradients(self, model):
        return {name: self.full(p.grad, p) for name, p in model.named_parameters()}

    def full_state(self, model):
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return {name: self.full(tensor, parameters.get(name)) for name, tensor in model.state_dict().items()}

    def clip_grad_norm_(self, model, max_norm, norm_type=2.0):
        parameters = [p for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
        norm = self.over_ranks(norm, norm_type)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def over_ranks(self, norm, norm_type):
        if norm_type == float("inf"):
            dist.all_reduce(norm, dist.ReduceOp.MAX)
            return norm
        total = norm**norm_type
        dist.all_reduce(total)
        return total ** (1 / norm_type)

    def grad_scaler(self, model, *, process_group=None, **settings):
        return Scaler(process_group, device=next(model.parameters()).device.type, **settings)


class Scaler(torch.amp.GradScaler):
    """All ranks skip a step, or none."""

    def __init__(self, group, **settings):
        super().__init__(**settings)
        self.group = group

    def _unscale_grads_(self, optimizer, *args):
        found = super()._unscale_grads_(optimizer, *args)
        for flag in found.values():
            dist.all_reduce(flag, group=self.group)
        return found


class Warns(Zero3):
    """Uses something that is deprecated."""

    def shard(self, model, spec):
        warnings.warn("old_name is deprecated\nand more", FutureWarning, stacklevel=2)
        return super().shard(model, spec)
