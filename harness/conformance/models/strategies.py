"""Hypothesis strategies of module trees. Imports hypothesis, of the extra `test`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from torch import nn

from lockstep.conformance.models.trees import Again, Block, Gain, Linear, Offset, Part, Read, Tree

# Most parts are plain, so that models compute something.
_USED = st.sampled_from(["always"] * 4 + ["sometimes", "unheard", "never"])
_RARELY = st.sampled_from([False] * 3 + [True])
_CALLS = st.sampled_from([1, 1, 1, 2])
_SHAPES = st.sampled_from([(1,), (2,), (3,), (5,), (7, 3), (), (0,), (0, 3)])
# Which part of those that may be meant: `_settle` puts the name of one in its place.
_ANY = st.integers(0, 9).map(str)


def trees(
    *,
    frozen: bool = True,
    shared: bool = True,
    idle: bool = True,
    recomputed: bool = True,
    reads: bool = False,
    max_parts: int = 6,
) -> st.SearchStrategy[Tree]:
    """Return a strategy of trees in which some parameter learns from every batch.

    Where none was drawn that does, a last layer is added.

    Args:
        frozen: whether parameters may be frozen.
        shared: whether modules may have two places or be called more than once, and weights be tied.
        idle: whether parts may be left out, of some batches or of the loss.
        recomputed: whether backward may compute blocks a second time.
        reads: whether layers may read weights of others, of those in other units too.
        max_parts: parts altogether, not counting blocks.
    """
    how: dict[str, Any] = {}
    if frozen:
        how["frozen"] = _RARELY
    if shared:
        how["calls"] = _CALLS
    if idle:
        how["used"] = _USED
    of_blocks = {**how, "recomputed": _RARELY} if recomputed else how
    parts = st.recursive(
        _leaves(how, shared, reads), lambda below: _blocks(below, of_blocks), max_leaves=max_parts
    )
    return _trees(parts, reads)


def rewraps(tree: Tree) -> st.SearchStrategy[Tree]:
    """Return a strategy of the same tree with other units: any, or where parts are shared all or none."""
    names = [name for name, part in tree.named_parts() if isinstance(part, Block)]
    shares = any(isinstance(part, Again) or getattr(part, "tied", None) for _, part in tree.named_parts())
    if shares:
        # Units may be what keeps a shared parameter out of a second group.
        return st.sampled_from([tree, tree.with_units(())])
    return st.lists(st.booleans(), min_size=len(names), max_size=len(names)).map(
        lambda chosen: tree.with_units(tuple(itertools.compress(names, chosen)))
    )


def _leaves(how: Mapping[str, Any], shared: bool, reads: bool) -> st.SearchStrategy[Part]:
    unfrozen = {name: strategy for name, strategy in how.items() if name != "frozen"}
    kinds: list[st.SearchStrategy[Part]] = [
        st.builds(Linear, st.booleans().map(lambda no: not no), **how),
        st.builds(Gain, _SHAPES, **how),
        st.builds(Offset, **unfrozen),
    ]
    if shared:
        kinds.append(st.builds(Linear, tied=_ANY, **how))
        kinds.append(st.builds(Again, _ANY, **unfrozen))
    if reads:
        kinds += [st.builds(Read, _ANY, **unfrozen)] * 2
    return st.one_of(kinds)


def _blocks(below: st.SearchStrategy[Part], how: Mapping[str, Any]) -> st.SearchStrategy[Part]:
    parts = st.lists(below, min_size=1, max_size=3).map(tuple)
    return st.builds(Block, parts, st.booleans(), **how)


def _learns(tree: Tree) -> bool:
    """Return whether a parameter with elements is in every loss, whatever else is left out."""
    built = tree.build()
    heard: list[nn.Parameter] = []
    left_out: list[str] = []
    for name, part in tree.named_parts():
        if part.used != "always":
            left_out.append(f"{name}.")
        elif not isinstance(part, Block | Again | Read) and not f"{name}.".startswith(tuple(left_out)):
            heard += built.get_submodule(name).parameters()
    return any(p.requires_grad and p.numel() for p in heard)


@st.composite
def _trees(draw: st.DrawFn, parts: st.SearchStrategy[Part], reads: bool) -> Tree:
    # Composed, not built or mapped, so that what is printed is the tree, and not how it was drawn.
    width, drawn = draw(st.integers(1, 5)), draw(st.lists(parts, max_size=3))
    tree = Tree(width, _settle(tuple(drawn), "", _Scope([])))
    tree = _with_targets(tree) if reads else tree
    return tree if _learns(tree) else replace(tree, parts=(*tree.parts, Linear()))


def _with_targets(tree: Tree) -> Tree:
    """Return `tree` with the name of a layer that has a weight in each `Read`."""
    if not any(isinstance(part, Linear | Gain) for _, part in tree.named_parts()):
        tree = replace(tree, parts=(*tree.parts, Linear()))
    weights = [name for name, part in tree.named_parts() if isinstance(part, Linear | Gain)]

    def aim(name: str, part: Part) -> Part:
        return replace(part, of=weights[int(part.of) % len(weights)]) if isinstance(part, Read) else part

    return tree.with_parts(aim)


@dataclass
class _Scope:
    """Targets of `Again` and `tied` in one group: a parameter belongs to one group only.

    `units`: every unit so far, whichever group is around it.
    """

    units: list[str]
    modules: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)


def _settle(parts: tuple[Part, ...], prefix: str, scope: _Scope) -> tuple[Part, ...]:
    return tuple(_settled(part, f"{prefix}{index}", scope) for index, part in enumerate(parts))


def _settled(part: Part, name: str, scope: _Scope) -> Part:
    if isinstance(part, Again):
        known = scope.modules + scope.units
        return replace(part, of=known[int(part.of) % len(known)]) if known else _plain(part, name, scope)
    if isinstance(part, Linear):
        known = scope.linears
        if part.tied is None or not known:
            return _plain(part, name, scope)
        scope.modules.append(name)
        return replace(part, tied=known[int(part.tied) % len(known)])
    if isinstance(part, Block):
        inner = _Scope(scope.units) if part.unit else scope
        part = replace(part, parts=_settle(part.parts, f"{name}.", inner))
        (scope.units if part.unit else scope.modules).append(name)
        return part
    scope.modules.append(name)
    return part


def _plain(part: Linear | Again, name: str, scope: _Scope) -> Linear:
    """Return a linear layer of its own, where there is nothing to be tied to or called again."""
    scope.modules.append(name)
    scope.linears.append(name)
    bias = part.bias if isinstance(part, Linear) else True
    return Linear(bias=bias, frozen=part.frozen, used=part.used, calls=part.calls)
