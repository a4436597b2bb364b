"""Where torch's `DistributedDataParallel` is known to break claims of the suites."""

from lockstep.conformance.deviations.deviation import Deviation, expand
from lockstep.conformance.deviations.shared import (
    AGAIN,
    AMP_SCALER,
    BACKS_OFF_TO_ZERO,
    IN_LOW_PRECISION,
    ONE_RANK,
    UNREDUCED,
)

_UNUSED = "all parameters must get a gradient in each step, unless find_unused_parameters is set"
_REENTRANT = (
    "a parameter that reentrant checkpointing uses more than once is refused, or its gradient is wrong"
)

OWN: tuple[Deviation, ...] = (
    Deviation(
        claims=("core/test_outside.py::test_the_loss_may_have_a_sparse_gradient_*[without_its_unit]",),
        cases=("*",),
        why="a sparse gradient of a parameter whose module has dense ones is refused",
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_two_backwards_over_one_graph_give_exactly_twice[NO_SHARD-*",
        ),
        cases=("offload=False, precision=Precision(), *",),
        why=AGAIN,
    ),
    Deviation(
        claims=("core/test_accumulation.py::test_several_forwards_may_go_backward_one_by_one[NO_SHARD-*",),
        why=AGAIN,
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_a_parameter_may_be_used_in_*[NO_SHARD-*-[(0,), (0,), (0, 1)]]",
        ),
        cases=("offload=False, precision=Precision(), sync=True",),
        why=_UNUSED,
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_a_parameter_may_be_used_in_*[NO_SHARD-*-[(0, 1), (0,), (0,)]]",
            "core/test_accumulation.py::test_a_parameter_may_be_used_in_*[NO_SHARD-*-[(0,), (1,), (0,)]]",
        ),
        cases=("offload=False, precision=Precision(), *",),
        why=_UNUSED,
    ),
    Deviation(
        claims=(
            "core/test_accumulation.py::test_a_synced_backward_reduces_gradients_of_idle_*[NO_SHARD-*-no_offload]",
            "core/test_accumulation.py::test_unsynced_gradients_survive_a_conversion_*[NO_SHARD-*",
        ),
        why=_UNUSED,
    ),
    Deviation(
        claims=("core/test_shapes.py::test_gradient_reaches_the_input_through_a_wholly_frozen_*[NO_SHARD]",),
        why="a model without any parameter to train is refused",
    ),
    Deviation(
        claims=expand(
            "core/test_shapes.py::test_{gradients,models}_*[{odd_shapes,thawing,skipping}*",
            "core/test_shapes.py::test_four_*[odd_shapes*",
            "core/test_shapes.py::test_frozen_*[thawing*",
        ),
        cases=("front=NO_SHARD-flat", "front=NO_SHARD-orig"),
        why=_UNUSED,
    ),
    Deviation(
        claims=("core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_last_step[NO_SHARD-*",),
        cases=("*",),
        why=_UNUSED,
    ),
    Deviation(
        claims=("core/test_evaluation.py::test_unused_gathers_serve_no_later_*[NO_SHARD-*",), why=_UNUSED
    ),
    Deviation(
        claims=expand(
            "core/test_shapes.py::test_{gradients,models}_*[checkpointed_{,inside_a_unit_}reentrant*"
        ),
        cases=("front=NO_SHARD-flat", "front=NO_SHARD-orig"),
        why=_REENTRANT,
    ),
    Deviation(
        claims=("core/test_checkpointing.py::test_a_tied_weight_is_counted_once_*[NO_SHARD-*-reentrant]",),
        why=_REENTRANT,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_kept_weight_that_is_read_later_*[checkpointed_reentrant-*",),
        cases=("front=NO_SHARD-flat", "front=NO_SHARD-orig"),
        why=_REENTRANT,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[checkpointed_with_the_unit-*",
            "core/test_outside.py::test_a_frozen_weight_that_is_read_later_*[checkpointed_with_the_unit]",
        ),
        cases=("front=NO_SHARD-flat", "front=NO_SHARD-orig"),
        why=_UNUSED,
    ),
    Deviation(
        claims=("core/test_clipping.py::test_unreduced_gradients_are_refused[NO_SHARD]",), why=UNREDUCED
    ),
    Deviation(
        claims=("core/test_collectives.py::test_one_rank_communicates_nothing[NO_SHARD-flat-fp32]",),
        why=ONE_RANK,
    ),
    Deviation(
        claims=(
            "core/test_scale.py::test_making_units_takes_no_operations_for_each_rank[NO_SHARD-orig-*-of-1024]",
        ),
        why="shapes of parameters are compared by a gather into a tensor for each rank",
    ),
    Deviation(
        claims=(
            "core/test_states.py::test_a_step_after_save_and_load_has_the_same_bits[NO_SHARD-*-3-ranks]",
        ),
        why="buckets are rebuilt after the first step, so that three ranks are added in another order",
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_low_precision_gradients_are_summed*[NO_SHARD-*",),
        cases=("precision=Precision(), *offload=False",),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=("grad_scaler/test_gradients.py::test_an_unsharded_sparse_gradient_unscales_*",),
        why="ranks do not agree on what the scaler finds in gradients that only one rank has",
    ),
    BACKS_OFF_TO_ZERO,
)

DEVIATIONS = OWN + AMP_SCALER
