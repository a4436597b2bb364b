"""The layout that cuts parameters row by row, and its way onto the wire and back: no ranks."""

import itertools
import math

import pytest
import torch

from harness.engine.layout import FlatLayout, RowLayout, copy_in, copy_out

SHAPES = {
    "one_element": ((1,),),
    "only_empty": ((0,), (3, 0)),
    "empty_between": ((2,), (0, 4), (3,)),
    "odd": ((5, 7), (7,), (3, 3, 2)),
    "large_then_small": ((100,), (1,), (1,)),
}
EVERY = pytest.mark.parametrize(
    ("shapes", "num_shards"),
    [
        pytest.param(shapes, num, id=f"{name}-{num}")
        for (name, shapes), num in itertools.product(SHAPES.items(), (1, 2, 3, 4, 7, 200))
    ],
)


def values_of(shapes):
    return [torch.arange(1.0, math.prod(shape) + 1).view(shape) + 1000 * i for i, shape in enumerate(shapes)]


@EVERY
def test_pieces_are_the_chunks_that_torch_cuts_along_dim_0(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for index, value in enumerate(values_of(shapes)):
        chunks = value.chunk(num_shards)
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            mine = value.flatten()[piece.start : piece.stop].view(layout.piece_shape(index, shard))
            expected = chunks[shard] if shard < len(chunks) else value[:0]
            assert torch.equal(mine, expected)


@EVERY
def test_pieces_of_one_shard_lie_inside_it_without_overlap(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for shard in range(num_shards):
        pieces = [layout.piece(index, shard) for index in range(len(shapes))]
        filled = [p for piece in pieces for p in range(piece.shard_start, piece.shard_stop)]
        assert filled == sorted(set(filled))
        assert all(p < layout.shard_numel for p in filled)
    assert layout.padded_numel == layout.numel + layout.padding == layout.shard_numel * num_shards


@EVERY
def test_what_is_packed_lies_in_the_pieces_and_padding_is_zero(shapes, num_shards):
    layout, values = RowLayout(shapes, num_shards), values_of(shapes)
    wire = torch.full((layout.padded_numel,), float("nan"))
    copy_in(values, wire, layout)
    expected = torch.zeros(num_shards, layout.shard_numel)
    for (index, value), shard in itertools.product(enumerate(values), range(num_shards)):
        piece = layout.piece(index, shard)
        expected[shard, piece.shard_start : piece.shard_stop] = value.flatten()[piece.start : piece.stop]
    assert torch.equal(wire, expected.flatten())


@EVERY
def test_what_was_packed_unpacks_to_full_parameters(shapes, num_shards):
    layout, values = RowLayout(shapes, num_shards), values_of(shapes)
    wire, full = torch.empty(2, layout.padded_numel)
    copy_in(values, wire, layout)
    copy_out(wire.view(num_shards, layout.shard_numel), full, layout)
    for value, start, numel in zip(values, layout.starts, layout.numels, strict=True):
        assert torch.equal(full[start : start + numel].view(value.shape), value)


@pytest.mark.parametrize("layout", [FlatLayout, RowLayout])
def test_a_missing_value_is_packed_as_zeros_and_another_dtype_is_cast(layout):
    layout = layout(((3, 2), (5,)), 2)
    wire = torch.full((layout.padded_numel,), float("nan"), dtype=torch.bfloat16)
    copy_in([None, torch.full((5,), 1 + 2**-10)], wire, layout)
    assert wire.sum() == 5
    assert set(wire.tolist()) == {0.0, 1.0}


def test_no_shards_is_an_error():
    with pytest.raises(ValueError, match="RowLayout: num_shards must be at least 1, got 0"):
        RowLayout(((1,),), num_shards=0)
