"""All six axes: FSDP2, or this package's `fully_shard`, over fsdp and dp around the plan by hand."""

import pipeline
import with_fsdp2
import with_fully_shard
from torch.distributed.tensor import DTensor


class Plan(pipeline.Plan):
    shard = staticmethod(with_fsdp2.shard)

    def __init__(self, model, layout):
        super().__init__(model, layout)
        if layout["fsdp"] > 1:
            self.shard(model, layout.mesh[tuple(axis for axis in ("dp", "fsdp") if layout[axis] > 1)])

    def sum_over(self, tensor, axes):
        """Sum over the axes that FSDP does not know; it has reduced gradients over its own."""
        if isinstance(tensor, DTensor):
            is_part = any(each.is_partial() for each in tensor.placements)
            tensor = tensor.full_tensor() if is_part else tensor.to_local()
            axes = [axis for axis in axes if axis not in ("dp", "fsdp")]
        return super().sum_over(tensor, axes)

    def reduce_gradients(self):
        super().reduce_gradients()
        for each in self.model.parameters():
            if isinstance(each, DTensor):
                each.grad *= self.layout.part(("dp", "fsdp"))[1]  # FSDP takes means, and shares are summed


class PlanWithOurs(Plan):
    shard = staticmethod(with_fully_shard.shard)
