"""An engine with training methods of its own, as DeepSpeed's: `engine.backward(loss)`, `engine.step()`."""

import torch
import torch.distributed as dist
from plain_engine import Scaler
from torch import nn

from lockstep.conformance import Capability, Replicated
from lockstep.conformance.spec import chosen_modules


class OwnOptimizer:
    """One of torch's optimizers over this rank's choice of the parameters, and all that no rank shares."""

    def __init__(self, parameters, make, group=None, alone=frozenset()):
        parameters = list(parameters)
        self.shared = [p for p in parameters if p not in alone]
        self.group, self.size = group, dist.get_world_size(group)
        own = [*self.shared[dist.get_rank(group) :: self.size], *(p for p in parameters if p in alone)]
        self.inner = make(own) if own else None
        self.param_groups = [{"params": parameters}]  # where a gradient scaler finds gradients

    def step(self):
        if self.inner:
            self.inner.step()
        for index, parameter in enumerate(self.shared if self.size > 1 else ()):
            dist.broadcast(parameter.data, group=self.group, group_src=index % self.size)

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


class HandEngine(nn.Module):
    """The model as it is called, and its optimizer. `loss.backward()` would leave gradients unreduced."""

    def __init__(self, module, ignored, group):
        super().__init__()
        self.module, self.group, self.optimizer = module, group, None
        self.size = dist.get_world_size(group)
        self.alone = {p for each in ignored for p in each.parameters()}
        left_out = {id(tensor) for each in ignored for tensor in each.state_dict(keep_vars=True).values()}
        for tensor in module.state_dict(keep_vars=True).values():
            if self.size > 1 and id(tensor) not in left_out:
                dist.broadcast(tensor.data, group=group, group_src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, retain_graph=False):
        """Add the mean over ranks of what this loss gives to the gradients."""
        shared = [p for p in self.parameters() if p not in self.alone]
        before = [p.grad for p in shared]
        for parameter in shared:
            parameter.grad = None
        loss.backward(retain_graph=retain_graph)
        self.reduce(shared)
        for parameter, gradient in zip(shared, before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def reduce(self, parameters):
        """Turn gradients into means, in one message for each dtype."""
        if self.size == 1:
            return
        device = parameters[0].device
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=self.group)
        learned = [p for p, somewhere in zip(parameters, has.tolist(), strict=True) if somewhere]
        for dtype in dict.fromkeys(p.dtype for p in learned):
            self.reduce_in_one([p for p in learned if p.dtype == dtype])

    def reduce_in_one(self, parameters):
        own = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in parameters]
        flat = torch.cat([gradient.flatten() for gradient in own])
        of_ranks = [torch.empty_like(flat) for _ in range(self.size)]
        dist.all_gather(of_ranks, flat, group=self.group)
        wide = torch.promote_types(flat.dtype, torch.float32)
        mean = (sum(of_rank.to(wide) for of_rank in of_ranks) / self.size).to(flat.dtype)
        for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    def configure(self, make):
        self.optimizer = OwnOptimizer(self.parameters(), make, self.group, self.alone)
        self.param_groups = self.optimizer.param_groups

    def step(self):
        self.optimizer.step()


class HandSpeed(Replicated):
    name = "hand-speed"
    capabilities = (Replicated.capabilities | {Capability.SYNC_STATES}) - {Capability.OPTIMIZER_STATE}

    def shard(self, model, spec):
        self.check(spec)
        if spec.device is not None:
            model.to(spec.device)
        return HandEngine(model, chosen_modules(model, spec.ignored, "ignored"), spec.process_group)

    def unwrapped(self, model):
        return model.module if isinstance(model, HandEngine) else model

    def backward(self, model, loss, retain_graph=False):
        model.backward(loss, retain_graph)

    def optimizer(self, model, make):
        if not isinstance(model, HandEngine):  # a module of it
            return OwnOptimizer(model.parameters(), make)
        model.configure(make)
        return model  # has `step`, `zero_grad` and `param_groups`

    def grad_scaler(self, model, *, process_group=None, **settings):
        return Scaler(process_group, device=next(model.parameters()).device.type, **settings)
