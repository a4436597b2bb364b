"""ZeRO-3 by hand: each rank keeps a slice of every parameter; a unit gathers its own when it computes.

An engine as a newcomer writes it, which knows nothing of Lockstep: `plain_engine.py` is its adapter.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Dtypes:
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    cast_root: bool = True
    cast_units: bool = False


class Shard:
    """A parameter of which this rank keeps one slice, flat and padded."""

    def __init__(self, parameter, group, dtypes):
        self.group, self.shape, self.dtypes = group, parameter.shape, dtypes
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        own = self.padded(parameter.detach()).chunk(self.ranks)[self.rank].clone()
        self.slice = nn.Parameter(own, requires_grad=parameter.requires_grad)
        self.slice.shard = self

    def padded(self, tensor):
        size = -(-tensor.numel() // self.ranks) * self.ranks
        return nn.functional.pad(tensor.flatten(), (0, size - tensor.numel()))

    def gather(self, own):
        """Return what the ranks have slices of; a collective."""
        full = own.new_empty(own.numel() * self.ranks)
        dist.all_gather_into_tensor(full, own.contiguous(), group=self.group)
        return full[: self.shape.numel()].view(self.shape)

    def weight(self):
        own = self.slice.detach()
        return self.gather(own.to(self.dtypes.param or own.dtype))

    def reduce(self, gradient):
        """Return this rank's slice of the mean of all ranks' gradients; a collective."""
        flat = self.padded(gradient.to_dense().to(self.dtypes.reduce or gradient.dtype))
        own = flat.new_empty(flat.numel() // self.ranks)
        dist.reduce_scatter_tensor(own, flat, group=self.group)
        return own.div_(self.ranks).to(self.slice.dtype)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, shard):
        ctx.shard = shard
        return shard.weight()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.shard.reduce(gradient), None


class Unit:
    """A module that gathers its parameters for its forward; `places` are (module, name, shard)."""

    def __init__(self, module, places, casts_to):
        self.module, self.places, self.casts_to, self.running = module, places, casts_to, []
        self.shards = dict.fromkeys(shard for _, _, shard in places)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, always_call=True)
        self.show({shard: shard.slice for shard in self.shards})

    def show(self, tensors):
        for module, name, shard in self.places:
            delattr(module, name)
            setattr(module, name, tensors[shard])

    def gather(self):
        return {shard: Gather.apply(shard.slice, shard) for shard in self.shards}

    def before_forward(self, module, args, kwargs):
        full = self.gather()
        owners = {t.untyped_storage().data_ptr(): shard for shard, t in full.items() if t.numel()}
        self.show(full)
        self.running.append(saved_tensors_hooks(lambda tensor: self.pack(tensor, owners), self.unpack))
        self.running[-1].__enter__()
        return tree_map_only(torch.Tensor, self.cast, (args, kwargs)) if self.casts_to else None

    def after_forward(self, module, args, output):
        self.running.pop().__exit__()
        self.show({shard: shard.slice for shard in self.shards})
        tree_map_only(torch.Tensor, self.watch, output)

    def cast(self, tensor):
        return tensor.to(self.casts_to) if tensor.is_floating_point() else tensor

    def pack(self, tensor, owners):
        """Let autograd keep who has the weight, not the weight."""
        shard = owners.get(tensor.untyped_storage().data_ptr())
        return (shard, tensor.size(), tensor.stride(), tensor.storage_offset()) if shard else tensor

    def unpack(self, packed):
        return packed if isinstance(packed, torch.Tensor) else packed[0].weight().as_strided(*packed[1:])

    def watch(self, output):
        if output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, gradient):
        """Gather for what backward computes again, until it ends."""
        if all(isinstance(getattr(module, name), nn.Parameter) for module, name, _ in self.places):
            with torch.enable_grad():
                self.show(self.gather())
            end = torch.autograd.Variable._execution_engine.queue_callback
            end(lambda: self.show({shard: shard.slice for shard in self.shards}))


def zero3(model, units, ignored, group, dtypes, *, shard_class=Shard, unit_class=Unit):
    """Shard `model` in place; `units` and `ignored` are sets of its modules."""
    kept = {p for module in ignored for p in module.parameters()}
    shards = {p: shard_class(p, group, dtypes) for p in model.parameters() if p not in kept}
    owned = {module: {} for module in (model, *units)}

    def walk(module, unit):
        unit = module if module in units else unit
        for name, parameter in module._parameters.items():
            if parameter in shards:
                owned[unit][module, name] = shards[parameter]
        for child in module.children():
            walk(child, unit)

    walk(model, model)
    for module, found in owned.items():
        casts = dtypes.cast_root if module is model else dtypes.cast_units
        places = [(owner, name, shard) for (owner, name), shard in found.items()]
        unit_class(module, places, dtypes.param if casts else None)
    return model
