"""The full parameters of one group in one dtype: one buffer, and a leaf tensor per parameter that lies in it.

The leaves live as long as the group, so that what autograd saved in forward is valid in backward; only the
memory under them comes and goes. To read a leaf whose memory is gone crashes the process, as with torch's own
engines; with LOCKSTEP_ENGINE_DEBUG=1 it reads NaN. Runs on ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.engine.awaited import Awaited
from harness.engine.layout import Layout
from harness.engine.precision import Dtypes


@dataclass(eq=False)
class FullParameters:
    """A 1-D ``buffer`` of the layout's padded size and ``leaves``, one per parameter in its own shape.

    ``dtypes``: of the forwards that compute with them, and of their backwards, which ``awaited`` counts for.
    ``borrowed``: the buffer is the group's own storage (nothing is sharded or cast) and is never freed.
    ``poison``: instead of giving memory back, fill it with NaN, so that a late reader is noticed.
    """

    # Not shown: a traceback shows what functions were given, and may find the memory gone.
    buffer: Tensor = field(repr=False)
    leaves: tuple[Tensor, ...] = field(repr=False)
    dtypes: Dtypes
    borrowed: bool
    poison: bool
    awaited: Awaited = field(default_factory=Awaited)
    _in_use: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """What is allocated; where memory is never given back, what modules or a backward still need."""
        stays = self.borrowed or self.poison
        return 0 if stays and not self._in_use else self.buffer.untyped_storage().nbytes()

    def allocate(self) -> None:
        self._in_use = True
        storage = self.buffer.untyped_storage()
        if not self.borrowed and storage.nbytes() == 0:
            storage.resize_(self.buffer.numel() * self.buffer.itemsize)

    def free(self) -> None:
        self._in_use = False
        if self.borrowed:
            return
        if self.poison:
            fill_with_nan(self.buffer)
        else:
            self.buffer.untyped_storage().resize_(0)


def lay_out(buffer: Tensor, layout: Layout, trainable: Iterable[bool] | None) -> tuple[Tensor, ...]:
    """Return leaves that lie in ``buffer``, whose memory must be allocated: one for each parameter.

    They are plain tensors, but with ``trainable`` parameters, which that says of each.
    """
    # Tensors made in inference mode could never be saved for a later backward.
    with torch.inference_mode(False), torch.no_grad():
        leaves = tuple(
            # `.data` gives each leaf a version counter of its own: filling the buffer for backward must not
            # look like an in-place change of what autograd saved in forward.
            buffer[start : start + numel].view(shape).data
            for start, numel, shape in zip(layout.starts, layout.numels, layout.shapes, strict=True)
        )
    if trainable is None:
        return leaves
    return tuple(nn.Parameter(leaf, wanted) for leaf, wanted in zip(leaves, trainable, strict=True))


def fill_with_nan(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.data.fill_(float("nan"))
