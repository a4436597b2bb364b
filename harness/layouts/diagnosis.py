"""The report of a layout that differs from the unsharded model: at most eight lines. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch

from lockstep.layouts.factors import CLOSE, describe_factor, either, not_finite, products, ranks
from lockstep.layouts.layout import DATA_AXES, Layout
from lockstep.layouts.moment import Moment, is_wrong
from lockstep.layouts.norms import explain_norm
from lockstep.layouts.parting import Comparison, describe_parting
from lockstep.layouts.reference import Reference, Tensors
from lockstep.layouts.shards import ShardMap
from lockstep.layouts.suspect import Suspect
from lockstep.layouts.weights import Weighing

_LINES = 8
_CAUSES = 3


@dataclass(frozen=True)
class Failure:
    """The first moment at which a layout differs.

    Attributes:
        microbatches: of the step.
        moments: all that each rank holds.
        traces: outputs and their gradients of each rank, by module, of the step run once more; None if not.
    """

    layout: Layout
    shards: ShardMap
    reference: Reference
    microbatches: int
    moments: Mapping[int, Moment]
    traces: Mapping[int, tuple[Tensors, Tensors] | None]

    @property
    def moment(self) -> Moment:
        return next(iter(self.moments.values()))

    @cached_property
    def names(self) -> list[str]:
        """The unsharded model's names, the last layer first."""
        whole = self.moment.whole(self.reference)
        return [name for name in reversed(self.reference.names) if name in whole]

    @cached_property
    def suspects(self) -> list[Suspect]:
        """The wrong tensors, the last layer first."""
        found = []
        whole = self.moment.whole(self.reference)
        wrong = {
            each.name
            for moment in self.moments.values()
            for each, expected in moment.with_expected(self.reference)
            if each.error(expected)
        }
        for name in self.names:
            if name not in wrong:
                continue
            held = {
                rank: each
                for rank, moment in self.moments.items()
                # Where a rank has two, tied but apart, the worse one.
                for each in sorted(
                    (each for each in moment.held if each.name == name and each.value is not None),
                    key=lambda each: each.error(whole[each.name]),
                )
            }
            values = {rank: each.value for rank, each in held.items() if each.value is not None}
            regions = {rank: each.region for rank, each in held.items()}
            suspect = Suspect(
                *(name, self.moment.kind, self.layout, whole[name], values, regions, self.microbatches),
                tuple(self._earlier(name)),
            )
            found.append(suspect)
        return found

    def _earlier(self, name: str) -> Iterator[torch.Tensor]:
        steps = self.reference.steps[: self.moment.step]
        if self.moment.kind == "gradient":
            yield from (step.gradients[name] for step in reversed(steps))
        elif self.moment.title.startswith("after"):
            yield self.reference.steps[self.moment.step].before[name]

    @cached_property
    def assembled(self) -> Tensors:
        """The wrong tensors that ranks agree on, by name."""
        found = {each.name: each.assembled for each in self.suspects}
        return {name: each for name, each in found.items() if each is not None}

    @cached_property
    def weighing(self) -> Weighing:
        """The blocks of the step's batch."""
        return self._weighing("")

    def _weighing(self, term: str) -> Weighing:
        """Return the blocks of the step's batch, of a term of the loss alone if one is given."""
        axes = {axis: self.layout[axis] for axis in self.layout.large if axis in DATA_AXES}
        rows = math.prod(axes.values()) * self.microbatches
        sequence = self.layout["cp"] if self.reference.has_parts else 1
        return Weighing(
            self.reference.blocks(self.moment.step, rows, sequence, term),
            axes,
            {axis: self.layout[axis] for axis in self.layout.large},
            self.microbatches,
        )

    def explain(self, gradients: Tensors) -> list[str]:
        """Return by which sums of blocks wrong gradients are explained, of the loss or of a term of it."""
        if found := self.weighing.explain(gradients):
            return found
        whole, terms = (
            self.weighing.blocks.whole,
            [self._weighing(each) for each in self.weighing.blocks.terms],
        )
        for name, of in zip(self.weighing.blocks.terms, terms, strict=True):
            others = {each: whole[each] - of.blocks.whole[each] for each in gradients}
            if found := of.explain({each: value - others[each] for each, value in gradients.items()}):
                return [f"has a wrong term `{name}` of the loss, which {text}" for text in found]
        joined = self.weighing.with_terms([each.blocks for each in terms]) if terms else None
        return joined.explain(gradients) if joined is not None else []


def describe(failure: Failure, notes: Sequence[str] = ()) -> str:
    """Return the report of a failure: the cause first, the last layer first."""
    lines = [*_complaints(failure)]
    if not lines:
        causes, rest = _tensors(failure)
        numbers = [*_loss(failure), *_norm(failure)]
        parting = [text] if failure.suspects and (text := _parting(failure)) else []
        lines = [*causes, *numbers, *rest, *parting] if causes else [*parting, *numbers, *rest]
    lines += [f"note: {note}" for note in notes]
    across = ", ".join(failure.layout.across_hosts)
    when = f"{failure.moment.title}; across hosts: {across}" if across else failure.moment.title
    title = f"{failure.layout.name} is not the unsharded model ({when}):"
    return "\n".join([title, *(f"  {line}" for line in lines[: _LINES - 1])])


def _parting(failure: Failure) -> str:
    """Return where the sharded and the unsharded run part."""
    traces = {rank: each for rank, each in failure.traces.items() if each is not None}
    if len(traces) < len(failure.traces):
        return ""
    whole = failure.reference.trace(failure.moment.step).joined()
    outputs, gradients = (
        Comparison(
            failure.layout,
            failure.shards,
            whole[place],
            {rank: each[place] for rank, each in traces.items()},
        )
        for place in range(2)
    )
    return describe_parting(outputs, gradients)


def _complaints(failure: Failure) -> Iterator[str]:
    found: dict[str, list[int]] = {}
    for rank, moment in failure.moments.items():
        for complaint in moment.complaints:
            found.setdefault(complaint, []).append(rank)
    for complaint, of_ranks in list(found.items())[:_CAUSES]:
        yield f"{complaint} ({ranks(of_ranks)})"
    if len(found) > _CAUSES:
        yield f"and {len(found) - _CAUSES} more"


def _tensors(failure: Failure) -> tuple[list[str], list[str]]:
    """Return lines about wrong tensors that are explained, and about the rest."""
    if not failure.suspects:
        return [], []
    by_cause = _by_cause(failure)
    kind, total = failure.moment.kind, len(failure.names)
    causes: list[str] = []
    for cause, suspects in by_cause.items():
        if cause and len(causes) < _CAUSES:
            more = f" (and {len(suspects) - 1} more of {total})" if len(suspects) > 1 else ""
            causes.append(f"{kind} of `{suspects[0].name}`{more} {cause}")
    rest = []
    if unexplained := by_cause.get("", []):
        more = f" (and {len(unexplained) - 1} more of {total})" if len(unexplained) > 1 else ""
        only = (
            "; no single reduction, factor or part explains it"
            if not causes
            else ", which that may have caused"
        )
        rest.append(f"{kind} of `{unexplained[0].name}`{more} differs{only}")
    worst = max(failure.suspects, key=lambda each: each.error / each.scale)
    rest.append(f"largest: {kind} `{worst.name}`: {worst.error:.3g} of {worst.scale:.3g}")
    return causes, rest


def _by_cause(failure: Failure) -> dict[str, list[Suspect]]:
    """Return the wrong tensors by what explains each, "" where nothing does."""
    causes = {suspect.name: suspect.explanations() for suspect in failure.suspects}
    if failure.moment.kind == "gradient":
        explain, gradients = failure.explain, failure.assembled
        unexplained = {name: each for name, each in gradients.items() if not causes[name]}
        is_one = not gradients or bool(set.intersection(*(set(causes[name]) for name in gradients)))
        # What explains all of them is the cause, though some may look like another change by themselves.
        if not is_one and (together := explain(gradients)):
            causes |= dict.fromkeys(gradients, together)
        elif unexplained:
            together = explain(unexplained)
            causes |= {name: together or explain({name: each}) for name, each in unexplained.items()}
    # Of several that explain one tensor alike those hold that explain another one alone.
    alone = {texts[0] for texts in causes.values() if len(texts) == 1}
    found: dict[str, list[Suspect]] = {}
    for suspect in failure.suspects:
        texts = causes[suspect.name]
        cause = either([each for each in texts if each in alone] or texts)
        found.setdefault(cause, []).append(suspect)
    return found


def _loss(failure: Failure) -> Iterator[str]:
    expected = failure.reference.steps[failure.moment.step].loss
    actual = {rank: moment.loss for rank, moment in failure.moments.items() if moment.loss is not None}
    if failure.moment.kind != "gradient" or not any(is_wrong(each, expected) for each in actual.values()):
        return
    cause = not_finite(actual) or _explain_loss(failure, actual, expected)
    shown = _shown(actual, expected)
    yield f"loss {cause} ({shown})" if cause else f"loss is {shown}"


def _explain_loss(failure: Failure, actual: Mapping[int, float], expected: float) -> str:
    layout, found = failure.layout, []
    right = [rank for rank, each in actual.items() if _is_close(each, expected)]
    for number in range(1, len(layout.large) + 1):
        for axes in combinations(layout.large, number):
            groups = [
                [actual[each] for each in layout.members(axes, rank) if each in actual] for rank in actual
            ]
            differ = [
                any(
                    len({actual[each] for each in layout.members([axis], rank) if each in actual}) > 1
                    for rank in actual
                )
                for axis in axes
            ]
            if not all(differ):
                continue
            for op, divide in (("sum", False), ("mean", True)):
                if all(_is_close(sum(group) / (len(group) if divide else 1), expected) for group in groups):
                    over = " and ".join(axes)
                    found.append(f"equals the reference after a {op} over {over}: that reduction is missing")
        if found:
            break
    if right and len(right) < len(actual):
        found.append(f"is right on {ranks(right)} alone")
    first = next(iter(actual.values()))
    if found or not all(_is_close(each, first) for each in actual.values()):
        return either(found)
    factor = describe_factor(first / expected, failure.weighing.sizes, failure.microbatches)
    more = math.exp(min(abs(first - expected), 50.0))
    if names := products(more, failure.weighing.sizes, 1):
        log = f"{'plus' if first > expected else 'minus'} log {more:.4g}"
        found.append(f"is the reference {log}: a log-sum-exp counts {either(names)} ({more:.4g}) wrongly")
    found += [*failure.weighing.explain_loss(first), *([f"is {factor}"] if "by" in factor else [])]
    if not found and _is_close(failure.weighing.loss_of(failure.assembled), first):
        found.append("counts parts and terms as the gradients do")
    return either(found)


def _shown(actual: Mapping[int, float], expected: float) -> str:
    """Return the numbers of ranks and the one that is expected, with the digits in which they differ."""
    texts = list(dict.fromkeys(f"{each:.6g}" for each in actual.values()))
    if texts == [f"{expected:.6g}"]:
        return f"{texts[0]}, off by {max(abs(each - expected) for each in actual.values()):.1e}"
    return f"{', '.join(texts)}, expected {expected:.6g}"


def _is_close(actual: float, expected: float) -> bool:
    return abs(actual - expected) <= CLOSE * abs(expected)


def _norm(failure: Failure) -> Iterator[str]:
    expected = failure.reference.steps[failure.moment.step].norm
    actual = {rank: moment.norm for rank, moment in failure.moments.items() if moment.norm is not None}
    if failure.moment.kind != "gradient" or not any(is_wrong(each, expected) for each in actual.values()):
        return
    cause = not_finite(actual) or explain_norm(actual, expected, failure.moments, failure.layout)
    yield f"total norm {cause or 'differs'} ({_shown(actual, expected)})"
