"""Layouts: every parallelism of a plan, held to the unsharded model, with the missing collective named.

Inside a rank; imports torch, torch.distributed and, of harness, `assertions`, `exceptions` and `recorders`.
"""

from lockstep.exceptions import NotOffered
from lockstep.layouts.batches import keep_labels, witness_batches
from lockstep.layouts.dropout import assert_dropout_follows_inputs
from lockstep.layouts.layout import Layout
from lockstep.layouts.oracle import Trainer, assert_same_as_unsharded
from lockstep.layouts.shards import Sharded, ShardMap

__all__ = [
    "Layout",
    "NotOffered",
    "ShardMap",
    "Sharded",
    "Trainer",
    "assert_dropout_follows_inputs",
    "assert_same_as_unsharded",
    "keep_labels",
    "witness_batches",
]
