"""Where torch's engines are known to break claims of the suites, on CPU ranks. Does not import torch.

A table for each engine, read off runs with torch 2.13.
"""

from __future__ import annotations

from harness.adapters.deviations import torch_ddp, torch_fsdp1, torch_fsdp2
from harness.adapters.deviations.deviation import Deviation

__all__ = ["Deviation", "known_deviations"]

_TABLES = {
    "torch-ddp": torch_ddp.DEVIATIONS,
    "torch-fsdp1": torch_fsdp1.DEVIATIONS,
    "torch-fsdp2": torch_fsdp2.DEVIATIONS,
}


def known_deviations(engine: str | None, claim: str) -> tuple[Deviation, ...]:
    """Return what is known of ``engine`` and the test of this node id."""
    return tuple(found for found in _TABLES.get(engine or "", ()) if found.is_about(claim))
