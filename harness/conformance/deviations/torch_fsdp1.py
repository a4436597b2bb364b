"""Where torch's `FullyShardedDataParallel` is known to break claims of the suites."""

from lockstep.conformance.deviations import outside, refusals, wrapper
from lockstep.conformance.deviations.deviation import SHARDED, Deviation, expand
from lockstep.conformance.deviations.shared import (
    AGAIN,
    FSDPS,
    IN_LOW_PRECISION,
    NAN,
    ONE_RANK,
    ONE_SHARD,
    OTHER_CLASS,
    UNREDUCED,
)

_UNSYNCED = "what no_sync kept of a unit that the synced backward passes by raises, or stays unreduced"
_REENTRANT = "reentrant checkpointing inside a unit reads parameters that were resharded"
_EMPTY = "a group without elements is refused"
_ROOT = "the root keeps its unsharded parameters after forward, whatever the strategy, and uses them again"
_WHOLE = "what is not sharded shows no state, and is never resharded"
_OTHER_DTYPE = "a gradient in another dtype than the parameter's cannot be assigned to it"
_CAST_BACK = "gradients that are kept are cast to the dtype of the parameters that compute"
_UNCAST = "a unit that is recomputed does not cast its inputs"
_LEFT = "full parameters that an evaluation has left are used by the next, changed or not"
_UNUSED_GATHER = "what a forward gathered ahead and did not run stays unsharded"
_DROPPED = "a full gradient that was dropped is not, and what no_sync left cannot be shown in full"
_CAST_BUFFERS = "{fp16,params_and_buffers,all_different}"

CORE: tuple[Deviation, ...] = (
    # The memory without values that it reads ends the process.
    Deviation(
        claims=("core/test_transforms.py::*",),
        cases=("*",),
        why="it does not run inside a transform",
        run=False,
    ),
    Deviation(
        claims=("core/test_deferred.py::test_a_weight_outlives_its_model",),
        why="a backward of a weight that is not one of the model is refused",
    ),
    Deviation(
        claims=("core/test_states.py::test_a_layer_has_its_parameters_in_forward*",),
        cases=("*use_orig_params=False",),
        why="one flat parameter takes the place of all",
    ),
    Deviation(
        claims=("core/test_collectives.py::test_what_is_gathered_ahead_follows_the_order_*",),
        why="the order of the first forward is expected in all others",
    ),
    Deviation(
        claims=("core/test_reduction.py::test_a_hook_on_a_parameter_sees_its_reduced_gradient*",),
        cases=("*",),
        why="hooks of parameters are not called, or with a gradient that is not reduced",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_tensor_may_be_made_like_a_weight_*",),
        cases=("front=SHARD_GRAD_OP-orig", "front=FULL_SHARD-orig"),
        why="a weight that was freed has the shape of a shard",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_weight_of_another_unit_is_a_whole_parameter_*",),
        cases=("front=*-flat, *", "front=FULL_SHARD-orig, *", "front=SHARD_GRAD_OP-orig, *"),
        why="a weight is a plain tensor in a forward, and one that was freed has the shape of a shard",
    ),
    Deviation(
        claims=("core/test_outside.py::test_what_a_hook_would_see_too_early_*",),
        cases=("*",),
        why="a gradient that comes to the weight itself is not noticed",
    ),
    Deviation(claims=("core/test_states.py::test_zeros_that_were_looked_at_forget_nothing*",), why=_DROPPED),
    Deviation(
        claims=("core/test_states.py::test_changes_of_full_gradients_are_kept_on_request[flat-*",),
        cases=("*",),
        why="full gradients of flat parameters are refused",
    ),
    Deviation(
        claims=("core/test_states.py::test_changes_of_full_gradients_are_kept_on_request[orig-FULL_SHARD*",),
        cases=("writeback=True,*", "*sync=False"),
        why=_DROPPED,
    ),
    Deviation(
        claims=("core/test_states.py::test_changes_of_full_gradients_are_kept_on_request[orig-NO_SHARD*",),
        cases=("*",),
        why="changes of what is not sharded are kept in any case, and a gradient that was dropped is not",
    ),
    Deviation(
        claims=(
            "core/test_hybrid.py::test_without_groups_a_host_shards_and_hosts_replicate*",
            "core/test_hybrid.py::test_hosts_that_ranks_do_not_fill_are_refused*",
        ),
        why="a host has as many ranks as accelerators, or one, whatever torchrun says",
        run=False,  # where it does not raise, it leaves groups that ranks are connecting
    ),
    # The freed memory that it prints ends the process.
    Deviation(
        claims=("core/test_outside.py::test_a_weight_of_another_unit_may_be_printed_in_a_forward*",),
        why="a weight that was freed is read",
        run=False,
    ),
    Deviation(
        claims=("core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_last_*[SHARD_GRAD_OP-*",),
        cases=("*",),
        why=_LEFT,
    ),
    Deviation(
        claims=("core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_last_step[FULL_SHARD-*",),
        cases=("evaluated_before=step",),
        why=_LEFT,
    ),
    Deviation(
        claims=("core/test_evaluation.py::test_unused_gathers_are_given_up_after_forward[*",),
        why=_UNUSED_GATHER,
        issue=137348,
    ),
    Deviation(
        claims=expand(f"core/test_evaluation.py::test_an_evaluation_has_the_weights_that_*[{SHARDED}-*"),
        why=_LEFT,
    ),
    Deviation(
        claims=expand(f"core/test_accumulation.py::test_two_backwards_over_one_graph_*[{SHARDED}-*"),
        cases=("offload=False*",),
        why=AGAIN,
        issue=136861,
        run=False,
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_several_forwards_may_go_backward_one_by_one*",
            "core/test_collectives.py::test_every_synced_backward_of_an_accumulation*[NO_SHARD-*",
        ),
        why=AGAIN,
        issue=136861,
    ),
    # The freed memory that it finds there ends the process.
    Deviation(
        claims=expand(
            f"core/test_collectives.py::test_every_synced_backward_of_an_accumulation*[{SHARDED}-*"
        ),
        why=AGAIN,
        issue=136861,
        run=False,
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_two_backwards_over_one_graph_give_exactly_twice[NO_SHARD-*",
        ),
        cases=("offload=False*",),
        why=AGAIN,
        issue=136861,
    ),
    Deviation(
        claims=("core/test_collectives.py::test_no_sync_reduces_nothing*[SHARD_GRAD_OP-*-no_offload-*",),
        why="full parameters are kept through no_sync",
    ),
    Deviation(
        claims=expand(
            f"core/test_accumulation.py::test_zero_grad_drops_unsynced_gradients[{SHARDED}-*-no_offload-*"
        ),
        why="zero_grad after a backward without sync leaves the reduced gradient of the one before",
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_a_synced_backward_reduces_gradients_of_idle_*-no_offload]",
            "core/test_accumulation.py::test_unsynced_gradients_survive_a_conversion_*",
        ),
        why=_UNSYNCED,
    ),
    Deviation(claims=("core/test_clipping.py::test_unreduced_gradients_are_refused*",), why=UNREDUCED),
    Deviation(
        claims=expand(f"core/test_accumulation.py::test_kept_low_precision_gradients_add_up[{SHARDED}]"),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=(
            "core/test_checkpointing.py::test_a_checkpointed_unit_is_gathered_*[FULL_SHARD-*",
            "core/test_checkpointing.py::test_a_partly_checkpointed_unit_is_gathered_*[FULL_SHARD-*",
            "core/test_checkpointing.py::test_a_unit_is_gathered_once_for_segments_that_share_its_weight*",
            "core/test_collectives.py::test_a_step_gathers_and_reduces_by_strategy[no_offload-FULL_SHARD-*",
            "core/test_collectives.py::test_no_sync_reduces_nothing*[FULL_SHARD-*-no_offload-*",
            "core/test_collectives.py::test_evaluation_gathers_each_group_once*[FULL_SHARD-*",
            "core/test_collectives.py::test_a_forward_without_backward_is_forgotten*[FULL_SHARD-*",
            "core/test_collectives.py::test_a_frozen_group_is_gathered_in_backward_*[FULL_SHARD-*",
            "core/test_hybrid.py::test_it_gathers_inside_and_reduces_inside_*[HYBRID_SHARD-*",
            "core/test_states.py::test_forward_gathers_a_group_for_its_own_modules_only[FULL_SHARD-*",
            "core/test_states.py::test_groups_show_dtypes_and_bytes_at_every_moment[FULL_SHARD-no_offload-*",
            "core/test_states.py::test_full_parameters_give_their_memory_back[*-FULL_SHARD-0]",
            "core/test_states.py::test_what_is_kept_of_full_parameters_is_empty_or_nan",
            "core/test_states.py::test_a_unit_frees_after_forward_whatever_its_output*[FULL_SHARD-*",
        ),
        why=_ROOT,
    ),
    Deviation(
        claims=("core/test_core.py::TestParamInit::test_param_change_after_init*",),
        cases=("strategy=FULL_SHARD*", "strategy=SHARD_GRAD_OP, use_orig_params=False"),
        why=_ROOT,
    ),
    Deviation(
        claims=(
            "core/test_states.py::test_forward_gathers_a_group_for_its_own_modules_only[NO_SHARD-*",
            "core/test_states.py::test_groups_show_dtypes_and_bytes_at_every_moment[NO_SHARD-no_offload-*",
            "core/test_states.py::test_a_unit_frees_after_forward_whatever_its_output*[NO_SHARD-*",
        ),
        why=_WHOLE,
    ),
    Deviation(
        claims=("core/test_states.py::test_a_cast_shard_exists_only_while_its_gather_*[no_offload-bf16]",),
        why="the cast shard of a gather is not seen while it is under way on CPU",
    ),
    Deviation(
        claims=(
            "core/test_states.py::test_visible_parameters_are_sharded_outside_forward[SHARD_GRAD_OP-orig]",
            "core/test_states.py::test_an_optimizer_built_after_a_forward_*[SHARD_GRAD_OP-orig-]",
        ),
        why="after a forward the full parameters are shown, which no optimizer can step",
    ),
    Deviation(
        claims=expand(
            f"core/test_states.py::test_evaluation_and_inference_mode_leave_training_*[{SHARDED}-*"
        ),
        why="after a forward in inference mode no post-backward can be registered",
    ),
    Deviation(
        claims=("core/test_states.py::test_units_skipped_or_left_out_of_the_loss_*[SHARD_GRAD_OP-flat]",),
        why="a unit whose output is left out of the loss keeps its full parameters",
    ),
    Deviation(
        claims=("core/test_shapes.py::test_gradients_and_parameters_*[skipping-*-ranks]",),
        cases=("front=SHARD_GRAD_OP-flat",),
        why="a unit whose output is left out of the loss keeps its full parameters",
    ),
    Deviation(
        claims=expand(
            f"core/test_checkpointing.py::test_a_tied_weight_is_counted_once_per_use[{SHARDED}-*-reentrant]"
        ),
        why=_REENTRANT,
    ),
    Deviation(
        claims=(
            "core/test_shapes.py::test_gradients_and*[checkpointed_inside_a_unit_reentrant-*-ranks]",
            "core/test_shapes.py::test_models_train_*_really_freed[checkpointed_inside_a_unit_reentrant]",
        ),
        cases=("front=FULL_SHARD-*", "front=SHARD_GRAD_OP-*"),
        why=_REENTRANT,
    ),
    Deviation(
        claims=expand("core/test_shapes.py::test_{gradients,four,models}_*[nothing*"),
        cases=("front=*SHARD*-flat", "front=*SHARD*-orig"),
        why=_EMPTY,
    ),
    Deviation(
        claims=("core/test_clipping.py::test_the_norm_of_low_precision_gradients_is_taken_in_fp32*",),
        why="the norm of low-precision gradients is rounded to their dtype",
    ),
    Deviation(
        claims=expand(f"core/test_clipping.py::test_the_norm_of_fp64_gradients_is_taken_in_fp64[{SHARDED}]"),
        why="norms are taken in fp32, which fp64 gradients are refused for",
    ),
    Deviation(claims=("core/test_collectives.py::test_one_rank_communicates_nothing*",), why=ONE_RANK),
    Deviation(
        claims=(
            "core/test_collectives.py::test_a_frozen_group_out_of_backward_is_gathered_once[SHARD_GRAD_OP-*",
        ),
        why="a frozen group that backward does not reach keeps its full parameters",
    ),
    Deviation(
        claims=(
            "core/test_hybrid.py::test_it_learns_the_same_with_one_replica_or_one_shard[*-2-2-ranks]",
            "core/test_hybrid.py::test_a_mean_within_the_range_of_its_dtype_is_exact[*-2-*-2-ranks]",
        ),
        why=ONE_SHARD,
    ),
)

SCALER: tuple[Deviation, ...] = (
    Deviation(
        claims=("grad_scaler/test_agreement.py::test_a_fused_optimizer_gets_what_all_ranks_found[*-False-*",),
        why="an optimizer that unscales by itself sees only what this rank has found",
    ),
    Deviation(
        claims=("grad_scaler/test_agreement.py::test_a_fused_optimizer_gets_what_all_ranks_found[*-True-*",),
        why="an optimizer that takes the flag refuses it: unscale_ makes it a vector of one element",
    ),
    Deviation(
        claims=("grad_scaler/test_gradients.py::test_low_precision_gradients_of_fp32_parameters_*",),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=(
            "grad_scaler/test_gradients.py::test_an_fp16_gradient_that_overflows_unscaled_stops_the_step*",
        ),
        why="what overflows while it is unscaled is not seen",
    ),
    Deviation(
        claims=("grad_scaler/test_scale.py::test_it_never_grows_to_inf*",),
        why="on CPU the scale grows to inf",
    ),
)

MIXED: tuple[Deviation, ...] = (
    Deviation(
        claims=(
            "mixed_precision/test_casting.py::test_floating_point_arguments_are_cast_in_containers_of_another_class[*",
        ),
        cases=("*",),
        why=OTHER_CLASS,
    ),
    Deviation(
        claims=("mixed_precision/test_casting.py::test_a_packed_sequence_is_cast",),
        why="a packed sequence is not cast",
    ),
    Deviation(
        claims=("mixed_precision/test_casting.py::test_a_field_that_is_not_set_stays_so",),
        why="all fields of a dataclass are read",
    ),
    Deviation(
        claims=("mixed_precision/test_submodules.py::*::test_mixed_precision_with_ignored_module",),
        cases=("*use_orig_params=True",),
        why="the forward after one that raised warns of gradients of torch's own views",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_full_shard[*-no_offload-none]",
            "mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-reduce_only]",
        ),
        cases=("*",),
        why=_ROOT,
    ),
    Deviation(
        claims=expand(
            f"mixed_precision/test_end_to_end.py::*::test_mixed_precision_e2e_*[*-no_offload-{_CAST_BUFFERS}]",
            f"mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-{_CAST_BUFFERS}]",
        ),
        cases=("*backward_prefetch*", "offload=False, *"),
        why="to ask for the state before the first forward casts buffers for good",
    ),
    Deviation(
        claims=expand(
            "mixed_precision/test_end_to_end.py::*Unsharded::test_mixed_precision_e2e_*-{none,reduce_only}]"
        ),
        cases=("offload=False, *",),
        why=_WHOLE,
    ),
    Deviation(
        claims=("mixed_precision/test_end_to_end.py::*::test_parameters_are_cast_and_buffers_are_not*",),
        cases=("strategy=FULL_SHARD, *",),
        why=_ROOT,
    ),
    Deviation(
        claims=("mixed_precision/test_end_to_end.py::*::test_parameters_are_cast_and_buffers_are_not*",),
        cases=("strategy=SHARD_GRAD_OP, *",),
        why="the names of buffers carry the prefix of the wrapper",
    ),
    Deviation(
        claims=("mixed_precision/test_eval.py::*::test_full_precision_in_eval_buffers[environment-*-True]",),
        why="buffers stay cast in eval",
    ),
    Deviation(
        claims=(
            "mixed_precision/test_gradients.py::TestFSDPMixedPrecisionSharded::test_grads_reduced_precision",
        ),
        cases=("offload=False, use_orig_params=True",),
        why=_OTHER_DTYPE,
    ),
    # Before the cases that are merely rounded.
    Deviation(
        claims=expand(
            f"mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*[{SHARDED}-orig-*"
        ),
        cases=("*keep_low_precision_grads=True), offload=False",),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-4-ranks]",),
        cases=("*keep_low_precision_grads=True), use_orig_params=True, offload=False",),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=(
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*",
            "mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-fp16-4-ranks]",
        ),
        cases=("*offload=False",),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-2-ranks]",),
        cases=("*offload=False",),
        why=ONE_SHARD,
    ),
    Deviation(
        claims=expand(
            f"mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*[{SHARDED}-flat-*"
        ),
        cases=("keep=True, offload=False",),
        why=_CAST_BACK,
    ),
    Deviation(
        claims=expand(
            f"mixed_precision/test_numerics.py::test_reduce_dtype_holds_for_every_bit_*[{SHARDED}-orig-*"
        ),
        cases=("keep=True, offload=False",),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_unsynced_gradients_add_up_in_the_reduce_dtype*",),
        cases=("*offload=False",),
        why="unsynced gradients add up in the dtype that modules compute in",
    ),
    Deviation(
        claims=expand(
            f"mixed_precision/test_original_dtypes.py::test_kept_gradients_reduced_above_*[{SHARDED}-flat]"
        ),
        why=_CAST_BACK,
    ),
    Deviation(
        claims=expand(
            f"mixed_precision/test_original_dtypes.py::test_kept_gradients_reduced_above_*[{SHARDED}-orig]"
        ),
        why=_OTHER_DTYPE,
    ),
    Deviation(
        claims=("mixed_precision/test_recomputation.py::test_recomputation_casts_as_*-]",),
        cases=("units=('inner'_), *",),
        why=_UNCAST,
        issue=148831,
    ),
    Deviation(
        claims=("mixed_precision/test_recomputation.py::test_a_norm_in_full_precision_is_recomputed_*-]",),
        why=_UNCAST,
        issue=148831,
    ),
    Deviation(
        claims=("mixed_precision/test_train_eval.py::*::test_train_ema_eval_flow*",),
        cases=("*offload=False",),
        why=_LEFT,
    ),
)

DEVIATIONS = (*FSDPS, NAN, *CORE, *wrapper.FSDP1, *refusals.FSDP1_SCALER, *outside.FSDP1, *SCALER, *MIXED)
