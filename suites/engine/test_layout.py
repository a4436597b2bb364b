"""Layouts of parameters in shards, and packing into a collective's buffer: arithmetic, without ranks."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.engine.collectives import divide_factors
from lockstep.engine.layout import FlatLayout, Piece, RowLayout, copy_in, copy_out

SHAPES = {
    "nothing": (),
    "one_element": ((1,),),
    "only_empty": ((0,), (3, 0)),
    "empty_between": ((2,), (0, 4), (3,)),
    "odd": ((5, 7), (7,), (3, 3, 2)),
    "large_then_small": ((100,), (1,), (1,)),
}
ZERO_DIM = {"scalar": ((),), "scalar_between": ((5, 7), (7,), (), (3, 3))}  # cannot be cut in rows
NUM_SHARDS = (1, 2, 3, 4, 7, 200)


def examples(shapes):
    return [
        pytest.param(some, num, id=f"{name}-{num}")
        for (name, some), num in itertools.product(shapes.items(), NUM_SHARDS)
    ]


ROWS = pytest.mark.parametrize(("shapes", "num_shards"), examples(SHAPES))
FLAT = pytest.mark.parametrize(("shapes", "num_shards"), examples(SHAPES | ZERO_DIM))
ANY_SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=5).map(tuple)
EITHER = pytest.mark.parametrize("kind", [FlatLayout, RowLayout])


def values_of(shapes):
    return [torch.arange(1.0, math.prod(shape) + 1).view(shape) + 1000 * i for i, shape in enumerate(shapes)]


def elements_by_parameter(layout):
    """Return, for each parameter, the elements that the shards hold, in rank order."""
    return [
        [element for piece in pieces for element in range(piece.start, piece.stop)]
        for pieces in (
            [layout.piece(index, shard) for shard in range(layout.num_shards)]
            for index in range(len(layout.shapes))
        )
    ]


def positions_by_shard(layout):
    """Return, for each shard, the positions that parameters have in it, in their order."""
    return [
        [position for piece in pieces for position in range(piece.shard_start, piece.shard_stop)]
        for pieces in (
            [layout.piece(index, shard) for index in range(len(layout.shapes))]
            for shard in range(layout.num_shards)
        )
    ]


# every layout


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_all_shards_together_hold_each_element_once(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    assert elements_by_parameter(layout) == [list(range(math.prod(shape))) for shape in shapes]
    for index, shape in enumerate(shapes):
        if shape or kind is FlatLayout:  # 0-dim parameters have no rows: fully_shard refuses them
            pieces = [layout.piece(index, shard) for shard in range(num_shards)]
            shown = [math.prod(layout.piece_shape(index, shard)) for shard in range(num_shards)]
            assert shown == [len(piece) for piece in pieces]


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_slices_of_one_shard_do_not_overlap(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    for positions in positions_by_shard(layout):
        assert len(set(positions)) == len(positions)
        assert set(positions) <= set(range(layout.shard_numel))


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_unsharded_parameters_do_not_overlap(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    spans = zip(layout.starts, layout.numels, strict=True)
    positions = [position for start, numel in spans for position in range(start, start + numel)]
    assert len(set(positions)) == len(positions) == layout.numel
    assert set(positions) <= set(range(layout.padded_numel))
    assert layout.padding == layout.shard_numel * num_shards - sum(map(math.prod, shapes))


# flat


@FLAT
def test_each_element_is_in_one_flat_shard(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    assert elements_by_parameter(layout) == [list(range(math.prod(shape))) for shape in shapes]


@FLAT
def test_flat_slices_fill_a_shard_without_gaps(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    for positions in positions_by_shard(layout):
        assert positions == list(range(len(positions)))
        assert len(positions) <= layout.shard_numel


@FLAT
def test_flat_padding_is_less_than_one_element_per_shard(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    assert layout.shard_numel * num_shards == layout.padded_numel == layout.numel + layout.padding
    assert 0 <= layout.padding < num_shards


@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_flat_shards_in_rank_order_are_the_parameters_in_order(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    for index, start in enumerate(layout.starts):
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            if len(piece):
                assert shard * layout.shard_numel + piece.shard_start == start + piece.start
    assert layout.padding < num_shards


def test_a_slice_has_its_position_in_parameter_and_shard():
    layout = FlatLayout(((2, 2), (3,)), num_shards=2)
    assert [layout.piece(0, 0), layout.piece(1, 0)] == [Piece(0, 4, 0), Piece(0, 0, 0)]
    assert [layout.piece(0, 1), layout.piece(1, 1)] == [Piece(0, 0, 0), Piece(0, 3, 0)]


# rows


@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_row_shapes_are_those_of_torch_chunk(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for index, shape in enumerate(shapes):
        if not shape:
            continue
        chunks = torch.empty(shape).chunk(num_shards) if shape[0] else []
        expected = [tuple(chunk.shape) for chunk in chunks]
        expected += [(0, *shape[1:])] * (num_shards - len(expected))
        assert [layout.piece_shape(index, shard) for shard in range(num_shards)] == expected


@ROWS
def test_row_slices_are_the_chunks_of_torch_chunk(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for index, value in enumerate(values_of(shapes)):
        chunks = value.chunk(num_shards)
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            mine = value.flatten()[piece.start : piece.stop].view(layout.piece_shape(index, shard))
            expected = chunks[shard] if shard < len(chunks) else value[:0]
            assert torch.equal(mine, expected)


@ROWS
def test_row_slices_lie_in_the_shard_in_order(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for positions in positions_by_shard(layout):
        assert positions == sorted(set(positions))
        assert all(position < layout.shard_numel for position in positions)
    assert layout.padded_numel == layout.numel + layout.padding == layout.shard_numel * num_shards


DIMS = [
    pytest.param(shape, dim, num, id=f"{'x'.join(map(str, shape))}-dim{dim}-{num}")
    for shape in [(4, 6), (3, 5), (2, 3, 4), (1, 7), (5, 1), (0, 3), (3, 0)]
    for dim in range(1, len(shape))
    for num in (1, 2, 3, 7)
]
ANY_DIM = pytest.mark.parametrize(("shape", "dim", "num_shards"), DIMS)


@ANY_DIM
def test_any_dim_is_split_as_torch_chunk_does(shape, dim, num_shards):
    layout, value = RowLayout((shape,), num_shards, (dim,)), values_of([shape])[0]
    chunks = value.chunk(num_shards, dim)
    for shard in range(num_shards):
        expected = chunks[shard] if shard < len(chunks) else value.narrow(dim, 0, 0)
        if not value.size(dim):  # torch.chunk gives one empty chunk
            expected = value
        assert torch.equal(layout.select(0, shard, value), expected)
        assert layout.piece_shape(0, shard) == tuple(expected.shape)
        assert len(layout.piece(0, shard)) == expected.numel()


@ANY_DIM
def test_pieces_of_any_dim_are_contiguous_padded_and_come_back_whole(shape, dim, num_shards):
    shapes = ((3, 2), shape, (2,))
    layout, values = RowLayout(shapes, num_shards, (0, dim, 0)), values_of(shapes)
    packed, full = torch.full((2, layout.padded_numel), float("nan"))
    copy_in(values, packed, layout)
    shards = packed.view(num_shards, layout.shard_numel)
    for (index, value), shard in itertools.product(enumerate(values), range(num_shards)):
        piece, start = layout.piece(index, shard), layout.shard_starts[index]
        expected = torch.zeros(layout.piece_numels[index])
        expected[: len(piece)] = layout.select(index, shard, value).flatten()
        assert torch.equal(shards[shard, start : start + len(expected)], expected)
    copy_out(shards.split(2), full, layout)
    for value, view in zip(values, layout.views(full), strict=True):
        assert torch.equal(view, value)


def test_one_parameter_is_in_order_only_if_its_pieces_are_contiguous_in_it():
    assert RowLayout(((4, 6),), 2, (0,)).in_order
    assert not RowLayout(((4, 6),), 2, (1,)).in_order
    assert RowLayout(((1, 6),), 2, (1,)).in_order


# packing


@ROWS
def test_packing_fills_the_slices_and_zeroes_the_padding(shapes, num_shards):
    layout, values = RowLayout(shapes, num_shards), values_of(shapes)
    buffer = torch.full((layout.padded_numel,), float("nan"))
    copy_in(values, buffer, layout)
    expected = torch.zeros(num_shards, layout.shard_numel)
    for (index, value), shard in itertools.product(enumerate(values), range(num_shards)):
        piece = layout.piece(index, shard)
        expected[shard, piece.shard_start : piece.shard_stop] = value.flatten()[piece.start : piece.stop]
    assert torch.equal(buffer, expected.flatten())


@ROWS
def test_unpacking_inverts_packing(shapes, num_shards):
    layout, values = RowLayout(shapes, num_shards), values_of(shapes)
    buffer, full = torch.empty(2, layout.padded_numel)
    copy_in(values, buffer, layout)
    copy_out(buffer.view(num_shards, layout.shard_numel).split(1), full, layout)
    for value, start, numel in zip(values, layout.starts, layout.numels, strict=True):
        assert torch.equal(full[start : start + numel].view(value.shape), value)


def test_unpacking_takes_as_many_operations_for_any_number_of_shards():
    class Count(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    def count(num_shards):
        layout = RowLayout(((8, 4), (8,)), num_shards)
        buffer, full = torch.empty(2, layout.padded_numel)
        with Count() as counted:
            copy_out([buffer.view(num_shards, -1)], full, layout)
        return counted.num

    assert count(2) == count(1024)


@EITHER
def test_packing_zeroes_missing_values_and_casts_others(kind):
    layout = kind(((3, 2), (5,)), 2)
    buffer = torch.full((layout.padded_numel,), float("nan"), dtype=torch.bfloat16)
    copy_in([None, torch.full((5,), 1 + 2**-10)], buffer, layout)
    assert buffer.sum() == 5
    assert set(buffer.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("size", "factors"),
    [
        (1, (1, 1)),
        (2, (2, 1)),
        (3, (2, 1.5)),
        (4, (2, 2)),
        (6, (4, 1.5)),
        (8, (4, 2)),
        (16, (4, 4)),
        (64, (8, 8)),
    ],
)
def test_division_is_split_before_and_after_the_sum(size, factors):
    assert divide_factors(size) == factors
