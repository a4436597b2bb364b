"""Parameters that the user sees as `DTensor`s, each this rank's piece of one. Runs on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from harness.engine.parameters import Entry, set_data


@dataclass(frozen=True)
class Placing:
    """Over which mesh, and how, `DTensor`s are placed."""

    mesh: DeviceMesh
    placements: Sequence[Placement]

    def tensor(self, local: Tensor, shape: torch.Size) -> DTensor:
        """Return the `DTensor` of ``shape`` of which this rank holds ``local``; shares its memory."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            _at_start(local), self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(frozen=True)
class DTensorEntry(Entry):
    """One parameter of a unit, visible as a `DTensor`."""

    placing: Placing

    @staticmethod
    def of(entry: Entry, piece: Tensor, placing: Placing) -> DTensorEntry:
        """Return the entry that shows ``piece`` in place of the plain parameter of ``entry``."""
        parameter = nn.Parameter(placing.tensor(piece, entry.shape), entry.parameter.requires_grad)
        return DTensorEntry(entry.name, parameter, entry.slots, entry.shape, placing)

    @property
    def piece(self) -> Tensor:
        return _local(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def hold(self, piece: Tensor) -> None:
        shown = self.placing.tensor(piece, self.shape)
        # A DTensor is a tensor that has dtype and device, and beside it the local one: both are exchanged.
        set_data(self.parameter, shown)
        self.parameter._local_tensor = shown._local_tensor  # type: ignore[attr-defined]
        self.parameter._spec = shown._spec  # type: ignore[attr-defined]

    def show_gradient(self, gradient: Tensor) -> None:
        # As `Placing.tensor`, in an eighth of its time: this is done for each parameter in each step.
        spec = self.parameter._spec  # type: ignore[attr-defined]
        self.parameter.grad = DTensor(gradient, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def exchanged(self, found: object) -> Entry | None:
        """Take what `load_state_dict` with ``assign=True`` puts in the parameter's place."""
        if not (isinstance(found, DTensor) and isinstance(found, nn.Parameter)):
            return None
        fits = found.shape == self.shape and tuple(found.placements) == tuple(self.placing.placements)
        return replace(self, parameter=found) if fits else None

    def copy(self) -> DTensorEntry:
        """Return an entry for the same modules with a parameter of its own, over the same mesh."""
        return DTensorEntry.of(self, self.piece.clone(), self.placing)


def _at_start(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a storage that begins where it does; shares its memory.

    torch 2.13 cannot save a `DTensor` whose local tensor lies further on in its storage.
    """
    if tensor.is_meta or tensor.storage_offset() == 0:
        return tensor
    first = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[first : first + tensor.numel() * tensor.itemsize]
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor  # what `to_local` returns under no_grad
