"""Between full parameters and the order in which shards travel. Imports torch and engine.layout only."""

from collections.abc import Sequence

import torch
from torch import Tensor

from harness.engine.layout import Layout, RowLayout


def unpack(shards: Sequence[Tensor], full: Tensor, layout: Layout) -> None:
    """Fill ``full`` (1-D, the layout's padded size) from all ``shards``, which lie there row by row."""
    assert isinstance(layout, RowLayout)
    sizes = list(layout.piece_numels)
    parameters = torch.split(full, [size * layout.num_shards for size in sizes])
    for index, shard in enumerate(shards):
        for parameter, piece, size in zip(parameters, torch.split(shard, sizes), sizes, strict=True):
            parameter[index * size : (index + 1) * size].copy_(piece)


def pack(values: Sequence[Tensor | None], wire: Tensor, layout: Layout) -> None:
    """Fill ``wire`` with one value per parameter, in its shape and any dtype; zeros for None and padding."""
    if isinstance(layout, RowLayout):
        _pack_rows(values, wire.view(layout.num_shards, -1), layout)
        return
    for value, start, numel, shape in zip(values, layout.starts, layout.numels, layout.shapes, strict=True):
        view = wire[start : start + numel].view(shape)
        view.zero_() if value is None else view.copy_(value)
    wire[layout.numel :].zero_()


def _pack_rows(values: Sequence[Tensor | None], shards: Tensor, layout: RowLayout) -> None:
    pieces = zip(values, layout.shard_starts, layout.piece_numels, strict=True)
    for value, start, size in pieces:
        into = shards[:, start : start + size]
        if value is None or size == 0:
            into.zero_()
            continue
        flat = value.reshape(-1)
        num_whole = flat.numel() // size
        into[:num_whole].copy_(flat[: num_whole * size].view(num_whole, size))
        if num_whole < layout.num_shards:
            rest = flat[num_whole * size :]
            into[num_whole, : rest.numel()].copy_(rest)
            into[num_whole, rest.numel() :].zero_()
            into[num_whole + 1 :].zero_()
