"""Where torch's `fully_shard` and `replicate` are known to break claims of the suites."""

from harness.adapters.deviations.deviation import Deviation

_SUMS = "gloo adds in low precision, and rounds after each of three and more ranks"
_PINNED = "CPUOffloadPolicy pins memory unless told, which raises on a host without accelerator"
_EMPTY = "a parameter without elements is refused when gradients are reduced"

DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        claims=(
            "replicate/test_accumulation.py::test_a_parameter_may_be_used_in_*[*-[(0,), (0,), (0, 1)]]",
            "replicate/test_accumulation.py::test_a_parameter_may_be_used_in_*[*-units-[(0,), (1,), (0,)]]",
        ),
        points=(
            "policy=(torch.bfloat16_torch.float32), sync=False",
            "policy=(None_torch.bfloat16), sync=False",
        ),
        why="an accumulated gradient and a fresh one in another dtype meet in one group, and are refused",
        issue=196996,
    ),
    Deviation(
        claims=(
            "replicate/test_accumulation.py::test_parameters_that_are_always_kept_are_new_after_the_step*",
        ),
        why="parameters kept after backward are those from before the step",
    ),
    Deviation(
        claims=(
            "replicate/test_unshard.py::test_what_was_there_when_parameters_change*[fully_shard-on_its_way*",
        ),
        why="what is being gathered when parameters change is computed with",
    ),
    Deviation(
        claims=("replicate/test_calls.py::test_an_optimizer_built_after_a_forward_moves_the_weights*",),
        why="after a forward alone the root shows full parameters, so the optimizer has tensors nobody reads",
        issue=149205,
    ),
    Deviation(
        claims=(
            "replicate/test_calls.py::test_an_average_of_a_model_follows_its_steps*",
            "replicate/test_hybrid.py::test_a_copy_waits_inside_a_replica_as_it_was_told",
            "replicate/test_reduction.py::test_a_copy_divides_as_its_original_and_leaves_that_alone*",
        ),
        why="models in hand cannot be copied with deepcopy",
        issue=149138,
    ),
    Deviation(
        claims=("replicate/test_collectives.py::test_one_rank_alone_sends_nothing[replicate]",),
        why="a replica of one rank calls all_reduce all the same",
    ),
    Deviation(
        claims=("replicate/test_exceptions.py::test_an_exception_is_survived_by_the_next_step*in_backward]",),
        points=("place=''", "place=module.0", "place=module.1*", "place=module.2"),
        why="what a failed backward had reduced is added to the next step's",
    ),
    Deviation(
        claims=("replicate/test_exceptions.py::test_parameters_are_sharded_ones_after_an_exception*",),
        why="parameters of the groups under way stay in full after an exception",
    ),
    Deviation(
        claims=(
            "replicate/test_shapes.py::test_a_parameter_visible_to_two_groups_is_an_error_that_names_it*",
        ),
        why="the error names the parameter in one of the two groups only",
    ),
    Deviation(
        claims=(
            "replicate/test_hybrid.py::test_a_factor_that_is_told_divides_the_sum_over_both_axes[fp32]",
            "replicate/test_hybrid.py::test_a_factor_that_is_told_divides_the_sum_over_both_axes[bf16]",
            "replicate/test_reduction.py::test_a_factor_that_is_told_*[fully_shard-fp32-2.0-3-ranks]",
            "replicate/test_reduction.py::test_a_factor_that_is_told_*[fully_shard-fp32-3.0-2-ranks]",
            "replicate/test_reduction.py::test_a_factor_that_is_told_*[fully_shard-bf16-2.0-3-ranks]",
            "replicate/test_reduction.py::test_a_factor_that_is_told_*[fully_shard-bf16-3.0-2-ranks]",
        ),
        why="gloo has no sum that multiplies before, which a factor other than the number of ranks asks for",
    ),
    Deviation(
        claims=(
            "replicate/test_reduction.py::test_a_factor_that_is_told_divides_the_sum[*-fp16-*-1-rank]",
            "replicate/test_reduction.py::test_a_factor_that_is_told_divides_the_sum[replicate-fp16-*-ranks]",
        ),
        why="where gradients are not scattered, a factor in fp16 divides twice",
    ),
    Deviation(
        claims=(
            "replicate/test_reduction.py::test_low_precision_sums_are_rounded_once[*-3-ranks]",
            "replicate/test_reduction.py::test_low_precision_sums_are_rounded_once[*-4-ranks]",
            "replicate/test_mixed_precision.py::*::test_compute_dtype[*-4-ranks]",
            "replicate/test_mixed_precision.py::*::test_reduce_dtype[reduced_in_bf16-*-4-ranks]",
        ),
        why=_SUMS,
    ),
    Deviation(claims=("replicate/test_shapes.py::*-odd*",), why=_EMPTY),
    Deviation(claims=("replicate/test_shapes.py::test_models_train_the_same_offloaded*",), why=_PINNED),
)
