"""The plan by hand over pp, too: each rank has a stage, run by a schedule of torch.distributed.pipelining."""

from dataclasses import replace

import by_hand
import torch
from model import VOCAB, WIDTH, share
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from lockstep.layouts import NotOffered

SHARDS = by_hand.SHARDS
# With tied embeddings the last stage has a copy of the first one's.
TIED = replace(SHARDS, rename=lambda name, layout: "embed.weight" if name == "head.weight" else name)


class Plan(by_hand.Plan):
    schedule = ScheduleGPipe

    def __init__(self, model, layout):
        super().__init__(model, layout)
        self.is_tied = model.head.weight is model.embed.weight
        self.stage, self.stages = layout.at("pp"), layout["pp"]
        if len(model.layers) % self.stages:
            raise NotOffered(f"{len(model.layers)} layers in {self.stages} stages")
        each = len(model.layers) // self.stages
        for number in range(len(model.layers)):
            if number // each != self.stage:
                del model.layers[str(number)]
        if self.stage > 0:
            model.embed = None
        if self.stage < self.stages - 1:
            model.norm = model.head = None

    def __call__(self, batch, microbatches):
        if self.stages == 1:
            return super().__call__(batch, microbatches)
        # Schedules of torch 2.11 compare strides, too.
        tokens, labels = self.mine(batch["tokens"]).contiguous(), self.mine(batch["labels"])
        rows, length = tokens.shape[0] // microbatches, tokens.shape[1]
        # Shapes are given, as no expert can count its tokens on the device meta. What does not require a
        # gradient here sends none back.
        like = {"dtype": torch.float64, "device": "meta", "requires_grad": True}
        hidden, penalty = torch.empty(rows, length, WIDTH, **like), torch.empty(1, **like)
        logits = torch.empty(rows, length, VOCAB, **like)
        is_first, is_last = self.stage == 0, self.stage == self.stages - 1
        stage = PipelineStage(
            *(self.model, self.stage, self.stages, tokens.device),
            input_args=(tokens[:rows].to("meta"),) if is_first else (hidden, penalty),
            output_args=(logits if is_last else hidden, penalty),
            group=self.layout.group("pp"),
        )
        # A share of the whole batch's loss is not to be divided by the number of microbatches.
        schedule = self.schedule(
            *(stage, microbatches, lambda output, wanted: share(output, wanted, batch)), scale_grads=False
        )
        losses = []
        schedule.step(*((tokens,) if is_first else ()), target=labels if is_last else None, losses=losses)
        self.reduce_gradients()
        if not is_last:
            return None
        return self.sum_over(torch.stack(losses).sum().detach(), (*by_hand.ROWS, *by_hand.SEQUENCE))

    def reduce_gradients(self):
        super().reduce_gradients()
        if self.is_tied and self.stages > 1:
            tied = next((each for each in (self.model.embed, self.model.head) if each), None)
            gradient = tied.weight.grad if tied else torch.zeros(VOCAB, WIDTH, dtype=torch.float64)
            self.sum_over(gradient, ("pp",))

    def grad_norm(self):
        own = super().grad_norm().square()
        if self.is_tied and self.stage > 0 and self.model.head:
            own -= self.model.head.weight.grad.square().sum()  # the first stage counts it
        return self.sum_over(own, ("pp",)).sqrt()


class PlanWith1F1B(Plan):
    schedule = Schedule1F1B
