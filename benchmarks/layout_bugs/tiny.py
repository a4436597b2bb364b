"""The model of examples/layouts, with batches, and its auxiliary loss as a term."""

from model import VOCAB, build, build_tied, loss

from lockstep.layouts import witness_batches

__all__ = ["BATCHES", "TERMS", "build", "build_tied", "loss"]

BATCHES = witness_batches(VOCAB)


def penalty(model, batch):
    return 0.01 * model(batch["tokens"])[1].sum() / batch["labels"].numel()


TERMS = {"penalty": penalty}
