"""Meshes of several axes, and a model that is tensor parallel on one of them."""

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Grid:
    """The axes of data parallelism, to shard over, and those of tensor parallelism, in one `mesh`."""

    mesh: Any
    data: Any
    tensor: Any

    def own(self, batch):
        """Return the part of `batch` that this rank computes on, with those that divide its parameters."""
        index = 0
        for axis, coordinate in enumerate(self.data.get_coordinate()):
            index = index * self.data.size(axis) + coordinate
        return batch.chunk(self.data.size())[index]


@pytest.fixture
def grid(world):
    """Make a `Grid` of a shape whose last `num_tensor` axes are those of tensor parallelism."""
    names = {1: ("shard",), 2: ("replicate", "shard")}

    def grid(*shape, num_tensor=1):
        data = names[len(shape) - num_tensor]
        tensor = ("tensor", "inner")[:num_tensor]
        mesh = world.mesh(*shape, names=(*data, *tensor))
        return Grid(mesh, mesh[data], mesh[tensor])

    return grid
