"""What clipping breaks: of FSDP1, and of DTensors whichever engine made them."""

from harness.conformance.deviations.deviation import Deviation

_NO_INF_NORM = "an empty shard has no infinity norm"

NAN = Deviation(
    claims=(
        "core/test_clipping.py::test_a_nonfinite_gradient_in_one_shard*[nan-inf-FULL_SHARD]",
        "core/test_clipping.py::test_a_nonfinite_gradient_in_one_shard*[nan-inf-SHARD_GRAD_OP]",
    ),
    why="the largest norm of all ranks is taken by gloo, which has no regard to NaN",
)

DTENSOR_NORMS: tuple[Deviation, ...] = (
    NAN,
    Deviation(
        claims=(
            "core/test_clipping.py::test_norm_and_clipped_gradients*-FULL_SHARD-3-ranks]",
            "core/test_clipping.py::test_norm_and_clipped_gradients*-SHARD_GRAD_OP-3-ranks]",
        ),
        points=("norm_type=inf*",),
        why=_NO_INF_NORM,
    ),
    Deviation(
        claims=("core/test_clipping.py::test_a_rank_without_elements_takes_part*(1,)-*-ranks]",),
        points=("strategy=FULL_SHARD, norm_type=inf", "strategy=SHARD_GRAD_OP, norm_type=inf"),
        why=_NO_INF_NORM,
    ),
)
