"""Where torch's `FullyShardedDataParallel` is known to break claims of mixed precision."""

from harness.conformance.deviations.deviation import Deviation
from harness.conformance.deviations.torch_engines import IN_LOW_PRECISION

ROOT = "the root keeps its full parameters after forward, whatever the strategy, and uses them again"
WHOLE = "what is not sharded has no state of its own to show, and is never given up"
OTHER_DTYPE = "a gradient in another dtype than the parameter's cannot be assigned to it"
ONE_SHARD = "where a replica is one rank, gradients are not averaged across replicas"
_CAST_BACK = "gradients that are kept are cast to the dtype of the parameters that compute"
_UNCAST = "a unit that is recomputed does not cast its inputs"

MIXED: tuple[Deviation, ...] = (
    Deviation(
        claims=("mixed_precision/test_submodules.py::*::test_mixed_precision_with_ignored_module",),
        points=("*use_orig_params=True",),
        why="the forward after one that raised warns of gradients of torch's own views",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_full_shard[*-no_offload-none]",
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-reduce_only]",
        ),
        points=("*",),
        why=ROOT,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-fp16]",
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-params_and_buffers]",
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-all_different]",
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-fp16]",
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-params_and_buffers]",
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-all_different]",
        ),
        points=("*backward_prefetch*", "offload=False, *"),
        why="to ask for the state before the first forward casts buffers for good",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-none]",
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-reduce_only]",
        ),
        points=("offload=False, *",),
        why=WHOLE,
    ),
    Deviation(
        claims=("mixed_precision/test_eval.py::*::test_full_precision_in_eval_buffers[environment-*-True]",),
        why="buffers stay cast in eval",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_gradients.py::TestFSDPMixedPrecisionSharded::test_grads_reduced_precision",
        ),
        points=("offload=False, use_orig_params=True",),
        why=OTHER_DTYPE,
    ),
    # Before the points that are merely rounded.
    Deviation(
        claims=(
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*-FULL_SHARD-*",
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*-SHARD_GRAD_OP-*",
            "mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-4-ranks]",
        ),
        points=("*keep_low_precision_grads=True), use_orig_params=True, offload=False",),
        why=OTHER_DTYPE,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*",
            "mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*[fp16-*-4-ranks]",
        ),
        points=("*offload=False",),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-2-ranks]",),
        points=("*offload=False",),
        why=ONE_SHARD,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*-FULL_SHARD-*",
            "mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*-SHARD_GRAD_OP-*",
        ),
        points=("keep=True, use_orig_params=False, offload=False",),
        why=_CAST_BACK,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*-FULL_SHARD-*",
            "mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*-SHARD_GRAD_OP-*",
        ),
        points=("keep=True, use_orig_params=True, offload=False",),
        why=OTHER_DTYPE,
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_unsynced_gradients_add_up_in_the_reduce_dtype*",),
        points=("*offload=False",),
        why="unsynced gradients add up in the dtype that modules compute in",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_original_dtypes.py::test_gradients_reduced_above_*[False-FULL_SHARD]",
            "mixed_precision/test_original_dtypes.py::test_gradients_reduced_above_*[False-SHARD_GRAD_OP]",
        ),
        why=_CAST_BACK,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_original_dtypes.py::test_gradients_reduced_above_*[True-FULL_SHARD]",
            "mixed_precision/test_original_dtypes.py::test_gradients_reduced_above_*[True-SHARD_GRAD_OP]",
        ),
        why=OTHER_DTYPE,
    ),
    Deviation(
        claims=("mixed_precision/test_recomputation.py::test_recomputation_casts_as_*[-*",),
        points=("units=('inner'_), *",),
        why=_UNCAST,
        issue=148831,
    ),
    Deviation(
        claims=("mixed_precision/test_recomputation.py::test_a_norm_in_full_precision_is_recomputed_*[-*",),
        why=_UNCAST,
        issue=148831,
    ),
    Deviation(
        claims=("mixed_precision/test_train_eval.py::*::test_train_ema_eval_flow*",),
        points=("*offload=False",),
        why="full parameters that an evaluation has left are used by the next, changed or not",
    ),
)
