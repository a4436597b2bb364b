"""Agreement of ranks: they hold the same bits, and fail together. Inside a rank; calls torch.distributed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.assertions import divergence
from lockstep.assertions.closeness import EXACT, differences
from lockstep.exceptions import Diverged
from lockstep.recorders import ExecutionLog, active_log
from lockstep.recorders.tensors import flat_bytes, local_part

_SHOWN = 5  # names in one message; a model that was never synchronised differs in hundreds


def fail_together(findings: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of the group if any rank has findings. Every rank must call it.

    A rank that raised alone would leave the others waiting in their next collective.

    Raises:
        AssertionError: the findings of all ranks, each behind the global rank that made it.
    """
    __tracebackhide__ = True
    if not largest(torch.tensor([len(findings)]), group).any():
        return
    lines = [
        f"rank {rank}: {finding}"
        for rank, of_rank in gathered(list(findings), group).items()
        for finding in of_rank
    ]
    if lines:
        raise AssertionError("\n".join(lines))


def assert_same_across_ranks(
    tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Assert that every rank of the group holds the same tensors, bit for bit. Every rank must call it.

    Args:
        tensors: tensors by name, of any shapes and dtypes. Of a DTensor the local part is compared.
        group: the default group if None.

    Raises:
        Diverged: an AssertionError on every rank, with the same message: the rank, the name, and the largest
            difference from the group's first rank; in the test's second, recorded run also where they parted.
        AssertionError: nothing can be compared: no tensor, a group of one rank.
    """
    __tracebackhide__ = True
    local = {name: local_part(tensor).detach().cpu() for name, tensor in tensors.items()}
    own = {name: _fingerprint(tensor) for name, tensor in local.items()}
    if _is_same_everywhere(own, group) and own and dist.get_world_size(group) > 1:
        return
    prints = gathered(own, group)
    if len(prints) == 1:
        raise AssertionError("a group of one rank has nothing to agree with")
    if empty := [rank for rank, of_rank in prints.items() if not of_rank]:
        raise AssertionError(f"no tensors to compare on ranks {empty}")
    (first, expected), *others = prints.items()
    found: list[str] = []
    # From here on every rank sees the same fingerprints and takes the same path, the gathers included.
    for name in dict.fromkeys(name for of_rank in prints.values() for name in of_rank):
        if all(of_rank.get(name) == expected.get(name) for _, of_rank in others):
            continue
        if len(found) == _SHOWN:
            found.append("and more names")
            break
        found.append(_disagreement(name, gathered(local.get(name), group), first))
    if found:
        raise _diverged("\n".join(found), local, group)


def _diverged(message: str, local: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> Diverged:
    """Return the error; where this run is recorded it shows where the ranks parted. A collective then."""
    log = active_log()
    if log is None:
        return Diverged(message)
    with log.paused():
        paragraph = _explanation(log, {name: tuple(tensor.shape) for name, tensor in local.items()}, group)
    return Diverged(f"{paragraph}\n{divergence.shortened(message)}")


def _explanation(
    log: ExecutionLog, shapes: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup | None
) -> str:
    """Return the paragraph about the first event at which the ranks part, the same on all of them."""
    events = [event for event in log.events if event.fingerprint]
    outlines = gathered(divergence.outline(events), group)
    raced = gathered(divergence.races(log.events), group)
    places = divergence.first_parting_of_ranks(outlines, shapes)
    if places is None:
        return divergence.describe(dict.fromkeys(outlines), raced)
    first = next(iter(outlines))
    keys = [None if place < 0 else outlines[first][place][0] for place in places]
    by_key = {event.key: event for event in events}
    event, before = (None if key is None else by_key.get(key) for key in keys)
    values = gathered(None if event is None else event.value, group)
    lines = [] if event is None else divergence.describe_ranks(event, before, values, log.events)
    lines = gathered(lines, group)[first]
    return "\n".join([*lines, *(f"{line} (rank {rank})" for rank, found in raced.items() for line in found)])


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> dict[int, Any]:
    """Return the value of each rank of the group, by global rank.

    Where torch.distributed is not initialised, this process is rank 0 of 1.
    """
    if not dist.is_initialized():
        return {0: value}
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(ranks, values, strict=True))


def _is_same_everywhere(value: object, group: dist.ProcessGroup | None) -> bool:
    """Return whether every rank of the group has a value with the same `repr`. A collective."""
    if not dist.is_initialized():
        return False
    words = torch.tensor(list(hashlib.sha256(repr(value).encode()).digest()))
    # The largest of a byte and the largest of its negative are a byte and its negative where all agree.
    return bool((largest(torch.cat([words, -words]), group).view(2, -1).sum(0) == 0).all())


def largest(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the element-wise largest of `values`, int64 on CPU, of all ranks: one collective.

    To gather objects costs ten times as much, and most often there is nothing to say.
    """
    if not dist.is_initialized():
        return values
    on_cpu = "cpu:" in str(dist.get_backend_config(group))
    found = values if on_cpu else values.to(torch.accelerator.current_accelerator())
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.cpu()


def _disagreement(name: str, by_rank: Mapping[int, torch.Tensor | None], first: int) -> str:
    if missing := [rank for rank, tensor in by_rank.items() if tensor is None]:
        return f"{name}: missing on ranks {missing}"
    held = {rank: tensor for rank, tensor in by_rank.items() if tensor is not None}
    expected, lines = held[first], []
    for rank, tensor in held.items():
        if found := differences({name: tensor}, {name: expected}, EXACT):
            lines.append(f"rank {rank} differs from rank {first} in {found[0]}")
        elif _fingerprint(tensor) != _fingerprint(expected):
            lines.append(f"rank {rank} differs from rank {first} in {name}: in the sign of a zero only")
    return "\n".join(lines)


def _fingerprint(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    bits = hashlib.sha256(flat_bytes(tensor).numpy().tobytes()).digest()
    return str(tensor.dtype), tuple(tensor.shape), bits
