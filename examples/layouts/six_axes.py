"""All six axes: FSDP2, or this package's `fully_shard`, over fsdp and dp around the plan by hand."""

import pipeline
import with_fsdp2
import with_fully_shard


class Plan(pipeline.Plan):
    shard = staticmethod(with_fsdp2.shard)

    def __init__(self, model, layout):
        super().__init__(model, layout)
        if layout["fsdp"] > 1:
            axes = tuple(axis for axis in ("dp", "fsdp") if layout[axis] > 1)
            self.shard(model, layout.mesh[axes])
            self.reduced, self.sharded = [axis for axis in self.reduced if axis not in axes], ("fsdp",)

    def reduce_gradients(self):
        super().reduce_gradients()
        if self.sharded:
            for each in self.model.parameters():
                each.grad *= self.layout.part(("dp", "fsdp"))[
                    1
                ]  # FSDP took the mean; shares are to be summed


class PlanWithOurs(Plan):
    shard = staticmethod(with_fully_shard.shard)
