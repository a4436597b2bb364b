"""Deviations that several engines share, for the same reason."""

from lockstep.conformance.deviations import refusals
from lockstep.conformance.deviations.deviation import SHARDED, Deviation, expand

IN_LOW_PRECISION = "gradients are added and divided in low precision, and rounded each time"
AGAIN = "a second backward after one forward is not reduced as it should be"
UNREDUCED = "what no_sync has left is clipped like any gradient"
FP16_REFUSED = "fp16 gradients are refused"
ONE_RANK = "a group of one rank reduces all the same"
OTHER_CLASS = "a container of another class comes as a plain one"
KEPT = "unsharded parameters are retained after a forward without autograd, too, and used again"
ONE_SHARD = "where a replica is one rank, gradients are not averaged across replicas"
PINNED = "CPUOffloadPolicy pins memory by default, which raises on a host without accelerator"

BACKS_OFF_TO_ZERO = Deviation(
    claims=("grad_scaler/test_scale.py::test_it_never_backs_off_to_zero*",),
    why="the scale backs off to zero",
)

# `torch.amp.GradScaler`, which FSDP2 and DDP are used with
AMP_SCALER: tuple[Deviation, ...] = (
    *refusals.AMP_SCALER,
    Deviation(
        claims=expand("grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_grad_scaling[dtype{0,1}]"),
        why="a scaled loss in low precision comes out in fp32",
    ),
    Deviation(
        claims=(
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_scaling_unscaling_sparse[dtype0]",
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_scaling_unscaling_sparse_finds_inf*",
            "grad_scaler/test_gradients.py::test_gradients_of_every_dtype_are_unscaled[*-dtype0-*",
            "grad_scaler/test_gradients.py::test_an_fp16_gradient_that_overflows_unscaled_stops_the_step*",
        ),
        why=FP16_REFUSED,
        issue=74739,
    ),
)

# FSDP1 and FSDP2
FSDPS: tuple[Deviation, ...] = (
    Deviation(
        claims=("core/test_states.py::test_ranks_that_shard_different_models_are_refused*",),
        why="what ranks shard is not compared",
    ),
    Deviation(
        claims=("core/test_reduction.py::test_sparse_gradients_are_reduced*",),
        why="sparse gradients are refused",
    ),
    Deviation(
        claims=(
            "core/test_collectives.py::test_evaluation_gathers_each_group_*[SHARD_GRAD_OP-*",
            "core/test_collectives.py::test_a_forward_without_backward_is_forgotten*[SHARD_GRAD_OP-*",
            "core/test_checkpointing.py::test_a_checkpointed_unit_is_gathered_*[SHARD_GRAD_OP-*-reentrant]",
        ),
        why=KEPT,
    ),
    Deviation(
        claims=(
            "core/test_hybrid.py::test_a_mean_within_the_range_of_its_dtype_*[dtype0-*-4-ranks]",
            "mixed_precision/test_numerics.py::test_the_mean_of_fp16_gradients_is_exact_*-4-ranks]",
        ),
        why="fp16 gradients of four ranks overflow: they are only halved before they are added",
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_small_terms_count_together[*-4-ranks]",),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=("mixed_precision/test_casting.py::test_arguments_without_floating_point_stay_*",),
        why="containers are copied, whatever is in them",
    ),
    BACKS_OFF_TO_ZERO,
)

# Clipping, by FSDP1 and by DTensors whichever engine made them
_NO_INF_NORM = "an empty shard has no infinity norm"

NAN = Deviation(
    claims=expand(f"core/test_clipping.py::test_all_ranks_see_a_nonfinite_gradient_*[{SHARDED}-*"),
    cases=("norm_type=inf, bad=nan",),
    why="gloo's maximum over ranks ignores NaN",
)

DTENSOR_NORMS: tuple[Deviation, ...] = (
    NAN,
    Deviation(
        claims=expand(f"core/test_clipping.py::test_norm_and_clipped_gradients*[{SHARDED}-*-3-ranks]"),
        cases=("norm_type=inf*",),
        why=_NO_INF_NORM,
    ),
    Deviation(
        claims=expand(f"core/test_clipping.py::test_a_rank_without_elements_takes_part[{SHARDED}-*-ranks]"),
        cases=("shape=(1_), norm_type=inf",),
        why=_NO_INF_NORM,
    ),
)

# DTensors where process groups come and go, whichever engine made them
DTENSOR_MESHES: tuple[Deviation, ...] = (
    Deviation(
        claims=(
            "properties/test_resume.py::test_the_step_after_a_load_elsewhere_has_the_same_bits",
            "properties/test_training.py::test_losses_gradients_and_parameters_are_*[4-ranks]",
        ),
        why="a detached DTensor uses the process groups of an earlier equal mesh, which are destroyed",
        run=False,  # drawn models may do without what brings it up
    ),
)
