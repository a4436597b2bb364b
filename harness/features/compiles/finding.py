"""The first compiled graph of a run that computes something else than dynamo has traced, and words for it.

Used on both sides; standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NONE_ALONE = (
    "each graph alone computes what dynamo has traced, within the tolerance of its dtype. Small differences "
    "add up, or dynamo has traced something else than the code does: a value without a guard, say"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The first difference of a compiled graph from the graph that dynamo has traced, on one rank.

    Attributes:
        call: number of the call of a compiled graph, from 1; 0 if none differs beyond the tolerance.
        backend: name of the backend, "inductor" say; empty if no graph was compiled.
        module: name of the module in the model, if it is known.
        lines: values that differ, and by how much.
        unknown: reason why the module is not known, or why graphs were not compared; empty if there is none.
    """

    call: int = 0
    backend: str = ""
    module: str = ""
    lines: tuple[str, ...] = ()
    unknown: str = ""


def in_module(name: str) -> str:
    """Return " in module `name`"; empty for no name."""
    return f" in module `{name}`" if name else ""


def described(by_rank: Mapping[int, Finding]) -> str:
    """Return what follows "the difference comes with": the backend, the module, and values."""
    backends = ", ".join(dict.fromkeys(each.backend for each in by_rank.values() if each.backend))
    found = {rank: each for rank, each in by_rank.items() if each.call}
    if not found:
        why = next((each.unknown for each in by_rank.values() if each.unknown), _NONE_ALONE)
        return "\n".join([f"{backends}; in which module is not known: {why}", *_first_bits(by_rank.values())])
    first = min(found, key=lambda rank: (found[rank].call, rank))
    finding = found[first]
    same = [rank for rank, each in found.items() if each.call == finding.call]
    on = "all ranks" if len(same) == len(by_rank) > 1 else f"rank {', '.join(map(str, same))}"
    why = f"; in which module is not known: {finding.unknown}" if finding.unknown else ""
    values = f" (values of rank {first})" if len(same) > 1 else ""
    where = f"  on {on}, at call {finding.call} of a compiled graph{values}:"
    head = f"{backends}{',' if finding.module else ''}{in_module(finding.module)}{why}"
    return "\n".join([head, where, *(f"    {line}" for line in finding.lines)])


def _first_bits(findings: Iterable[Finding]) -> list[str]:
    lines = (each.lines for each in findings if each.lines)
    return [f"  {line}" for line in next(lines, ())]
