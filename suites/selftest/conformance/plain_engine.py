"""The adapter of `zero3`, which offers shards and mixed precision and no look inside; and with faults.

Each fault is one that a real engine had, and one that no error announces.
"""

import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from zero3 import Dtypes, Shard, Unit, zero3

from lockstep.conformance import Adapter, Capability, Precision
from lockstep.conformance.spec import chosen_modules


class Zero3(Adapter):
    name = "zero3"
    capabilities = frozenset(
        {
            Capability.SHARDING,
            Capability.MIXED_PRECISION,
            Capability.CLIPPING,
            Capability.GRAD_SCALER,
            Capability.OPTIMIZER_STATE,
        }
    )
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


# Faults


class StaleInEval(Zero3):
    """Weights that an evaluation gathered are kept for the next one, over a step."""

    class unit_class(Unit):
        kept = None

        def gather(self):
            if self.module.training or torch.is_grad_enabled():
                return super().gather()
            self.kept = self.kept or super().gather()
            return self.kept


class SumsGradients(Zero3):
    """Gradients are summed over ranks, and not divided."""

    class shard_class(Shard):
        def reduce(self, gradient):
            return super().reduce(gradient) * self.ranks


class LosesTheRest(Zero3):
    """The rest of a parameter that does not divide by the ranks gets no gradient."""

    class shard_class(Shard):
        def reduce(self, gradient):
            whole = gradient.numel() // self.ranks * self.ranks
            flat = gradient.to_dense().flatten().clone()
            flat[whole:] = 0
            return super().reduce(flat)


class TakesTheNeighboursSlice(Zero3):
    """Each rank keeps the piece of the gradient that belongs to the next one."""

    class shard_class(Shard):
        def reduce(self, gradient):
            flat = self.padded(gradient.to_dense())
            return super().reduce(flat.roll(-(flat.numel() // self.ranks)))


class ReducesInParamDtype(Zero3):
    """`reduce_dtype` is ignored: gradients are reduced in the dtype of the computation, and cast then."""

    class shard_class(Shard):
        def __init__(self, parameter, group, dtypes):
            super().__init__(parameter, group, replace(dtypes, reduce=dtypes.param))


class ForgetsTheFirstBackward(Zero3):
    """A second backward replaces the gradient of the first, where it should add to it."""

    class shard_class(Shard):
        def reduce(self, gradient):
            self.slice.grad = None
            return super().reduce(gradient)


class ClipsByItsOwnNorm(Zero3):
    """Each rank takes the norm of its own slices."""

    def over_ranks(self, norm, norm_type):
        return norm


class SkipsAlone(Zero3):
    """A rank that finds an inf skips the step, and the others take it."""

    def grad_scaler(self, model, *, process_group=None, **settings):
        return torch.amp.GradScaler(next(model.parameters()).device.type, **settings)
