"""What a user may change of a unit between steps. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.engine.group import ShardGroup


@dataclass
class Switches:
    """``sync``: backward reduces gradients. ``frees_after_forward``: full parameters are given up after it;
    None means below the root only. ``frees_after_backward``: likewise; without, the next forward finds them.
    ``forward_prefetch``, ``backward_prefetch``: the groups to gather while this unit computes, instead of
    what is guessed.
    """

    sync: bool = True
    frees_after_forward: bool | None = True
    frees_after_backward: bool = True
    forward_prefetch: Sequence[ShardGroup] = ()
    backward_prefetch: Sequence[ShardGroup] = ()
