"""Where torch's sharding engines are known to break claims on weights that are read outside their unit."""

from lockstep.conformance.deviations.deviation import Deviation, expand
from lockstep.conformance.deviations.shared import ONE_SHARD, PINNED

_BETWEEN = "the gradient of a read between two calls is written over by those of the calls"
_INNER_BACKWARD = (
    "reentrant checkpointing backs up into a weight before the backward of its unit, which raises"
)
_UNNAMED = "a weight whose memory is freed is read as it is; an error, if there is one, names no parameter"
_OTHERS = "self.parameters() gives others in a forward than the modules compute with"
_ONE_WHOLE = "a group of one rank is never resharded, so that its weights can be read"
_CAST = "the copy of a weight in low precision is freed after each forward of its unit, whatever the strategy"
_ONE_BACKWARD = "a backward frees what another of the same unit, that is still to come, reads outside"
_MIXED = "the error is of a DTensor that meets a tensor, and names no parameter"
_NOT_REDUCED = "a gradient that comes to the weight itself is not reduced"
_SPARSE = "a sparse gradient of a parameter is taken for a dense one"

_EARLY = Deviation(
    claims=("core/test_outside.py::test_a_gradient_that_comes_to_a_shard_before_any_forward_*",),
    cases=("*",),
    why="each rank keeps the gradient of its own shard",
)

FSDP1: tuple[Deviation, ...] = (
    _EARLY,
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[between_two_calls-*",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[reduced_in_bf16-between_two_calls-*",
        ),
        cases=("front=NO_SHARD-orig",),
        why=_BETWEEN,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[between_two_calls-1-rank]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[reduced_in_bf16-between_two_calls-1-rank]",
        ),
        cases=("front=SHARD_GRAD_OP-orig",),
        why=_BETWEEN,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_kept_weight_that_is_read_later_*[checkpointed_reentrant-*",),
        cases=("front=SHARD_GRAD_OP-flat", "front=NO_SHARD-flat"),
        why=_INNER_BACKWARD,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[checkpointed_reentrant-*-ranks]",
        ),
        cases=("front=SHARD_GRAD_OP-orig",),
        why=_INNER_BACKWARD,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_whole_weight_may_be_read_before_its_unit[before_its_unit--*",
            "core/test_outside.py::test_a_whole_weight_may_be_read_early_*[before_its_unit]",
        ),
        cases=("front=NO_SHARD-flat",),
        why="before its unit runs, a weight is a view of the last forward, whose base the step has changed",
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_whole_weight_may_be_read_before_its_unit[before_its_unit--*-ranks]",
            "core/test_outside.py::test_a_whole_weight_may_be_read_early_*[before_its_unit]",
        ),
        cases=("front=NO_SHARD-orig",),
        why="the gradient of a read before the unit comes after its reduction, and is not reduced",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_whole_weight_may_be_recomputed_with_*",),
        cases=("front=NO_SHARD-*",),
        why="a gradient is reduced only if it comes from the forward of the unit",
    ),
    Deviation(
        claims=("core/test_outside.py::test_each_backward_of_two_forwards_*",),
        cases=("front=SHARD_GRAD_OP-*",),
        why=_ONE_BACKWARD,
    ),
    Deviation(
        claims=("core/test_outside.py::test_an_evaluation_may_read_a_kept_weight*",),
        cases=("front=SHARD_GRAD_OP-orig",),
        why="without autograd a weight is shown as a shard when the forward of its unit ends",
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[decay_term_of_all-*",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[reduced_in_bf16-decay_term_of_all-*",
            "core/test_outside.py::test_a_frozen_weight_that_is_read_later_*[decay_term_of_all]",
        ),
        cases=("front=NO_SHARD-orig",),
        why=_OTHERS,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[decay_term_of_all-*-ranks]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*-decay_term_of_all-*-ranks]",
            "core/test_outside.py::test_a_frozen_weight_that_is_read_later_*[decay_term_of_all]",
        ),
        cases=("front=SHARD_GRAD_OP-flat",),
        why=_OTHERS,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_kept_weight_that_is_read_later_*[decay_term_of_all-1-rank]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[reduced_in_bf16-decay_term_of_all-1-rank]",
        ),
        cases=("front=SHARD_GRAD_OP-orig",),
        why=_OTHERS,
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}"
            "-{tied_head,tied_head_by_method,decay_term_of_all,detached}-1-rank]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}"
            "-{between_two_calls,checkpointed,checkpointed_with_the_unit}-1-rank]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}-between_two_calls-2-ranks]",
        ),
        cases=("*",),
        why=_CAST,
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}"
            "-{tied_head,tied_head_by_method,decay_term_of_all,detached}-2-ranks]",
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}"
            "-{checkpointed,checkpointed_with_the_unit}-2-ranks]",
            "core/test_outside.py::test_a_whole_weight_that_is_cast_*[detached_before_its_unit]",
        ),
        cases=("front=NO_SHARD-*",),
        why=_CAST,
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}-in_a_hook-*"
        ),
        cases=("front=NO_SHARD-flat",),
        why=_CAST,
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}-in_a_hook-1-rank]"
        ),
        cases=("front=SHARD_GRAD_OP-flat",),
        why=_CAST,
    ),
    # These end the process.
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_kept_weight_is_read_in_*[{bf16,bf16_reduced_in_fp32}"
            "-{tied_head_by_call,decay_term}-*",
            "core/test_outside.py::test_a_whole_weight_that_is_cast_*[before_its_unit]",
        ),
        why=_CAST,
        run=False,
    ),
    Deviation(
        claims=("core/test_outside.py::test_replicas_that_keep_*-2-ranks]",),
        cases=("*",),
        why=ONE_SHARD,
    ),
    Deviation(
        claims=("core/test_outside.py::test_replicas_that_keep_*[decay_term_of_all-*-4-ranks]",),
        cases=("*use_orig_params=False",),
        why=_OTHERS,
    ),
    Deviation(
        claims=("core/test_outside.py::test_replicas_that_keep_*[checkpointed_reentrant-*-4-ranks]",),
        cases=("*",),
        why=_INNER_BACKWARD,
    ),
    Deviation(
        claims=("core/test_outside.py::test_replicas_that_free_*[*-HYBRID_SHARD-2-ranks]",), why=_ONE_WHOLE
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_replicas_that_free_*[{tied_,detached,between,checkpointed,before,decay_term_of}*-HYBRID_SHARD-4-ranks]",
        ),
        why=_UNNAMED,
    ),
    # To read freed memory may end the process.
    Deviation(
        claims=expand(
            "core/test_outside.py::test_replicas_that_free_*[{decay_term,in_a_hook}-HYBRID_SHARD-4-ranks]"
        ),
        why=_UNNAMED,
        run=False,
    ),
    Deviation(
        claims=expand(
            "core/test_outside.py::test_a_weight_that_is_freed_*[{decay_term,in_a_hook}-2-ranks]",
            "core/test_outside.py::test_a_gradient_that_comes_to_a_shard_*[decay_in_the_loss-*",
        ),
        cases=("front=FULL_SHARD-flat",),
        why=_UNNAMED,
        run=False,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_weight_that_is_freed_*-1-rank]",),
        cases=("front=FULL_SHARD-*",),
        why=_ONE_WHOLE,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_weight_that_is_freed_*-2-ranks]",),
        cases=("front=FULL_SHARD-*",),
        why=_UNNAMED,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_sharded_weight_is_refused_before_its_unit*",
            "core/test_outside.py::test_what_reads_a_freed_weight_is_named_*",
        ),
        cases=("front=FULL_SHARD-*", "front=SHARD_GRAD_OP-*"),
        why=_UNNAMED,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_gradient_that_comes_to_a_shard_is_refused*",),
        cases=("front=SHARD_GRAD_OP-*",),
        why="full parameters that are kept for backward are shown, and the loss can read them",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_gradient_that_comes_to_a_shard_*[decay_in_the_loss-*",),
        cases=("front=FULL_SHARD-orig",),
        why="each rank adds its own shard's gradient to the reduced one, as if all had the same loss",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_whole_weight_that_the_loss_alone_reads_*",),
        cases=("front=NO_SHARD-flat, *",),
        why="a view of the flat parameter that the optimizer has stepped is refused",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_whole_weight_that_the_loss_alone_reads_*[head_in_the_loss]",),
        cases=("front=NO_SHARD-orig, *",),
        why=_NOT_REDUCED,
    ),
    Deviation(
        claims=("core/test_outside.py::test_the_loss_may_have_a_sparse_gradient_*[body]",),
        cases=("*",),
        why=_SPARSE,
    ),
    Deviation(claims=("core/test_outside.py::test_a_sparse_gradient_follows_*",), why=_SPARSE),
    Deviation(
        claims=("core/test_outside.py::test_a_parameter_that_is_saved_alone_*",),
        cases=("front=FULL_SHARD-flat",),
        why="a flat parameter that was saved and loaded cannot be sharded",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_refused_gradient_of_a_flat_parameter_names_whose_it_is*",),
        why="the error is of shapes that do not fit, and names no parameter",
    ),
)

FSDP2: tuple[Deviation, ...] = (
    _EARLY,
    Deviation(
        claims=("core/test_outside.py::test_each_backward_of_two_forwards_*",),
        cases=("*",),
        why=_ONE_BACKWARD,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_whole_weight_may_be_read_before_its_unit*",
            "core/test_outside.py::test_a_whole_weight_may_be_read_early_*",
            "core/test_outside.py::test_a_whole_weight_may_be_recomputed_with_*",
        ),
        cases=("*",),
        why="outside forward and backward the weights of replicas are DTensors, which meet no tensor",
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_a_weight_that_is_freed_is_refused_by_its_name*",
            "core/test_outside.py::test_what_reads_a_freed_weight_is_named_*",
            "core/test_outside.py::test_a_sharded_weight_is_refused_before_its_unit*",
            "core/test_outside.py::test_an_offloaded_weight_that_is_freed_is_refused*",
            "core/test_outside.py::test_a_whole_weight_that_is_cast_is_refused_before_its_unit*",
        ),
        cases=("*",),
        why=_MIXED,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_whole_weight_that_the_loss_alone_reads_*[head_in_the_loss]",),
        cases=("*",),
        why=_NOT_REDUCED,
    ),
    Deviation(
        claims=(
            "core/test_outside.py::test_replicas_that_free_*",
            "replicate/test_outside.py::test_what_neighbours_hold_between_them_is_refused*",
        ),
        why=_MIXED,
    ),
    Deviation(
        claims=("core/test_outside.py::test_an_offloaded_weight_that_is_kept_is_read_as_in_ddp*",),
        cases=("front=replicate, *",),
        why=PINNED,
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_gradient_that_comes_to_a_shard_is_refused*",),
        cases=("front=SHARD_GRAD_OP-*",),
        why="after a forward unsharded parameters are visible, and the loss can read them",
    ),
    Deviation(
        claims=("core/test_outside.py::test_a_gradient_that_comes_to_a_shard_is_refused*",),
        cases=("front=FULL_SHARD-*", "front=fully_shard"),
        why="each rank adds its own gradient of a DTensor to the reduced one, as if those of all were equal",
    ),
)
