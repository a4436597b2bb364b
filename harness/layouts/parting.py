"""The first module of a sharded run that computes something else than the unsharded model. Imports torch.

A rank's rows of an output are compared with all rows of the unsharded one, so that it does not matter which
tokens a rank has, in which order: whole, cut along the last dim, or after a sum over an axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.layouts.factors import CLOSE
from lockstep.layouts.layout import Layout, chunk
from lockstep.layouts.shards import PADDING, Sharded, ShardMap
from lockstep.recorders.tensors import local_part, named_tensors
from lockstep.recorders.torch_internals import in_backward

Rows = Mapping[int, torch.Tensor]
"""Rows of an output by rank."""
SAME, DIFFERENT, UNKNOWN = "same", "different", "unknown"
UNEVEN = "uneven"
"""Status of an output of which ranks have rows of the unsharded one, but not each of them equally often."""
_ROWS = 256
"""Number of rows of an output that are compared."""
_SHORT_ROWS = 32
"""Number of those that are compared value by value."""


@dataclass
class Trace:
    """The outputs of modules and their gradients, as rows, by name and in the order of their first end."""

    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each module, without what checkpoints compute again in backward."""

    @contextmanager
    def record(self, model: nn.Module, name_of: Callable[[str], str] = str) -> Iterator[None]:
        """Record what the modules of a model compute."""
        handles = [
            module.register_forward_hook(self._hook(name_of(name))) for name, module in model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            tensor = next(iter(named_tensors(output).values()), None)
            if tensor is None or tensor.dim() < 2 or not tensor.is_floating_point():
                return
            self.outputs.setdefault(name, []).append(_rows(tensor))
            self.calls[name] += not in_backward()
            if tensor.requires_grad:
                gradients = self.gradients.setdefault(name, [])
                tensor.register_hook(lambda gradient: gradients.append(_rows(gradient)))  # type: ignore[no-untyped-call]

        return note

    def joined(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return outputs and gradients, those of all microbatches in one tensor of rows.

        Modules are left out that a forward calls more often than most: their rows are of several places.
        """
        times = Counter(self.calls.values())
        usual = max(times, key=lambda each: (times[each], -each), default=0)
        outputs, gradients = (
            {
                name: torch.cat(each)
                for name, each in named.items()
                if len({rows.shape[1] for rows in each}) == 1 and self.calls[name] <= usual
            }
            for named in (self.outputs, self.gradients)
        )
        return outputs, gradients


@dataclass(frozen=True)
class Comparison:
    """The rows of each rank, against those of the unsharded model.

    Attributes:
        whole: of the unsharded model, by module, in order.
        by_rank: of each rank, by module.
    """

    layout: Layout
    shards: ShardMap
    whole: Mapping[str, torch.Tensor]
    by_rank: Mapping[int, Mapping[str, torch.Tensor]]

    def status(self, name: str, scale: float = 1.0) -> str:
        """Return SAME, DIFFERENT, UNEVEN, UNKNOWN where shapes do not compare, or "a sum over tp"."""
        whole = self.whole[name]
        held = {rank: named[name] / scale for rank, named in self.by_rank.items() if name in named}
        if not held or not bool(whole.any()):
            return UNKNOWN
        found = [self._compare(whole, held, known) for known in self._columns(name, whole, held)]
        if SAME in found or not found:
            return SAME if found else UNKNOWN
        if not self.shards.rule(f"{name}.weight") and all(_are_within(rows, whole) for rows in held.values()):
            return UNKNOWN  # some of the columns, in a cut of the plan: of the sequence in two chunks, say
        return next((each for each in found if each != DIFFERENT), DIFFERENT)

    def _compare(self, whole: torch.Tensor, held: Rows, known: Rows) -> str:
        """Return the status of rows of which each rank should hold some of those that are known."""
        if all(_are_among(rows, known[rank]) for rank, rows in held.items()):
            return SAME if _have_all(held, known) else UNEVEN
        for axis in self.layout.large:
            groups = [
                [held[each] for each in self.layout.members([axis], rank) if each in held] for rank in held
            ]
            if all(len({each.shape for each in group}) == 1 for group in groups):
                sums = [torch.stack(group).sum(0) for group in groups]
                if all(_are_among(total, known[rank]) for rank, total in zip(held, sums, strict=True)):
                    return f"a sum over {axis}"
        return DIFFERENT

    def _columns(self, name: str, whole: torch.Tensor, held: Rows) -> Iterator[Rows]:
        """Yield the columns that ranks may have: all, their part of the weight's rows, or of an axis."""
        cuts: list[Callable[[int], torch.Tensor]] = [lambda _: whole]
        for cut in self.shards.rule(f"{name}.weight"):
            if cut.dim == 0:
                cuts.append(partial(self._of_rule, whole, cut))
        cuts += [partial(self._of_axis, whole, axis) for axis in self.layout.large]
        for columns in cuts:
            known = {rank: columns(rank) for rank in held}
            if all(known[rank].shape[1] == rows.shape[1] for rank, rows in held.items()):
                yield known

    def _of_rule(self, whole: torch.Tensor, cut: Sharded, rank: int) -> torch.Tensor:
        index, count = self.layout.part(cut.axes, rank)
        along = whole.new_empty(0).long()
        with suppress(ValueError):  # the rule is about a weight that makes other columns
            along = cut.indices(whole.shape[1], index, count)
        along = along[along < whole.shape[1]]
        return whole[:, along].where(along != PADDING, 0.0)

    def _of_axis(self, whole: torch.Tensor, axis: str, rank: int) -> torch.Tensor:
        return chunk(whole, self.layout.at(axis, rank), self.layout[axis], 1)

    def factor(self, name: str) -> float:
        """Return by which factor all rows are too large: a loss may be divided after backward."""
        whole = self.whole[name]
        rows = next((named[name] for named in self.by_rank.values() if name in named), None)
        if rows is None or rows.shape[1] != whole.shape[1] or not bool(rows.any()):
            return 1.0
        if whole.shape[1] == 1:  # any row is a multiple of any other
            found = [named[name].reshape(-1) for named in self.by_rank.values() if name in named]
            return float(torch.cat(found).abs().max() / whole.abs().max()) if bool(whole.any()) else 1.0
        row = rows[int(rows.norm(dim=1).argmax())]
        lengths = whole.norm(dim=1)
        likeness = (whole @ row) / (lengths.clamp(min=1e-300) * row.norm())
        nearest = int(likeness.argmax())
        return float(row.norm() / lengths[nearest]) if float(likeness[nearest]) > 1 - CLOSE else 1.0


def describe_parting(outputs: Comparison, gradients: Comparison) -> str:
    """Return where the two runs part, "" if that cannot be said."""
    found = {name: outputs.status(name) for name in outputs.whole}
    if next((each for each in found.values() if each != UNKNOWN), "") == UNEVEN:
        return "first divergence: the rows of the batch, of which ranks read some more often than others"
    names = list(found)
    for place, name in enumerate(names):
        if found[name] in (DIFFERENT, UNEVEN):
            before = names[place - 1] if place else ""
            text = f"first divergence: the output of {_module(name)}"
            # A plan may add it up behind that module: no sum need be missing.
            is_part = " over " in found.get(before, "")
            return text + (f"; that of `{before}` is right after {found[before]}" if is_part else "")
    if SAME not in found.values():
        return ""
    order = [name for name in reversed(names) if name in gradients.whole]
    if not order:
        return ""
    scale = gradients.factor(order[0])
    statuses = ((name, gradients.status(name, scale)) for name in order)
    of_gradients = {name: DIFFERENT if each == UNEVEN else each for name, each in statuses}
    if of_gradients[order[0]] == DIFFERENT:
        return (
            f"all outputs agree, the gradient of the last one ({_module(order[0])}) differs: look at the loss"
        )
    if of_gradients[order[0]] != SAME:
        return ""
    for place, (name, status) in enumerate(of_gradients.items()):
        if status != DIFFERENT and SAME in [of_gradients[each] for each in order[place + 1 :]]:
            continue  # a sum that is made later
        if status not in (SAME, UNKNOWN):
            lacks = f", which lacks {status}" if status != DIFFERENT else ""
            return (
                f"first divergence: the gradient of the output of {_module(name)}{lacks}; all outputs agree"
            )
    return "all outputs and their gradients agree: it goes wrong after backward"


def _module(name: str) -> str:
    return f"`{name}`" if name else "the model"


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = local_part(tensor).detach()
    return rows.reshape(-1, rows.shape[-1]).clone()


def _are_among(rows: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether each row is one of the unsharded tensor's."""
    if rows.shape[1] != whole.shape[1]:
        return False
    if not len(rows):
        return True
    some = rows[:: max(1, len(rows) // _ROWS)]
    if not bool(torch.isfinite(some).all()):
        return False
    return float(_distances(some, whole).amin(1).max()) <= CLOSE * float(whole.abs().max())


def _have_all(held: Rows, known: Rows) -> bool:
    """Return whether the ranks that have the same columns have all rows of these, each equally often."""
    together: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for rank, rows in held.items():
        for columns, found in together:
            if torch.equal(columns, known[rank]):
                found.append(rows)
                break
        else:
            together.append((known[rank], [rows]))
    return all(_are_as_often(torch.cat(found), columns) for columns, found in together)


def _are_as_often(rows: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether rows are those of the unsharded tensor, each the same number of times."""
    some = whole[:: max(1, len(whole) // _ROWS)]
    allowed = CLOSE * float(whole.abs().max())
    counts = [(_distances(some, each) <= allowed).sum(1) for each in (rows, whole)]
    return len(rows) > 0 and bool((counts[0] * len(whole) == counts[1] * len(rows)).all())


def _distances(some: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # By matrix products it would be exact to 1e-8 only.
    return torch.cdist(some, rows, p=float("inf"), compute_mode="donot_use_mm_for_euclid_dist")


def _are_within(rows: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether the values of each row, which is shorter, are some of those of one unsharded row."""
    if rows.shape[1] >= whole.shape[1] or not bool(torch.isfinite(rows).all()):
        return False
    allowed = CLOSE * float(whole.abs().max())
    for row in rows[:: max(1, len(rows) // _SHORT_ROWS)]:
        nearest = (whole[:, :, None] - row).abs().amin(1)
        if float(nearest.amax(1).min()) > allowed:
            return False
    return True
