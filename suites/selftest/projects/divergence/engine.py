"""An engine as a user writes it: each layer's weights are flat, sharded, gathered ahead, and reduced at once.

`fault` plants one mistake: "cast" reduces gradients in bf16, "wait" computes before the weights are there.
"""

import torch
import torch.distributed as dist
from torch import nn


class Unit:
    """A layer, this rank's slice of its weights, and the gather of all slices that may be going on."""

    def __init__(self, layer, fault):
        self.layer, self.fault = layer, fault
        self.ranks, self.next, self.handle = dist.get_world_size(), None, None
        self.names = list(layer._parameters)
        self.shapes = [parameter.shape for parameter in layer.parameters()]
        flat = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
        self.size = flat.numel()
        flat = nn.functional.pad(flat, (0, -self.size % self.ranks))
        self.slice = nn.Parameter(flat.chunk(self.ranks)[dist.get_rank()].clone())
        self.full = torch.full_like(flat, 1e9)
        for name in self.names:
            delattr(layer, name)
        self.waiting = 0
        layer.register_forward_pre_hook(self.before_forward)

    def begin_gather(self):
        self.handle = dist.all_gather_into_tensor(self.full, self.slice.detach(), async_op=True)

    def before_forward(self, layer, args):
        if self.handle is None:
            self.begin_gather()
            self.handle.wait()
        elif self.fault != "wait":
            self.handle.wait()
        self.show()
        if self.next is not None:
            self.next.begin_gather()

    def show(self):
        """Give the layer its weights: leaves that share memory with what was gathered."""
        sizes = [shape.numel() for shape in self.shapes]
        self.leaves = []
        for name, shape, part in zip(
            self.names, self.shapes, self.full[: self.size].split(sizes), strict=True
        ):
            leaf = part.view(shape).data.requires_grad_()  # gathers may write to it, says this user
            leaf.register_post_accumulate_grad_hook(self.reduce_when_complete)
            setattr(self.layer, name, leaf)
            self.leaves.append(leaf)
        self.waiting = len(self.leaves)

    def reduce_when_complete(self, leaf):
        self.waiting -= 1
        if self.waiting == 0:
            self.reduce()

    def reduce(self):
        flat = torch.cat([leaf.grad.flatten() for leaf in self.leaves])
        flat = nn.functional.pad(flat, (0, -self.size % self.ranks))
        if self.fault == "cast":
            flat = flat.to(torch.bfloat16)
        own = torch.empty_like(flat.chunk(self.ranks)[0])
        dist.reduce_scatter_tensor(own, flat)
        self.slice.grad = own.to(self.slice.dtype) / self.ranks
        self.handle = None

    def named(self, flat):
        sizes = [shape.numel() for shape in self.shapes]
        parts = zip(self.names, self.shapes, flat[: self.size].split(sizes), strict=True)
        return {name: part.view(shape) for name, shape, part in parts}

    def gathered(self, own):
        full = torch.empty_like(self.full)
        dist.all_gather_into_tensor(full, own)
        return self.named(full)


class Engine(nn.Module):
    """Shards the layers of an `nn.Sequential`."""

    def __init__(self, layers, fault=""):
        super().__init__()
        self.module = layers
        self.units = {str(i): Unit(layer, fault) for i, layer in enumerate(layers) if layer._parameters}
        for unit, following in zip(list(self.units.values()), list(self.units.values())[1:], strict=False):
            unit.next = following
        self.slices = nn.ParameterList([unit.slice for unit in self.units.values()])

    def forward(self, inputs):
        return self.module(inputs)

    def full_parameters(self):
        return {
            f"{i}.{name}": t for i, u in self.units.items() for name, t in u.gathered(u.slice.data).items()
        }

    def full_gradients(self):
        return {
            f"{i}.{name}": t for i, u in self.units.items() for name, t in u.gathered(u.slice.grad).items()
        }
