"""What more than one of torch's engines breaks, for the same reason."""

from harness.conformance.deviations.deviation import Deviation

IN_LOW_PRECISION = "gradients are added and divided in low precision, and rounded each time"
AGAIN = "a backward that no forward of its own came before is not reduced as it should be"
UNREDUCED = "what no_sync has left is clipped like any gradient"
FP16_REFUSED = "fp16 gradients are refused"
ONE_RANK = "a group of one rank reduces all the same"
KEPT = "full parameters that are kept after forward are kept without autograd, too, and used again"

# `torch.amp.GradScaler`, which FSDP2 and DDP are used with
AMP_SCALER: tuple[Deviation, ...] = (
    Deviation(
        claims=(
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_grad_scaling[dtype0]",
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_grad_scaling[dtype1]",
        ),
        why="a scaled loss in low precision comes out in fp32",
    ),
    Deviation(
        claims=(
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_scaling_unscaling_sparse[dtype0]",
            "grad_scaler/test_grad_scaler.py::TestShardGradScaler::test_scaling_unscaling_sparse_finds_inf*",
        ),
        why=FP16_REFUSED,
        issue=74739,
    ),
)

# FSDP1 and FSDP2
FSDPS: tuple[Deviation, ...] = (
    Deviation(
        claims=("core/test_reduction.py::test_sparse_gradients_are_reduced*",),
        why="sparse gradients are refused",
    ),
    Deviation(
        claims=(
            "core/test_collectives.py::test_evaluation_gathers_each_group_*-SHARD_GRAD_OP-*",
            "core/test_collectives.py::test_a_forward_without_backward_is_forgotten*[SHARD_GRAD_OP-*",
            "core/test_checkpointing.py::test_a_checkpointed_unit_is_gathered*[SHARD_GRAD_OP-*-reentrant]",
        ),
        why=KEPT,
    ),
    Deviation(
        claims=(
            "core/test_hybrid.py::test_a_mean_within_the_range_of_its_dtype_*[dtype0-*-4-ranks]",
            "mixed_precision/test_numerics.py::test_the_mean_of_fp16_gradients_whose_sum_*[*-4-ranks]",
        ),
        why="fp16 gradients of four ranks overflow: they are only halved before they are added",
    ),
    Deviation(
        claims=("mixed_precision/test_numerics.py::test_small_terms_count_together[*-4-ranks]",),
        why=IN_LOW_PRECISION,
    ),
    Deviation(
        claims=("mixed_precision/test_casting.py::test_all_but_floating_point_tensors_come_through*",),
        why="containers are copied, whatever is in them",
    ),
    Deviation(
        claims=("grad_scaler/test_scale.py::test_it_never_backs_off_to_zero*",),
        why="the scale backs off to zero",
    ),
)
