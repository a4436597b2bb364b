"""Data parallelism by hand, behind the interface that the suites use."""

import torch.distributed as dist
from torch import nn

from lockstep.conformance import Capability, Replicated, ShardSpec


class HandDDP(Replicated):
    """All ranks start from rank 0's values, and each gradient becomes the mean over ranks."""

    name = "hand-ddp"
    capabilities = Replicated.capabilities | {Capability.SYNC_STATES}

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        self.check(spec)
        model.to(spec.device)
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, group=spec.process_group, group_src=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)
        return model

    def average(self, parameter: nn.Parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
