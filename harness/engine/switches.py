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
    what is guessed. ``split_among``: how many neighbouring ranks hold full parameters between them from
    forward to backward, where these are given up; None is all.
    """

    sync: bool = True
    frees_after_forward: bool | None = True
    frees_after_backward: bool = True
    split_among: int | None = None
    forward_prefetch: Sequence[ShardGroup] = ()
    backward_prefetch: Sequence[ShardGroup] = ()
