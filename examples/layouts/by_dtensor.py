"""The plan by `parallelize_module` over tp, with sequence parallelism, and FSDP2 over fsdp and dp.

Each rank of tp has all experts, as plain parameters, and computes them for the whole sequence.
DTensor leaves the gradients of norms Partial over tp: what reads them next reduces them.
"""

import torch
import with_fsdp2
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WHOLE, PART = Replicate(), Shard(1)  # of the sequence


def shard(model, mesh):
    if "tp" in mesh.mesh_dim_names:
        cut_over_tp(model, mesh["tp"])
    if axes := tuple(axis for axis in Plan.axes if axis in mesh.mesh_dim_names):
        with_fsdp2.shard(model, mesh[axes])


def cut_over_tp(model, mesh):
    around_model = {
        "embed": RowwiseParallel(input_layouts=WHOLE, output_layouts=PART),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=PART, output_layouts=WHOLE),
    }
    parallelize_module(model, mesh, around_model)
    for layer in model.layers.values():
        of_layer = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=PART, desired_input_layouts=WHOLE),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=PART),
            "moe_norm": SequenceParallel(),
        }
        parallelize_module(layer, mesh, of_layer)
        enter = PrepareModuleInput(input_layouts=PART, desired_input_layouts=WHOLE, use_local_output=True)
        leave = PrepareModuleOutput(output_layouts=(WHOLE, None), desired_output_layouts=(PART, None))
        parallelize_module(layer.moe, mesh, enter)
        parallelize_module(layer.moe, mesh, leave)


class Plan(with_fsdp2.Plan):
    shard = staticmethod(shard)

    def grad_norm(self):
        # One by one: torch 2.13 takes no norm of tensors that are on different meshes.
        norms = [each.grad.norm() for each in self.model.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in norms]
        return torch.stack(whole).norm()
