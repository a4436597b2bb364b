"""Where torch's `fully_shard` and `replicate` are known to break claims of the suites."""

from lockstep.conformance.deviations import outside, refusals
from lockstep.conformance.deviations.deviation import SHARDED, Deviation, expand
from lockstep.conformance.deviations.shared import (
    AMP_SCALER,
    DTENSOR_NORMS,
    FSDPS,
    IN_LOW_PRECISION,
    KEPT,
    ONE_RANK,
    OTHER_CLASS,
    PINNED,
)

_EXCEPTION = "parameters of the groups in flight stay unsharded after an exception"
_CONVERTED = "buffers of all-gathers keep the dtype from before a conversion"
_EMPTY = "a parameter without elements is refused when gradients are reduced"

_ACCUMULATED = "an accumulated gradient and a fresh one in another dtype meet in one group, and are refused"
_REDUCED_IN_ANOTHER = (
    "precision=Precision(param_dtype=bfloat16;reduce_dtype=float32), sync=False",
    "precision=Precision(reduce_dtype=bfloat16), sync=False",
)
_AFTER_FORWARD = "after a forward unsharded parameters are visible; an optimizer made of them moves nothing"

CORE: tuple[Deviation, ...] = (
    Deviation(
        claims=expand(
            "mixed_precision/test_casting.py::test_floating_point_arguments_are_cast_in_containers_of_another_class[{table,single}*",
        ),
        cases=("*",),
        why=OTHER_CLASS,
    ),
    Deviation(
        claims=("two_d/test_placement.py::test_ranks_that_choose_different_dims_learn_which",),
        why="what ranks shard is not compared",
    ),
    Deviation(
        claims=("replicate/test_shapes.py::test_parameters_without_dimensions_may_be_replicated",),
        why="what has no dimensions is refused, sharded or not",
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
        claims=(
            "core/test_accumulation.py::test_a_parameter_may_be_used_in_*-[(0,), (0,), (0, 1)]]",
            "core/test_accumulation.py::test_a_parameter_may_be_used_in_*-[(0,), (1,), (0,)]]",
        ),
        cases=tuple(f"units=('0'_'1'), {case}" for case in _REDUCED_IN_ANOTHER),
        why="a backward without sync raises while a unit has never been gathered",
    ),
    Deviation(
        claims=("core/test_accumulation.py::test_a_parameter_may_be_used_in_*-[(0,), (0,), (0, 1)]]",),
        cases=tuple(f"*{case}" for case in _REDUCED_IN_ANOTHER),
        why=_ACCUMULATED,
        issue=196996,
    ),
    Deviation(
        claims=expand(f"core/test_accumulation.py::test_unsynced_gradients_survive_*[{SHARDED}-*"),
        why=_CONVERTED,
    ),
    Deviation(
        claims=("core/test_collectives.py::test_evaluation_gathers_each_group_*[NO_SHARD-flat-no_grad-*",),
        why=KEPT,
    ),
    Deviation(
        claims=(
            "core/test_collectives.py::test_a_frozen_group_out_of_backward_is_gathered_once[FULL_SHARD-*",
        ),
        why="a frozen group that backward does not reach is prefetched",
    ),
    Deviation(
        claims=expand("core/test_collectives.py::test_one_rank_communicates_*[{NO_SHARD,replicate}-*"),
        why=ONE_RANK,
    ),
    Deviation(
        claims=expand(
            "core/test_scale.py::test_making_units_takes_no_operations_for_each_rank"
            "[{FULL_SHARD-orig,SHARD_GRAD_OP-orig,fully_shard}-*]"
        ),
        why="each parameter is cut into a tensor for each rank",
    ),
    Deviation(
        claims=expand("core/test_shapes.py::*[{nothing,odd_dimensions}*"),
        cases=("*",),
        why=_EMPTY,
    ),
    Deviation(
        claims=("core/test_shapes.py::*[checkpointed_reentrant*",),
        cases=("*",),
        why="a unit that reentrant checkpointing recomputes twice in a step gets a wrong gradient",
    ),
    Deviation(
        claims=expand(
            "core/test_states.py::test_visible_parameters_are_sharded_outside_forward[{SHARD_GRAD_OP,NO_SHARD}-*",
            "core/test_states.py::test_an_optimizer_built_after_a_forward_*[{SHARD_GRAD_OP,NO_SHARD}-*",
        ),
        why=_AFTER_FORWARD,
        issue=149205,
    ),
    Deviation(
        claims=expand(
            "core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_*[{SHARD_GRAD_OP,NO_SHARD}-*",
            "core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_*[{fully_shard,replicate}-*",
        ),
        cases=("evaluated_before=step",),
        why="full parameters that an evaluation before the step has left are used by the one after it",
    ),
    Deviation(
        claims=("core/test_states.py::test_evaluation_and_inference_mode_leave_training_*[FULL_SHARD-*",),
        why="what was unsharded in inference mode cannot be unsharded again outside",
    ),
    Deviation(
        claims=(
            "core/test_states.py::test_evaluation_and_inference_mode_leave_training_*[NO_SHARD-*",
            "core/test_collectives.py::test_evaluation_gathers_each_group_*[NO_SHARD-flat-inference_mode-*",
        ),
        why="a replica's forward in inference mode raises",
    ),
)

REPLICATE: tuple[Deviation, ...] = (
    Deviation(
        claims=("replicate/test_settings.py::test_an_event_of_the_optimizer_*",),
        why="a stream waits for the event, of which the CPU has none",
    ),
    Deviation(
        claims=("replicate/test_settings.py::test_gradients_are_converted_*",),
        why=_CONVERTED,
    ),
    Deviation(
        claims=(
            *expand("replicate/test_settings.py::test_a_{,replicated_}group_without_elements_trains*"),
            "replicate/test_usage.py::test_a_parameter_that_no_rank_used_differs_from_one_without_elements*",
        ),
        why=_EMPTY,
    ),
    Deviation(
        claims=("replicate/test_settings.py::test_a_gradient_of_zeros_is_one*",),
        cases=("*",),
        why="ranks that use other parameters send gradients of other sizes",
        run=False,
    ),
    Deviation(
        claims=("replicate/test_settings.py::test_few_ranks_hold_parameters_until_the_next_step*",),
        why="what few ranks hold after forward is not shown as gathered",
    ),
    Deviation(
        claims=("replicate/test_settings.py::test_few_ranks_may_hold_parameters_inside_of_a_transform*",),
        why="it does not run inside a transform",
    ),
    Deviation(
        claims=(
            "replicate/test_accumulation.py::test_parameters_that_are_always_kept_see_the_step*",
            "replicate/test_unshard.py::test_by_hand_a_step_is_seen_where_backward_has_kept_*",
            "replicate/test_usage.py::test_an_optimizer_in_backward_trains_as_one_after_it[*-kept]",
        ),
        why="parameters kept after backward are those from before the step",
    ),
    Deviation(
        claims=(
            "replicate/test_unshard.py::test_parameters_gathered_before_a_change_*[fully_shard-on_its_way*",
        ),
        why="an all-gather in flight when parameters change is used as it is",
    ),
    Deviation(
        claims=("replicate/test_calls.py::test_an_optimizer_built_after_a_forward_moves_the_weights*",),
        why=_AFTER_FORWARD,
        issue=149205,
    ),
    Deviation(
        claims=(
            "replicate/test_calls.py::test_an_average_of_a_model_follows_its_steps*",
            "replicate/test_hybrid.py::test_a_copy_keeps_the_wait_inside_a_replica",
            "replicate/test_reduction.py::test_a_copy_divides_as_its_original_and_leaves_that_alone*",
            "replicate/test_settings.py::test_modules_without_parameters_may_be_copied*",
            "replicate/test_settings.py::test_a_copy_of_what_was_gathered_trains_apart*",
            "replicate/test_settings.py::test_a_copy_of_a_list_of_nested_modules_trains*",
        ),
        why="sharded models cannot be copied with deepcopy",
        issue=149138,
    ),
    Deviation(
        claims=("replicate/test_exceptions.py::test_an_exception_is_survived_by_the_next_step*in_backward]",),
        cases=("place=''", "place=module.0", "place=module.1*", "place=module.2"),
        why=_EXCEPTION,
    ),
    Deviation(
        claims=("replicate/test_exceptions.py::test_an_exception_is_survived_*-unsynced-*_forward]",),
        cases=("*",),
        why="what was accumulated before an exception is reduced with the gradients of the next step",
    ),
    Deviation(
        claims=("replicate/test_exceptions.py::test_a_model_whose_backward_raised_may_become_*",),
        why="a model that has run cannot become a part of another",
    ),
    Deviation(
        claims=(
            "replicate/test_exceptions.py::test_parameters_are_sharded_ones_after_an_exception*",
            "replicate/test_exceptions.py::test_a_backward_that_raised_may_be_run_again*",
        ),
        why=_EXCEPTION,
    ),
    Deviation(
        claims=("replicate/test_shapes.py::test_a_parameter_in_two_groups_is_an_error_naming_both*",),
        why="the error names the parameter in one of the two groups only",
    ),
    Deviation(
        claims=expand(
            "replicate/test_hybrid.py::test_a_divide_factor_divides_the_sum_over_both_axes[{fp32,bf16}]",
            "replicate/test_reduction.py::test_a_divide_factor_divides_the_sum[fully_shard-{fp32,bf16}-{2.0-3,3.0-2}-ranks]",
        ),
        why="gloo has no sum that multiplies before, which a factor other than the number of ranks asks for",
    ),
    Deviation(
        claims=(
            "replicate/test_reduction.py::test_a_divide_factor_divides_the_sum[*-fp16-*-1-rank]",
            "replicate/test_reduction.py::test_a_divide_factor_divides_the_sum[replicate-fp16-*-ranks]",
        ),
        why="where gradients are not scattered, a factor in fp16 divides twice",
    ),
    Deviation(
        claims=(
            "replicate/test_mixed_precision.py::*::test_compute_dtype[*-4-ranks]",
            "replicate/test_mixed_precision.py::*::test_reduce_dtype[reduced_in_bf16-*-4-ranks]",
        ),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=(
            "replicate/test_mixed_precision.py::*::test_batch_norm_1d_computes_in_fp32_*",
            "replicate/test_mixed_precision.py::*::test_batch_norm_1d_has_its_own_*",
        ),
        why="the kernel of CPUs refuses parameters in low precision beside buffers in fp32",
    ),
    Deviation(
        claims=expand(
            "core/test_collectives.py::test_a_step_gathers_*[offload-{fully_shard,replicate}-*",
            "core/test_collectives.py::test_no_sync_reduces_nothing_*[{fully_shard,replicate}-offload-*",
        ),
        why=PINNED,
    ),
    Deviation(
        claims=("core/test_shapes.py::test_offloaded_shards_train_the_same*",),
        cases=("front=fully_shard, *", "front=replicate, *"),
        why=PINNED,
    ),
)

SCALER: tuple[Deviation, ...] = (
    Deviation(
        claims=("grad_scaler/test_agreement.py::test_an_inf_on_one_rank_of_a_hybrid_model_stops_all*",),
        cases=("*",),
        why="ranks agree inside a replica only",
    ),
    Deviation(
        claims=("grad_scaler/test_agreement.py::test_ranks_without_gradients_follow_the_one_that_has_some*",),
        why="a rank without a gradient is refused by the scaler",
    ),
    Deviation(
        claims=("grad_scaler/test_gradients.py::test_an_unsharded_sparse_gradient_unscales_*",),
        why="gradients that are DTensors are not unscaled together with others",
    ),
)

MIXED: tuple[Deviation, ...] = (
    Deviation(
        claims=expand(
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*-bf16-{3,4}-ranks]",
            "mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*-fp16-*",
            "mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-fp16-*",
            "mixed_precision/test_numerics.py::test_hybrid_reductions_round_once*-bf16-4-ranks]",
        ),
        cases=(
            "precision=Precision(), *",
            "precision=Precision(reduce_dtype=*",
            "precision=Precision(param_dtype=float16), *",
            "precision=Precision(param_dtype=bfloat16), *",
        ),
        why=IN_LOW_PRECISION,
    ),
)

TWO_D: tuple[Deviation, ...] = (
    Deviation(
        claims=expand(
            "two_d/test_placement.py::*uneven*{2,3}-ranks]",
            "two_d/test_placement.py::*[uneven]",
            "two_d/test_training.py::test_parameters_may_be_divided_twice_along_any_dim[1]",
        ),
        why="a dim other than 0 that the ranks do not divide evenly is refused",
    ),
    Deviation(
        claims=("two_d/test_clipping.py::test_an_inf_on_one_rank_stops_the_step_of_all[*-2x1x2]",),
        why="ranks agree inside a replica only",
    ),
    Deviation(
        claims=("two_d/test_training.py::test_a_copy_trains_as_its_original*",),
        why="sharded models cannot be copied with deepcopy",
        issue=149138,
    ),
)

DEVIATIONS = (
    *(*FSDPS, *DTENSOR_NORMS, *AMP_SCALER, *CORE, *outside.FSDP2, *refusals.FSDP2),
    *(*REPLICATE, *SCALER, *MIXED, *TWO_D),
)
