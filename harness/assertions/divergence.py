"""The first place where two recorded runs part, or two ranks of one, in words. Inside a rank.

Only the second run of a failed test is recorded (`lockstep.recorders.ExecutionLog`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.assertions.closeness import EXACT, Named, Tolerance, differences, has_row
from lockstep.recorders import Event, ExecutionLog

_OF_BACKWARD = ("gradient of output", "local gradient")
_AFTER_BACKWARD = ("reduced gradient", "parameter after the step", "gradient", "updated parameter")
_OF_MODULE = ("parameter", "buffer")
_OF_COLLECTIVES = ("input of collective", "output of collective")
_COMPARED = {
    "parameter",
    "buffer",
    "output",
    "loss",
    "reduced gradient",
    "parameter after the step",
    *_OF_BACKWARD,
    *_OF_COLLECTIVES,
}
_OF_A_TENSOR = ("parameter", "buffer", "gradient", "updated parameter")
_SHOWN = 4
_RACES = 2


@dataclass
class Recording:
    """The values that one training computed, in order.

    Attributes:
        events: events, as `ExecutionLog` has them.
        scales: factor of the loss before backward, by step.
    """

    events: Sequence[Event] = ()
    scales: dict[int, float] = field(default_factory=dict)


class TrainingRecorder:
    """Divides what a log records of one training into steps, under the names of the model that was wrapped.

    Attributes:
        log: which records it.
    """

    def __init__(self, log: ExecutionLog, model: nn.Module, start: Named) -> None:
        self.log = log
        self._begin = log.begin_run(canonical_modules(model, start))
        self._scales: dict[int, float] = {}

    def begin_step(self, step: int, scale: torch.Tensor | None) -> None:
        """Begin a step, in which the loss is multiplied by `scale` before backward."""
        self.log.step = step
        self._scales[step] = 1.0 if scale is None else float(scale)

    def recording(self) -> Recording:
        """Return what was recorded since the training began."""
        return Recording(self.log.events[self._begin :], self._scales)


@dataclass(frozen=True)
class Parting:
    """The first difference of two runs on one rank.

    Attributes:
        step, place: order it among those of other ranks: the earliest is the one to tell.
        lines: what to tell of it.
    """

    step: int
    place: int
    lines: tuple[str, ...]


def canonical_modules(model: nn.Module, parameters: Iterable[str]) -> dict[nn.Module, str]:
    """Return the modules of a wrapped model by the names that they have in the model that was wrapped.

    A wrapper is a module with a child that fits where the wrapper itself does not: DDP, FSDP, a checkpoint.

    Args:
        parameters: names of the parameters in the model that was wrapped.
    """
    children: dict[str, set[str]] = {}
    for name in parameters:
        parts = name.split(".")[:-1]
        for depth, part in enumerate(parts):
            children.setdefault(".".join(parts[:depth]), set()).add(part)

    def fit(module: nn.Module, name: str) -> dict[nn.Module, str] | None:
        own = dict(module.named_children())
        wanted = children.get(name, set())
        if not own.keys() >= wanted or (len(own) == 1 and not wanted):
            return fit_as_wrapper(module, name)
        found = {module: name}
        for key, child in own.items():
            inner = fit(child, f"{name}.{key}" if name else key)
            if inner is None:
                return fit_as_wrapper(module, name)
            found |= inner
        return found

    def fit_as_wrapper(module: nn.Module, name: str) -> dict[nn.Module, str] | None:
        inner = next((found for child in module.children() if (found := fit(child, name)) is not None), None)
        return None if inner is None else {module: f"{name} ({type(module).__name__})".strip(), **inner}

    return fit(model, "") or {}


def first_parting(
    reference: Recording, candidate: Recording, tolerance: Tolerance | torch.dtype | None
) -> Parting | None:
    """Return where a run first differs from its reference beyond the tolerance; None if nowhere."""
    expected = {event.key: event for event in reference.events}
    same_traffic = _traffic(reference) == _traffic(candidate)
    last, first_bits = None, None
    for place, event in enumerate(candidate.events):
        other = expected.get(event.key)
        if other is None or not _is_comparable(event, other, same_traffic):
            continue
        actual, wanted = (_unscaled(each, of) for each, of in ((event, candidate), (other, reference)))
        found = differences({"": actual}, {"": wanted}, tolerance, same_dtype=False)
        if found:
            lines = [
                f"{_place_of(event)}",
                f"  candidate {_sample(actual, wanted)}",
                f"  {_shorter(found[0])}",
                *_agreed(last, event),
                *_first_bits(first_bits, event),
                *_suspects(candidate.events, place, last, reference.events),
            ]
            return Parting(event.step, place, tuple(lines))
        if first_bits is None and event.fingerprint != other.fingerprint and actual.dtype == wanted.dtype:
            first_bits = event
        last = place, event
    return None


def races(events: Sequence[Event]) -> list[str]:
    """Return a line for each place where a collective's tensors were used before anybody waited for it."""
    found: dict[str, list[str]] = {}
    for event in events:
        if event.kind == "race":
            found.setdefault(re.sub(r" #\d+ .*?, begun", ", begun", event.name), []).append(event.name)
    return [
        f"  race: {names[0]}" + (f", and {len(names) - 1} more from there" if len(names) > 1 else "")
        for names in found.values()
    ][:_RACES]


def shortened(message: str) -> str:
    """Return the first line of what an assertion has found, and how many follow."""
    first, *others = message.splitlines()
    return f"{first} (and {len(others)} lines more)" if others else first


def describe(by_rank: Mapping[int, Parting | None], of_races: Mapping[int, list[str]]) -> str:
    """Return the paragraph about the earliest of what ranks have found."""
    found = {rank: parting for rank, parting in by_rank.items() if parting is not None}
    raced = [f"{line} (rank {rank})" for rank, lines in of_races.items() for line in lines]
    raced = raced[:_RACES]
    if not found:
        text = "first divergence: nothing that was recorded differs beyond the tolerance before this"
        return "\n".join([text, *raced])
    first = min(found, key=lambda rank: (found[rank].step, found[rank].place, rank))
    head, *rest = found[first].lines
    same = [rank for rank in found if found[rank].lines[0] == head]
    on = "on all ranks" if len(same) == len(by_rank) > 1 else f"on rank {', '.join(map(str, same))}"
    values = f" (values of rank {first})" if len(same) > 1 else ""
    return "\n".join([f"first divergence {on}: {head}{values}", *rest, *raced])


# Between ranks


def first_parting_of_ranks(
    by_rank: Mapping[int, Sequence[tuple[tuple[str, str, int, int], str, tuple[int, ...]]]],
    wanted: Mapping[str, tuple[int, ...]],
) -> tuple[int, int] | None:
    """Return where, in the outline of the first rank, ranks part, and where that tensor was the same last.

    The second is -1 if it never was.

    Args:
        by_rank: outline of the events of each rank: key, fingerprint, shape.
        wanted: the shapes of the tensors that differ at the end, by name.
    """
    first, *others = by_rank.values()
    prints = [{key: print_of for key, print_of, _ in of_rank} for of_rank in others]
    agreed: dict[str, int] = {}
    for place, (key, print_of, shape) in enumerate(first):
        kind, name, _, _ = key
        if kind not in _OF_A_TENSOR or wanted.get(name) != shape:
            continue
        if any(other.get(key, print_of) != print_of for other in prints):
            return place, agreed.get(name, -1)
        agreed[name] = place
    return None


def outline(events: Sequence[Event]) -> list[tuple[tuple[str, str, int, int], str, tuple[int, ...]]]:
    """Return what other ranks need of events to compare them."""
    return [
        (event.key, event.fingerprint, tuple(event.value.shape))
        for event in events
        if event.value is not None
    ]


def describe_ranks(
    event: Event, before: Event | None, values: Mapping[int, torch.Tensor | None], events: Sequence[Event]
) -> list[str]:
    """Return the paragraph about an event at which ranks part, on the rank that has these `events`."""
    first, *others = (value for value in values.values() if value is not None)
    different = next((other for other in others if differences({"": other}, {"": first}, EXACT)), first)
    index = _where(different, first)
    shown = ", ".join(
        f"rank {rank} {'nothing' if value is None else _number(value, index)}"
        for rank, value in values.items()
    )
    places = [place for place, each in enumerate(events) if each is before]
    last = (places[0], before) if places and before is not None else None
    at = next((place for place, each in enumerate(events) if each is event), len(events))
    lines = [
        f"first divergence between ranks: {_place_of(event)}",
        f"  {shown} at {index}, {_kind_of(first)}",
        *(_agreed(last, event) if last else ["  they never agreed: this is its first use that was recorded"]),
        *_suspects(events, at, last, ()),
    ]
    if event.kind == "gradient" and not any(each.kind in _OF_COLLECTIVES for each in events[:at]):
        lines.append("  no collective ran before: nothing has reduced it")
    return lines


# Words


def _place_of(event: Event) -> str:
    phase = {"loss": "forward"}.get(event.kind, "backward" if event.in_backward else "forward")
    phase = "after backward" if event.kind in ("reduced gradient", "gradient") else phase
    phase = "optimizer step" if event.kind in ("parameter after the step", "updated parameter") else phase
    name = event.name or "(the model)"
    what = {
        "parameter": f"parameter `{name}` as its module computes with it",
        "buffer": f"buffer `{name}` as its module computes with it",
        "output": f"output of module `{name}`",
        "gradient of output": f"gradient of the output of module `{name}`",
        "local gradient": f"gradient of `{name}` before it is reduced",
        "reduced gradient": f"gradient of `{name}`",
        "gradient": f"gradient of `{name}` that the optimizer reads",
        "updated parameter": f"parameter `{name}` after the optimizer's step",
        "parameter after the step": f"parameter `{name}` after the optimizer's step",
        "loss": "the loss",
        "input of collective": f"what {name} was handed",
        "output of collective": f"what {name} gave",
    }[event.kind]
    again = f", call {event.number + 1}" if event.number else ""
    where = f" at {event.line}" if event.line else ""
    return f"step {event.step}, {phase}: {what}{again}{where}"


def _is_comparable(event: Event, other: Event, same_traffic: bool) -> bool:
    if event.kind not in _COMPARED or (event.kind in _OF_COLLECTIVES and not same_traffic):
        return False
    if event.value is None or other.value is None or event.value.shape != other.value.shape:
        return False
    return has_row(event.value.dtype) and has_row(other.value.dtype)


def _traffic(recording: Recording) -> list[tuple[int, str]]:
    return [(event.step, event.name) for event in recording.events if event.kind == "input of collective"]


def _unscaled(event: Event, of: Recording) -> torch.Tensor:
    assert event.value is not None
    scale = of.scales.get(event.step, 1.0)
    is_scaled = scale != 1.0 and event.kind in _OF_BACKWARD and event.value.is_floating_point()
    return event.value.float() / scale if is_scaled else event.value


def _agreed(last: tuple[int, Event] | None, event: Event) -> list[str]:
    if last is None:
        return ["  nothing before it was compared"]
    return [f"  last agreement: {_place_of(last[1])}"]


def _first_bits(first: Event | None, event: Event) -> list[str]:
    return [] if first is None else [f"  first different bits, within the tolerance: {_place_of(first)}"]


def _suspects(
    events: Sequence[Event], place: int, last: tuple[int, Event] | None, reference: Sequence[Event]
) -> list[str]:
    """Name the casts and collectives between the last agreement and the difference, by line."""
    start = -1 if last is None else last[0]
    # What a module computed with is recorded after it has: what it cast is before that.
    if start >= 0 and events[start].kind in _OF_MODULE:
        while start >= 0 and events[start].kind in (*_OF_MODULE, "cast", *_OF_COLLECTIVES):
            start -= 1
    event = events[place] if place < len(events) else None
    if event is not None and event.kind in _AFTER_BACKWARD:
        # Gradients are reduced one by one while later ones are computed, and compared when all are.
        inside = [at for at in range(start + 1) if events[at].in_backward and events[at].step == event.step]
        start = min([start, *(at - 1 for at in inside)])
    known = {(each.kind, each.name, each.line) for each in reference}
    seen: Counter[tuple[str, str, str]] = Counter()
    for each in events[start + 1 : place]:
        if each.kind in ("cast", "input of collective") and (each.kind, each.name, each.line) not in known:
            # Not the number of a collective: those from one line are counted.
            head, _, inputs = each.name.partition(" #")
            name = f"{head} {inputs.partition(' ')[2]}".rstrip() if inputs else each.name
            seen[each.kind, name, each.line] += 1
    casts = [key for key in seen if key[0] == "cast"]
    others = [key for key in seen if key[0] != "cast"]
    shown = [*casts[:_SHOWN], *others[: max(2, _SHOWN - len(casts))]]
    lines = [
        f"  in between: {'cast ' if key[0] == 'cast' else ''}{key[1]} at {key[2] or '?'}"
        + (f" ({seen[key]} times)" if seen[key] > 1 else "")
        for key in shown
    ]
    more = len(seen) - len(shown)
    return [*lines, *([f"  and {more} more casts and collectives"] if more else [])]


def _sample(actual: torch.Tensor, wanted: torch.Tensor) -> str:
    index = _where(actual, wanted)
    at = f" at {index}" if index else ""
    ours, theirs = (f"{_number(each, index)} {_kind_of(each)}" for each in (actual, wanted))
    return f"{ours}, reference {theirs}{at}"


def _shorter(difference: str) -> str:
    """Return the text of a difference without what is said of it elsewhere."""
    text = re.sub(r"^: |Expected \S+ but got \S+; | at index \([\d, ]*\)", "", difference)
    return text.replace("Greatest", "greatest").replace("Mismatched elements:", "differs in")


def _where(actual: torch.Tensor, wanted: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the largest difference."""
    if actual.shape != wanted.shape or not actual.numel():
        return ()
    apart = (actual.double() - wanted.double()).abs() if not actual.is_complex() else (actual - wanted).abs()
    apart = apart.nan_to_num(nan=float("inf"))
    return tuple(int(each) for each in torch.unravel_index(apart.argmax(), apart.shape))


def _number(tensor: torch.Tensor, index: tuple[int, ...]) -> str:
    inside = tensor.dim() == len(index) and all(
        at < size for at, size in zip(index, tensor.shape, strict=True)
    )
    if not (inside and tensor.numel()):
        return f"a tensor {list(tensor.shape)}"
    value = tensor[index].item()
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
