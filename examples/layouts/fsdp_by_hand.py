"""All six axes by hand: fsdp cuts each parameter once more, and gathers it where a module uses it.

Gathered in the forward pass, reduce-scattered in the backward pass: after each microbatch, so that no rank
ever has a whole gradient.
"""

import by_hand
import pipeline
from torch import nn
from torch.nn.utils import parametrize

from lockstep.layouts import Sharded, ShardMap


def over_fsdp(*cuts):
    return (*cuts, Sharded("fsdp", dim=-1))


def name_without_parametrization(name, layout):
    return name.replace("parametrizations.", "").removesuffix(".original")


class Whole(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, part):
        return by_hand.Gather.apply(part, -1, self.group)


class Plan(pipeline.Plan):
    shards = ShardMap(
        {
            "*.w[qkv].*": over_fsdp(Sharded("tp")),
            "*.wo.*": over_fsdp(Sharded("tp", dim=1)),
            "*.moe*.w[13]*": over_fsdp(Sharded("ep"), Sharded("tp", dim=2)),
            "*.moe*.w2*": over_fsdp(Sharded("ep"), Sharded("tp", dim=1)),
            "*": over_fsdp(),
        },
        rename=name_without_parametrization,
    )

    def __init__(self, model, layout):
        super().__init__(model, layout)
        if layout["fsdp"] == 1:
            return
        whole = Whole(layout.group("fsdp"))
        for module in list(model.modules()):
            for name, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, name, whole, unsafe=True)
