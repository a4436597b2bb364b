"""Where torch's `FullyShardedDataParallel` is known to break claims about the wrapper's own arguments."""

from lockstep.conformance.deviations.deviation import Deviation
from lockstep.conformance.deviations.shared import UNREDUCED

_P, _W, _R, _D = (f"core/test_{name}.py::" for name in ("policies", "wrapper", "refusals", "deferred"))
_UNCHECKED = (
    *("strategy", "offload", "precision", "prefetch", "init", "no_module", "unit_again", "no_forward"),
    *("mark", "param_dtype", "reduce_dtype", "buffer_dtype", "device_name", "device_number", "device_type"),
    *("group", "pair", "not_in_group", "axes", "lazy", "in_a_unit", "again"),
    *("tied", "tied_without_values", "tied_below_ignored"),
)
_CASES_CONVERTED = ("what=apply*", "what=convert*")


FSDP1: tuple[Deviation, ...] = (
    Deviation(
        claims=(f"{_P}test_a_policy_chooses_the_units*",),
        cases=("policy=size",),
        why="a unit that is at two places counts as two",
    ),
    Deviation(
        claims=(f"{_P}test_units_made_by_hand_stay_*",),
        why="a policy is refused where there is a unit already",
    ),
    Deviation(
        claims=(f"{_P}test_the_innermost_mark_counts*",),
        why="contexts of enable_wrap are not nested, and one that raises goes on",
    ),
    Deviation(
        claims=(f"{_W}test_an_attribute_that_is_set_*",),
        why="what is set is the wrapper's own, and the module has another",
    ),
    Deviation(
        claims=(f"{_W}test_a_printed_model_says_*",), why="what is printed does not say how it is sharded"
    ),
    Deviation(
        claims=(f"{_W}test_a_sharded_model_is_neither_*[copy*",),
        why="a copy shares the state of its original",
    ),
    Deviation(
        claims=(f"{_W}test_functions_are_applied_to_full_parameters[orig]",),
        why="full parameters that are shown have the gradients of shards",
    ),
    Deviation(
        claims=(f"{_W}test_gradients_are_shown_on_the_cpu_*",),
        why="full gradients are not moved to the CPU",
    ),
    Deviation(
        claims=(f"{_W}test_a_debugger_may_look_at_*",),
        why="an attribute that is not there is looked for without end",
        run=False,
    ),
    Deviation(
        claims=(f"{_W}test_without_a_device_arguments_stay_*",),
        why="without a device it wants an accelerator",
    ),
    Deviation(
        claims=(f"{_P}test_a_function_is_asked_of_each_module_*",),
        why="a container that cannot be called is asked of, too, and a module at two places twice",
    ),
    Deviation(
        claims=(f"{_P}test_a_warning_names_the_line_*",), why="the line that it names is one of torch's own"
    ),
    Deviation(
        claims=(f"{_P}test_a_policy_may_give_ranks_in_the_other_way*",),
        cases=("*",),
        why="the group and the mesh are both passed on, which is refused",
    ),
    Deviation(claims=(f"{_W}test_what_no_sync_has_left_is_not_clipped*",), why=UNREDUCED),
    Deviation(
        claims=(f"{_W}test_full_parameters_are_shown_as_the_flags_say*",),
        cases=("*offload_to_cpu*",),
        why="full parameters that are on the CPU already are freed as if they were a copy",
        run=False,
    ),
    Deviation(
        claims=(f"{_W}test_a_copy_trains_as_its_original_*",),
        why="it cannot be copied in depth",
        issue=149138,
    ),
    Deviation(
        claims=(f"{_R}test_bad_arguments_are_refused*",),
        cases=tuple(f"what={case}" for case in _UNCHECKED),
        why="arguments of another kind are not checked, or fail where they are used",
    ),
    Deviation(
        claims=(f"{_R}test_what_is_refused_is_named*",), cases=("*",), why="errors do not name the parameter"
    ),
    Deviation(
        claims=(
            f"{_R}test_replicas_of_hosts_of_unknown_size_are_refused*",
            f"{_R}test_a_warning_says_that_a_model_ignores_itself*",
        ),
        why="it is not checked",
    ),
    Deviation(
        claims=(f"{_R}test_full_parameters_keep_their_shape*",),
        cases=("*with_grads=False",),
        why="it is not checked",
    ),
    Deviation(
        claims=(f"{_R}test_what_cannot_be_trained_is_refused_by_the_step*",),
        cases=("what=made_before",),
        why="an optimizer that was made before idles",
    ),
    Deviation(
        claims=(f"{_R}test_what_cannot_be_trained_is_refused_by_the_step*",),
        cases=("what=unreduced",),
        why="what the optimizer finds is that shapes do not fit",
    ),
    Deviation(
        claims=(f"{_D}test_each_module_initialises_itself_*-one_unit]",), why="parents come before children"
    ),
    Deviation(
        claims=(f"{_D}test_a_function_initialises_what_has_values_*",),
        why="the function is called with modules that have no parameters, too",
    ),
    Deviation(
        claims=(f"{_D}test_what_has_values_keeps_them*", f"{_D}test_a_function_leaves_what_has_values*"),
        why="what has values beside a parameter on meta loses them",
    ),
    Deviation(claims=(f"{_D}test_tied_parameters_stay_tied*",), why="tied parameters come apart on meta"),
    Deviation(
        claims=(f"{_D}test_what_cannot_be_initialised_*",),
        cases=("*",),
        why="what cannot be initialised is no error, or one that does not name it",
    ),
    Deviation(
        claims=(f"{_R}test_ranks_that_ignore_different_parameters_*",), why="what ranks shard is not compared"
    ),
    Deviation(
        claims=(f"{_R}test_states_are_left_alone_*",),
        cases=_CASES_CONVERTED,
        why="a conversion, and a function that is applied, are not refused there",
    ),
    Deviation(
        claims=(f"{_R}test_full_parameters_are_left_alone_*",),
        cases=("what=forward", "what=copy", "what=load_*", *_CASES_CONVERTED),
        why="full parameters are not guarded",
    ),
    Deviation(claims=(f"{_R}test_second_derivatives_*",), why="second derivatives read what has been freed"),
    Deviation(
        claims=(f"{_R}test_a_conversion_between_forward_and_backward_*",), why="a conversion is not noticed"
    ),
)
