"""Where torch's engines, or torch below another, are known to break claims on CPU ranks. Without torch.

A table for each engine, read off runs with torch 2.13.
"""

from __future__ import annotations

from lockstep.conformance.deviations import torch_ddp, torch_fsdp1, torch_fsdp2
from lockstep.conformance.deviations.deviation import Deviation
from lockstep.conformance.deviations.shared import DTENSOR_MESHES, DTENSOR_NORMS

__all__ = ["Deviation", "known_deviations"]

_TABLES = {
    "lockstep-composable": DTENSOR_NORMS + DTENSOR_MESHES,
    "torch-ddp": torch_ddp.DEVIATIONS,
    "torch-fsdp1": torch_fsdp1.DEVIATIONS,
    "torch-fsdp2": torch_fsdp2.DEVIATIONS,
    "torch-zero1": torch_ddp.DEVIATIONS,  # its gradients are DDP's; its steps deviate nowhere
}


def known_deviations(engine: str | None, claim: str) -> tuple[Deviation, ...]:
    """Return what is known of `engine` and the test of this node id."""
    return tuple(found for found in _TABLES.get(engine or "", ()) if found.is_about(claim))
