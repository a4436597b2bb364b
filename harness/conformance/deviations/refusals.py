"""Where torch's engines are known to take bad input that the suites want refused."""

from lockstep.conformance.deviations.deviation import Deviation

_SETTINGS = "grad_scaler/test_refusals.py::test_settings_that_cannot_scale_are_refused*"
_OUTSIDE = "grad_scaler/test_refusals.py::test_a_rank_outside_of_the_group_is_named*"
_RUINS = "grad_scaler/test_refusals.py::test_what_would_ruin_the_scale_is_refused*"
_ALONE = "grad_scaler/test_grad_scaler.py::test_without_ranks_to_agree_with_*"
_PLACE = Deviation(
    claims=("grad_scaler/test_refusals.py::test_a_scale_in_the_place_of_the_device_*",),
    why="what a scaler is given as its device is not checked",
)
_NO_CHECK = "what a scale may be is not checked"
_F2 = "replicate/test_refusals.py::"


def _cases(*names: str) -> tuple[str, ...]:
    return tuple(f"what={name}" for name in names)


FSDP1_SCALER: tuple[Deviation, ...] = (
    _PLACE,
    Deviation(claims=(_ALONE,), why="the error is that of a collective, and does not name the argument"),
    Deviation(claims=(_OUTSIDE,), why="what process_group is is not checked"),
    Deviation(
        claims=(_SETTINGS,),
        cases=_cases("zero", "inf", "nan", "negative", "group", "not_in_group"),
        why=_NO_CHECK,
    ),
    Deviation(
        claims=(_RUINS,), cases=_cases("new_scale", "new_tensor", "state", "state_inf", "text"), why=_NO_CHECK
    ),
)

# `torch.amp.GradScaler`, which FSDP2 and DDP are used with; adapters drop a process group.
AMP_SCALER: tuple[Deviation, ...] = (
    _PLACE,
    Deviation(claims=(_OUTSIDE, _ALONE), why="a scaler has no process group"),
    Deviation(claims=(_SETTINGS,), cases=_cases("zero", "inf", "nan", "negative"), why=_NO_CHECK),
    Deviation(
        claims=(_SETTINGS,),
        cases=_cases("group", "group_in_pair", "not_in_group"),
        why="a scaler has no process group",
    ),
    Deviation(
        claims=(_RUINS,),
        cases=_cases("new_scale", "new_tensor", "state", "state_inf", "closure", "text"),
        why=_NO_CHECK,
    ),
)

FSDP2: tuple[Deviation, ...] = (
    Deviation(
        claims=(f"{_F2}test_bad_arguments_are_refused*",),
        cases=_cases(
            *("nothing", "twice", "no_module", "group_again", "mesh", "policy", "offload", "param_dtype"),
            *("reduce_dtype", "output_dtype", "ignored", "ignored_kind", "lazy", "integers", "dtypes"),
            *("subclass", "devices", "partial", "attribute", "divisor", "in_a_unit"),
        ),
        why="arguments of another kind are not checked, or fail where they are used",
    ),
    Deviation(
        claims=(f"{_F2}test_what_is_refused_is_named*",), cases=("*",), why="errors do not name the parameter"
    ),
    Deviation(
        claims=(f"{_F2}test_ranks_that_freeze_different_parameters_*",),
        why="what ranks shard is not compared",
    ),
    Deviation(
        claims=(f"{_F2}test_a_dim_that_two_axes_divide_unevenly_*",),
        why="a placement is given that does not say which rank has what",
    ),
    Deviation(
        claims=(
            f"{_F2}test_states_are_left_alone_*",
            f"{_F2}test_an_optimizer_of_what_gets_no_gradient_*",
            f"{_F2}test_parameters_that_were_changed_by_force_*",
        ),
        cases=("*",),
        why="it is not refused, or fails later",
    ),
    Deviation(
        claims=(f"{_F2}test_a_sharded_model_is_neither_pickled_*",),
        cases=("way=save",),
        why="a sharded model is saved",
    ),
    Deviation(
        claims=(
            f"{_F2}test_second_derivatives_*",
            f"{_F2}test_a_conversion_between_forward_and_backward_*",
            f"{_F2}test_a_forward_without_values_*",
        ),
        why="it is not refused, or fails by an error that does not say so",
    ),
    Deviation(
        claims=(f"{_F2}test_what_was_left_unfinished_may_be_forgotten*",),
        why="gradients that were not reduced are not forgotten",
    ),
)
