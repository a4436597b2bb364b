"""The launcher's environment on a rank: MASTER_ADDR and MASTER_PORT, and what meets there. Inside a rank.

The port is the world's own for as long as it lives: the controller holds it, bound and not listening, so that
nothing else is given it, while a test may listen there. `init_process_group()` that reads the environment
meets in a file instead, a new one each time: torch's last server may still be closing.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch.distributed as dist

from harness.protocol import RankSpec
from harness.rank.torch_internals import replace_store_maker

_HERE = frozenset({"127.0.0.1", "localhost"})


class Rendezvous:
    """Makes the stores of groups that the environment describes.

    Attributes:
        item: number of the current item of this world, the same on all ranks.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.item = 0
        self._spec = spec
        self._meetings: Counter[tuple[int, int]] = Counter()

    def install(self) -> None:
        """Set the variables, and serve `env://` and `tcp://` at their port."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._spec.port))
        self._make_torchs = replace_store_maker(self._make)

    def _make(
        self, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> dist.Store:
        """Return a store for one meeting: ranks that meet have met equally often in this item."""
        if port != self._spec.port or hostname not in _HERE:
            store: dist.Store = self._make_torchs(hostname, port, rank, world_size, *args, **kwargs)
            return store
        self._meetings[self.item, world_size] += 1
        alone = f"-of-{self._spec.rank}" if world_size == 1 else ""
        name = f"meeting-{self.item}-{world_size}-{self._meetings[self.item, world_size]}{alone}"
        return dist.FileStore(f"{self._spec.directory}/{name}", world_size)
