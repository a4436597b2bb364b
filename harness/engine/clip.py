"""The norm of all gradients over ranks, and clipping by it. Runs on ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.hooks import Unit


def clip(
    units: Iterable[Unit], parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm before.

    Sharded gradients count once over the ranks, and so does what every rank holds in full (NO_SHARD,
    ``parameters`` outside any unit). Norms are taken in fp32, or fp64 for fp64 gradients, and are 0-dim.
    """
    groups = [unit.group for unit in units if unit.group]
    if any(group.gradients.unreduced for group in groups):
        raise RuntimeError(
            "clip_grad_norm_: gradients from no_sync are not reduced yet; run a synced backward first."
        )
    local = [p.grad for p in parameters if p.grad is not None]
    cut: dict[dist.ProcessGroup, list[Tensor]] = {}  # by shard axis; replicas hold the same
    for group in groups:
        axis = group.settings.axes.shard
        held = local if axis is None else cut.setdefault(axis, [])
        held += group.gradients.visible()
    device = groups[0].shard.device if groups else torch.device("cpu")
    largest = norm_type == float("inf")
    sums = [_power_sum(local, norm_type, device)]
    sums += [collectives.total(_power_sum(g, norm_type, device), [axis], largest) for axis, g in cut.items()]
    norm = torch.stack(sums).amax() if largest else torch.stack(sums).sum() ** (1 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in [*local, *(g for gradients in cut.values() for g in gradients)]:
        gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))
    return norm


def _power_sum(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements, in fp64; for p = inf the largest |g|."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradient in gradients:
        precise = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=precise).to(device, torch.float64))
    stacked = torch.stack(norms)
    return stacked.amax() if norm_type == float("inf") else (stacked**norm_type).sum()
