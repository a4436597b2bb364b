"""Parity of the shards that this rank holds with a reference. Inside a rank; calls torch.distributed."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.assertions.agreement import fail_together
from harness.assertions.closeness import Tolerance, differences

__all__ = ["assert_sharded_parity", "local_part"]


def assert_sharded_parity(
    sharded: nn.Module, reference: nn.Module, tolerance: Tolerance | torch.dtype | None = None
) -> None:
    """Assert that each DTensor parameter and its gradient hold this rank's part of the reference's.

    Every rank must call it. Values, dtypes, names, and the placements of the gradients are compared.

    Args:
        sharded: its parameters are DTensors, named as in the reference.
        reference: unsharded; the same on every rank.

    Raises:
        AssertionError: on every rank, with rank, name and largest difference; also if there is no parameter.
    """
    full = dict(reference.named_parameters())
    actual: dict[str, torch.Tensor | None] = {}
    expected: dict[str, torch.Tensor | None] = {}
    found: list[str] = []
    for name, p in sharded.named_parameters():
        if not isinstance(p, DTensor) or name not in full:
            found.append(f"{name}: not a DTensor, or not a parameter of the reference")
            continue
        actual |= {name: local_part(p), f"{name}.grad": local_part(p.grad)}
        whole = full.pop(name)
        expected |= {name: _part(whole, of=p), f"{name}.grad": _part(whole.grad, of=p)}
        if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
            found.append(f"{name}.grad: placed {p.grad.placements}, its parameter {p.placements}")
    found += [f"{name}: missing" for name in full]
    fail_together([*found, *differences(actual, expected, tolerance)])


def _part(whole: torch.Tensor | None, of: DTensor) -> torch.Tensor | None:
    if whole is None:
        return None
    # Without a source rank each rank cuts its part out of its own copy: no collective.
    return distribute_tensor(whole.detach(), of.device_mesh, of.placements, src_data_rank=None).to_local()


def local_part(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return what of a DTensor this rank holds, sharing its memory; any other tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
