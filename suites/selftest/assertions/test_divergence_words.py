"""The first difference of two recorded runs, or of two ranks, of events that a test makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.assertions.divergence import (
    Parting,
    Recording,
    TrainingRecorder,
    canonical_modules,
    describe,
    describe_ranks,
    first_parting,
    first_parting_of_ranks,
    outline,
    races,
    shortened,
)
from lockstep.recorders import Event, ExecutionLog


def event(kind: str, name: str = "w", value: Any = None, *, step: int = 0, **changes: Any) -> Event:
    tensor = value if value is None or isinstance(value, torch.Tensor) else torch.tensor(value)
    fields = {"number": 0, "line": "", "fingerprint": "" if tensor is None else str(tensor.tolist())}
    return Event(kind, name, step, value=tensor, **(fields | changes))


def parting(
    reference: list[Event],
    candidate: list[Event],
    tolerance: torch.dtype | None = None,
    *,
    scales: tuple[dict[int, float], dict[int, float]] = ({}, {}),
) -> Parting | None:
    """Return where two runs part, whose losses have these scales by step."""
    return first_parting(Recording(reference, scales[0]), Recording(candidate, scales[1]), tolerance)


# Between runs


def test_a_difference_has_its_place_values_and_the_last_agreement() -> None:
    shared = [event("output", "first", [1.0]), event("output", "unknown", [9.0], step=3)]
    ours = [*shared, event("output", "second", [[1.0, 2.0], [3.0, 4.0]], line="model.py:7")]
    theirs = [shared[0], event("output", "second", [[1.0, 2.0], [3.5, 4.25]], line="model.py:7")]
    assert parting(theirs, ours) == Parting(
        0,
        2,
        (
            "step 0, forward: output of module `second` at model.py:7",
            "  candidate 3 (float32 [2, 2]), reference 3.5 (float32 [2, 2]) at (1, 0)",
            "  differs in 2 / 4 (50.0%); greatest absolute difference: 0.5 (up to 1e-05 allowed);"
            " greatest relative difference: 0.1428571492433548 (up to 1.3e-06 allowed)",
            "  last agreement: step 0, forward: output of module `first`",
        ),
    )


def test_equal_runs_do_not_part() -> None:
    events = [event("output", "first", [1.0]), event("loss", "", 2.0)]
    assert parting(events, events) is None
    assert parting([], events) is None


def test_nothing_may_have_agreed_before() -> None:
    found = parting([event("loss", "loss", 1.0, step=2)], [event("loss", "loss", 2.0, step=2)])
    assert found is not None
    assert (found.step, found.place) == (2, 0)
    assert found.lines[0] == "step 2, forward: the loss"
    assert found.lines[1] == "  candidate 2 (float32 []), reference 1 (float32 [])"
    assert found.lines[2].startswith("  ")
    assert "Expected" not in found.lines[2]
    assert found.lines[3:] == ("  nothing before it was compared",)


def test_the_first_different_bits_within_the_tolerance_are_named() -> None:
    reference = [event("output", name, [1.0]) for name in "abc"]
    candidate = [event("output", "a", [1.0]), *(event("output", name, [1.0000001]) for name in "bc")]
    last = event("loss", "", 1.0), event("loss", "", 2.0)
    found = parting([*reference, last[0]], [*candidate, last[1]])
    assert found is not None
    assert found.lines[3:] == (
        "  last agreement: step 0, forward: output of module `c`",
        "  first different bits, within the tolerance: step 0, forward: output of module `b`",
    )
    other_dtype = [event("output", "a", torch.tensor([1.0], dtype=torch.float64), fingerprint="another")]
    found = parting([*reference[:1], last[0]], [*other_dtype, last[1]])
    assert found is not None
    assert found.lines[3:] == ("  last agreement: step 0, forward: output of module `a`",)


def test_runs_part_at_an_eight_bit_float_that_is_more_than_a_unit_off() -> None:
    one, unit, two = (
        event("output", "a", torch.tensor([value]).to(torch.float8_e4m3fn)) for value in (1.0, 1.125, 1.25)
    )
    assert parting([one], [unit]) is None
    found = parting([one], [two])
    assert found is not None
    assert found.lines[1] == "  candidate 1.25 (float8_e4m3fn [1]), reference 1 (float8_e4m3fn [1]) at (0,)"


def test_a_value_whose_dtype_has_no_tolerance_is_not_compared() -> None:
    scales = [event("output", "a", torch.tensor([n]).to(torch.float8_e8m0fnu)) for n in (1.0, 4.0)]
    losses = event("loss", "", 1.0), event("loss", "", 2.0)
    found = parting([scales[0], losses[0]], [scales[1], losses[1]])
    assert found is not None
    assert found.lines[0] == "step 0, forward: the loss"
    assert found.lines[3:] == ("  nothing before it was compared",)


def test_a_tolerance_is_that_of_the_training() -> None:
    reference, candidate = [event("output", "a", [1.0])], [event("output", "a", [1.001])]
    assert parting(reference, candidate, torch.bfloat16) is None
    assert parting(reference, candidate) is not None


@pytest.mark.parametrize(
    ("kind", "reference", "candidate"),
    [
        ("gradient", [1.0], [2.0]),  # of one rank alone
        ("updated parameter", [1.0], [2.0]),
        ("cast", [1.0], [2.0]),
        ("output", [1.0], None),
        ("output", None, [1.0]),
        ("output", [1.0], [1.0, 1.0]),
    ],
)
def test_what_cannot_be_compared_is_left_out(kind: str, reference: Any, candidate: Any) -> None:
    assert parting([event(kind, "a", reference)], [event(kind, "a", candidate)]) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("parameter", "forward: parameter `w` as its module computes with it"),
        ("buffer", "forward: buffer `w` as its module computes with it"),
        ("output", "forward: output of module `w`"),
        ("loss", "forward: the loss"),
        ("reduced gradient", "after backward: gradient of `w`"),
        ("parameter after the step", "optimizer step: parameter `w` after the optimizer's step"),
        ("gradient of output", "forward: gradient of the output of module `w`"),
        ("local gradient", "forward: gradient of `w` before it is reduced"),
        ("input of collective", "forward: what w was handed"),
        ("output of collective", "forward: what w gave"),
    ],
)
def test_each_kind_is_compared_and_has_words(kind: str, words: str) -> None:
    found = parting([event(kind, "w", [1.0])], [event(kind, "w", [2.0])])
    assert found is not None
    assert found.lines[0] == f"step 0, {words}"


def test_a_place_has_its_phase_and_its_call() -> None:
    def place(kind: str, name: str = "w", **changes: Any) -> str:
        found = parting([event(kind, name, [1.0], **changes)], [event(kind, name, [2.0], **changes)])
        assert found is not None
        return found.lines[0]

    assert place("output", in_backward=True) == "step 0, backward: output of module `w`"
    assert place("loss", in_backward=True) == "step 0, forward: the loss"
    assert place("reduced gradient", in_backward=True) == "step 0, after backward: gradient of `w`"
    assert place("output", "") == "step 0, forward: output of module `(the model)`"
    assert place("output", number=1, line="a.py:1") == (
        "step 0, forward: output of module `w`, call 2 at a.py:1"
    )


def test_collectives_are_compared_where_both_runs_have_the_same() -> None:
    reference = [event("input of collective", "all_reduce #1", [1.0])]
    candidate = [event("input of collective", "all_reduce #1", [2.0])]
    assert parting(reference, candidate) is not None
    more = event("input of collective", "all_reduce #2", [1.0])
    assert parting(reference, [*candidate, more]) is None
    assert parting(reference, [*candidate, event("output of collective", "all_reduce #1", [1.0])]) is not None


@pytest.mark.parametrize("kind", ["gradient of output", "local gradient"])
def test_gradients_of_a_scaled_loss_are_compared_unscaled(kind: str) -> None:
    plain, scaled = [event(kind, "a", [1.5], step=1)], [event(kind, "a", [12.0], step=1)]
    assert parting(plain, scaled, scales=({}, {1: 8.0})) is None
    assert parting(scaled, plain, scales=({1: 8.0}, {})) is None
    assert parting(plain, scaled, scales=({}, {0: 8.0})) is not None
    half = [event(kind, "a", torch.tensor([12.0], dtype=torch.float16), step=1)]
    found = parting(half, half, scales=({}, {1: 8.0}))
    assert found is not None
    assert found.lines[1] == "  candidate 1.5 (float32 [1]), reference 12 (float16 [1]) at (0,)"


def test_only_floating_gradients_of_backward_are_scaled() -> None:
    for kind, value in (("output", [8.0]), ("reduced gradient", [8.0]), ("local gradient", [8])):
        events = [event(kind, "a", value)]
        assert parting(events, events, scales=({}, {0: 8.0})) is None


def suspects(candidate: list[Event], reference: list[Event] | None = None) -> list[str]:
    """Return what is said of a difference of the last event, below its last agreement."""
    last = candidate[-1]
    assert last.value is not None
    known = [each for each in candidate[:-1] if each.value is not None] if reference is None else reference
    other = event(last.kind, last.name, last.value + 1, step=last.step, number=last.number)
    found = parting([*known, other], candidate)
    assert found is not None
    return list(found.lines[4:])


def cast(name: str = "float32 to bfloat16", line: str = "a.py:1", **changes: Any) -> Event:
    return event("cast", name, line=line, **changes)


def test_casts_and_collectives_since_the_last_agreement_are_suspects() -> None:
    collective = [
        event("input of collective", f"all_reduce #{n} of 3 numbers", line="b.py:2") for n in (1, 2)
    ]
    events = [
        cast("before"),
        event("output", "a", [1.0]),
        cast(),
        *collective,
        event("output of collective", "all_reduce #1", line="b.py:3"),
        cast("int64 to int32", ""),
        event("output", "b", [1.0]),
    ]
    assert suspects(events) == [
        "  in between: cast float32 to bfloat16 at a.py:1",
        "  in between: cast int64 to int32 at ?",
        "  in between: all_reduce of 3 numbers at b.py:2 (2 times)",
    ]


def test_a_suspect_is_not_in_the_reference_at_that_line() -> None:
    events = [cast(), cast(line="a.py:2"), event("output", "b", [1.0])]
    assert suspects(events, [cast()]) == ["  in between: cast float32 to bfloat16 at a.py:2"]
    assert suspects(events, [cast(), cast(line="a.py:2")]) == []


def test_few_suspects_are_shown_and_the_others_counted() -> None:
    casts = [cast(line=f"a.py:{n}") for n in range(6)]
    collectives = [event("input of collective", "all_reduce", line=f"b.py:{n}") for n in range(6)]
    output = event("output", "b", [1.0])

    def shown(*events: Event) -> list[str]:
        return [line.rpartition(" at ")[2] for line in suspects([*events, output])]

    assert shown(*casts[:4]) == [f"a.py:{n}" for n in range(4)]
    assert shown(*casts[:5]) == [*(f"a.py:{n}" for n in range(4)), "  and 1 more casts and collectives"]
    some = ["a.py:0", "b.py:0", "b.py:1", "b.py:2", "  and 3 more casts and collectives"]
    assert shown(*collectives, casts[0]) == some
    most = [*(f"a.py:{n}" for n in range(4)), "b.py:0", "b.py:1", "  and 6 more casts and collectives"]
    assert shown(*casts, *collectives) == most


def test_a_cast_before_the_module_that_agreed_last_is_a_suspect() -> None:
    after = [event("parameter", "w", [1.0]), event("output", "b", [1.0])]
    collective = event("output of collective", "all_gather", [1.0])
    line = "  in between: cast float32 to bfloat16 at a.py:1"
    assert suspects([event("output", "a", [1.0]), cast(), collective, *after]) == [line]
    assert suspects([cast(), event("output", "a", [1.0]), *after]) == []
    assert suspects([cast(), *after]) == [line]


def test_a_cast_in_backward_is_a_suspect_of_a_reduced_gradient() -> None:
    backward = cast(in_backward=True)
    agreed = event("local gradient", "v", [1.0], in_backward=True)
    line = ["  in between: cast float32 to bfloat16 at a.py:1"]
    forward = cast("of forward")
    assert suspects([forward, backward, agreed, event("reduced gradient", "w", [1.0])]) == line
    assert suspects([forward, backward, agreed, event("output", "w", [1.0])]) == []
    assert suspects([forward, backward, agreed, event("reduced gradient", "w", [1.0], step=1)]) == []


def test_a_nan_is_the_largest_difference() -> None:
    nan = float("nan")
    found = parting([event("output", "a", [1.0, 9.0])], [event("output", "a", [nan, 1.0])])
    assert found is not None
    assert found.lines[1] == "  candidate nan (float32 [2]), reference 1 (float32 [2]) at (0,)"


def test_numbers_of_all_kinds_are_shown() -> None:
    found = parting([event("output", "a", [7, 1])], [event("output", "a", [7, 2])])
    assert found is not None
    assert found.lines[1] == "  candidate 2 (int64 [2]), reference 1 (int64 [2]) at (1,)"
    found = parting([event("output", "a", [1 + 1j])], [event("output", "a", [1 - 1j])])
    assert found is not None
    assert found.lines[1] == ("  candidate (1-1j) (complex64 [1]), reference (1+1j) (complex64 [1]) at (0,)")
    found = parting([event("output", "a", [9 + 1j, 1j])], [event("output", "a", [9 - 1j, -3j])])
    assert found is not None
    assert found.lines[1].endswith(" at (1,)")


# Races


def test_races_are_reported_once_for_each_place() -> None:
    def race(name: str) -> Event:
        return event("race", name)

    def named(n: int, place: str) -> Event:
        return race(f"all_reduce #{n} of 3 numbers, begun at {place}, is read")

    assert races([event("output", "a", [1.0]), named(1, "a.py:1")]) == [f"  race: {named(1, 'a.py:1').name}"]
    found = races([named(1, "a.py:1"), named(2, "a.py:2"), named(3, "a.py:1"), named(4, "a.py:3")])
    assert found == [
        f"  race: {named(1, 'a.py:1').name}, and 1 more from there",
        f"  race: {named(2, 'a.py:2').name}",
    ]


def test_a_message_is_shortened_to_its_first_line() -> None:
    assert shortened("one") == "one"
    assert shortened("one\ntwo\nthree") == "one (and 2 lines more)"


# What ranks have found


def test_the_earliest_finding_is_described() -> None:
    late, early = Parting(1, 0, ("late", "  more")), Parting(0, 5, ("early", "  values"))
    assert describe({0: late, 1: early, 2: None}, {}) == "first divergence on rank 1: early\n  values"
    first = Parting(0, 4, ("first",))
    assert describe({0: early, 1: first}, {}) == "first divergence on rank 1: first"
    assert describe({1: early, 0: early}, {}).startswith("first divergence on all ranks: early (values of ")
    assert describe({1: early, 0: early}, {}).splitlines()[0].endswith("(values of rank 0)")


def test_ranks_of_the_same_finding_are_named_together() -> None:
    found = Parting(0, 5, ("early", "  values"))
    assert describe({0: None, 1: found, 2: found}, {}) == (
        "first divergence on rank 1, 2: early (values of rank 1)\n  values"
    )
    assert describe({0: found}, {}) == "first divergence on rank 0: early\n  values"


def test_without_a_finding_races_are_reported() -> None:
    nothing = "first divergence: nothing that was recorded differs beyond the tolerance before this"
    assert describe({0: None, 1: None}, {}) == nothing
    raced = {0: ["  race: a"], 1: ["  race: b", "  race: c"]}
    assert describe({0: None}, raced) == f"{nothing}\n  race: a (rank 0)\n  race: b (rank 1)"
    assert describe({0: Parting(0, 0, ("it",))}, raced) == (
        "first divergence on rank 0: it\n  race: a (rank 0)\n  race: b (rank 1)"
    )


# Between ranks


def test_ranks_part_at_the_first_tensor_that_differs() -> None:
    first = [
        event("output", "w", [1.0, 0.0]),
        event("parameter", "w", [1.0]),
        event("parameter", "w", [1.0, 2.0], number=1),
        event("gradient", "w", [1.0, 2.0]),
        event("updated parameter", "v", [1.0, 2.0]),
        event("updated parameter", "w", [1.0, 2.0]),
    ]
    other = [
        event(each.kind, each.name, [5.0] * len(each.value), number=each.number)
        for each in first
        if each.value is not None
    ]
    same = [event("parameter", "v", None), *first]

    def parted(*others: list[Event], **wanted: tuple[int, ...]) -> tuple[int, int] | None:
        outlines = dict(enumerate(outline(events) for events in (first, *others)))
        return first_parting_of_ranks(outlines, wanted)

    assert parted(same, w=(2,)) is None
    assert parted(other, w=(2,)) == (2, -1)
    assert parted(other, w=(1,)) == (1, -1)
    assert parted(other, v=(2,)) == (4, -1)
    assert parted([*first[:3], *other[3:]], w=(2,)) == (3, 2)
    assert parted(same, [*first[:5], *other[5:]], w=(2,), v=(2,)) == (5, 3)
    assert parted(first[:2], w=(2,)) is None


def test_an_outline_has_the_events_with_values() -> None:
    assert outline([event("cast", "a"), event("output", "b", [[1.0]], step=1, number=2)]) == [
        (("output", "b", 1, 2), "[[1.0]]", (1, 1))
    ]


def test_a_parting_of_ranks_is_described_with_the_values_of_all() -> None:
    before = event("gradient", "w", [1.0, 2.0], step=0)
    at = event("updated parameter", "w", [1.0, 2.0], step=1, line="a.py:9")
    values = {
        0: None,
        1: torch.tensor([1.0, 2.0]),
        2: torch.tensor([1.0, 2.0]),
        4: torch.tensor([1.0, 7.5]),
        5: None,
    }
    assert describe_ranks(at, before, values, [cast("too early"), before, cast(), at, cast("too late")]) == [
        "first divergence between ranks: step 1, optimizer step: parameter `w` after the optimizer's step"
        " at a.py:9",
        "  rank 0 nothing, rank 1 2, rank 2 2, rank 4 7.5, rank 5 nothing at (1,), (float32 [2])",
        "  last agreement: step 0, after backward: gradient of `w` that the optimizer reads",
        "  in between: cast float32 to bfloat16 at a.py:1",
    ]


def test_a_gradient_that_nothing_has_reduced_is_said_to_be_so() -> None:
    gradient = event("gradient", "w", [1.0])
    values = {0: torch.tensor([1.0]), 1: torch.tensor([2.0])}
    never = "  they never agreed: this is its first use that was recorded"
    unreduced = "  no collective ran before: nothing has reduced it"
    assert describe_ranks(gradient, None, values, [gradient])[2:] == [never, unreduced]
    assert describe_ranks(gradient, event("gradient", "w"), values, [gradient])[2:] == [never, unreduced]
    collective = event("output of collective", "all_reduce", [1.0])
    assert describe_ranks(gradient, None, values, [collective, gradient])[2:] == [never]
    assert describe_ranks(gradient, None, values, [gradient, collective])[2:] == [never, unreduced]
    parameter = event("parameter", "w", [1.0])
    assert describe_ranks(parameter, None, values, [parameter])[2:] == [never]


def test_a_parting_in_shape_has_no_index() -> None:
    gradient = event("parameter", "w", [1.0])
    values = {0: torch.tensor([1.0]), 1: torch.tensor([1.0, 2.0]), 2: torch.empty(0)}
    assert describe_ranks(gradient, None, values, [])[1] == (
        "  rank 0 a tensor [1], rank 1 a tensor [2], rank 2 a tensor [0] at (), (float32 [1])"
    )


# Names


class Wrapper(nn.Module):
    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        for number, child in enumerate(children):
            self.add_module(f"wrapped_{number}", child)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


def names(of: nn.Module) -> dict[str, str]:
    """Return the names of modules, by those that they have in what wraps them."""
    found = canonical_modules(of, dict(model().named_parameters()))
    return {name: found[module] for name, module in of.named_modules() if module in found}


def test_a_model_that_is_not_wrapped_keeps_its_names() -> None:
    assert names(model()) == {name: name for name, _ in model().named_modules()}


def test_wrappers_are_named_by_what_they_wrap() -> None:
    inner = model()
    inner[0], inner[1][1] = Wrapper(inner[0]), Wrapper(inner[1][1])
    assert names(Wrapper(inner)) == {
        "": "(Wrapper)",
        "wrapped_0": "",
        "wrapped_0.0": "0 (Wrapper)",
        "wrapped_0.0.wrapped_0": "0",
        "wrapped_0.1": "1",
        "wrapped_0.1.0": "1.0",
        "wrapped_0.1.1": "1.1 (Wrapper)",
        "wrapped_0.1.1.wrapped_0": "1.1",
    }


def test_a_wrapper_may_have_children_of_the_names_that_are_wrapped() -> None:
    found = names(nn.Sequential(model(), nn.ReLU()))
    assert found == {"": "(Sequential)", "0": "", "0.0": "0", "0.1": "1", "0.1.0": "1.0", "0.1.1": "1.1"}


def test_of_several_children_the_one_that_fits_is_wrapped() -> None:
    assert names(Wrapper(nn.ReLU(), model()))["wrapped_1"] == ""
    assert names(Wrapper(nn.ReLU(), nn.ReLU())) == {}
    outer = model()
    outer[1] = Wrapper(nn.ReLU(), outer[1])
    assert names(outer) == {
        "": "",
        "0": "0",
        "1": "1 (Wrapper)",
        "1.wrapped_1": "1",
        "1.wrapped_1.0": "1.0",
        "1.wrapped_1.1": "1.1",
    }


def test_a_training_is_recorded_by_step_from_where_it_begins() -> None:
    log = ExecutionLog()
    log.record("loss", {"loss": torch.ones(())})
    wrapped = Wrapper(model())
    recorder = TrainingRecorder(log, wrapped, dict(model().named_parameters()))
    recorder.begin_step(0, None)
    recorder.begin_step(3, torch.tensor(8.0))
    log.record("loss", {"loss": torch.zeros(())})
    recording = recorder.recording()
    assert recording.scales == {0: 1.0, 3: 8.0}
    assert [(each.kind, each.step, each.value) for each in recording.events] == [("loss", 3, torch.zeros(()))]
