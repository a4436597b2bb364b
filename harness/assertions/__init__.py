"""Assertions about a distributed run: parity with a reference, agreement of ranks, dtypes.

Inside a rank; imports torch, torch.distributed and, of harness, `exceptions` and `recorders`. Two rules hold
for all of them: a check that finds nothing to compare fails, and where ranks compare values, all of them fail
or none.
"""

from lockstep.assertions.agreement import assert_same_across_ranks, fail_together
from lockstep.assertions.closeness import TOLERANCES, Tolerance, assert_named_close
from lockstep.assertions.dtypes import assert_buffer_dtypes, assert_gradient_dtypes, assert_parameter_dtypes
from lockstep.assertions.equality import assert_equal
from lockstep.assertions.parity import (
    Run,
    Trainee,
    Training,
    assert_parity,
    assert_sharded_parity,
    named_gradients,
    named_parameters,
    per_rank_batches,
    train,
)
from lockstep.assertions.reference import unsharded_with_casts
from lockstep.recorders.tensors import local_part

__all__ = [
    "TOLERANCES",
    "Run",
    "Tolerance",
    "Trainee",
    "Training",
    "assert_buffer_dtypes",
    "assert_equal",
    "assert_gradient_dtypes",
    "assert_named_close",
    "assert_parameter_dtypes",
    "assert_parity",
    "assert_same_across_ranks",
    "assert_sharded_parity",
    "fail_together",
    "local_part",
    "named_gradients",
    "named_parameters",
    "per_rank_batches",
    "train",
    "unsharded_with_casts",
]
