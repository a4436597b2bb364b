"""What DTensors break where process groups come and go, whichever engine made them."""

from harness.conformance.deviations.deviation import Deviation

DTENSOR_MESHES: tuple[Deviation, ...] = (
    Deviation(
        claims=(
            "properties/test_resume.py::test_the_step_after_a_load_elsewhere_has_the_same_bits",
            "properties/test_training.py::test_losses_gradients_and_parameters_are_*[4-ranks]",
        ),
        why="a DTensor that is detached asks the groups of an equal mesh before, though they are destroyed",
        run=False,  # drawn models may do without what brings it up
    ),
)
