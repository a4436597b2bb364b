"""The layouts, as arithmetic: no ranks."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.collectives import divide_factors
from harness.engine.layout import FlatLayout, Piece, RowLayout

SHAPES = {
    "nothing": (),
    "scalar": ((),),
    "one_element": ((1,),),
    "only_empty": ((0,), (3, 0)),
    "empty_between": ((2,), (0, 4), (3,)),
    "odd": ((5, 7), (7,), (), (3, 3)),
    "large_then_small": ((100,), (1,), (1,)),
}
NUM_SHARDS = (1, 2, 3, 4, 7, 200)
EVERY = pytest.mark.parametrize(
    ("shapes", "num_shards"),
    [
        pytest.param(shapes, num, id=f"{name}-{num}")
        for (name, shapes), num in itertools.product(SHAPES.items(), NUM_SHARDS)
    ],
)


@EVERY
def test_pieces_of_all_shards_tile_each_parameter_exactly_once(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    for index, shape in enumerate(shapes):
        pieces = [layout.piece(index, shard) for shard in range(num_shards)]
        covered = [element for piece in pieces for element in range(piece.start, piece.stop)]
        assert covered == list(range(math.prod(shape)))


@EVERY
def test_pieces_of_one_shard_lie_inside_it_without_overlap(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    for shard in range(num_shards):
        pieces = [layout.piece(index, shard) for index in range(len(shapes))]
        filled = [p for piece in pieces for p in range(piece.shard_start, piece.shard_stop)]
        assert filled == list(range(len(filled)))
        assert len(filled) <= layout.shard_numel


@EVERY
def test_shards_are_equal_and_padding_is_less_than_one_element_per_shard(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    assert layout.shard_numel * num_shards == layout.padded_numel == layout.numel + layout.padding
    assert 0 <= layout.padding < num_shards


ANY_SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=5).map(tuple)
EITHER = pytest.mark.parametrize("kind", [FlatLayout, RowLayout])


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_any_parameters_are_in_all_shards_together_exactly_once(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    for index, shape in enumerate(shapes):
        pieces = [layout.piece(index, shard) for shard in range(num_shards)]
        covered = [element for piece in pieces for element in range(piece.start, piece.stop)]
        assert covered == list(range(math.prod(shape)))
        if shape or kind is FlatLayout:  # what has no rows is not cut in rows: fully_shard refuses it
            shown = [math.prod(layout.piece_shape(index, shard)) for shard in range(num_shards)]
            assert shown == [len(piece) for piece in pieces]


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_pieces_of_any_parameters_do_not_overlap_in_a_shard(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    for shard in range(num_shards):
        pieces = [layout.piece(index, shard) for index in range(len(shapes))]
        places = [place for piece in pieces for place in range(piece.shard_start, piece.shard_stop)]
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(layout.shard_numel))


@EITHER
@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_any_parameters_have_their_places_in_full_and_the_rest_is_padding(kind, shapes, num_shards):
    layout = kind(shapes, num_shards)
    spans = zip(layout.starts, layout.numels, strict=True)
    places = [place for start, numel in spans for place in range(start, start + numel)]
    assert len(set(places)) == len(places) == layout.numel
    assert set(places) <= set(range(layout.padded_numel))
    assert layout.padding == layout.shard_numel * num_shards - sum(map(math.prod, shapes))


@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_flat_shards_end_to_end_are_the_parameters_end_to_end(shapes, num_shards):
    layout = FlatLayout(shapes, num_shards)
    for index, start in enumerate(layout.starts):
        for shard in range(num_shards):
            piece = layout.piece(index, shard)
            if len(piece):
                assert shard * layout.shard_numel + piece.shard_start == start + piece.start
    assert layout.padding < num_shards


@given(shapes=ANY_SHAPES, num_shards=st.integers(1, 9))
def test_rows_are_cut_as_torch_chunk_cuts(shapes, num_shards):
    layout = RowLayout(shapes, num_shards)
    for index, shape in enumerate(shapes):
        if not shape:
            continue
        chunks = torch.empty(shape).chunk(num_shards) if shape[0] else []
        expected = [tuple(chunk.shape) for chunk in chunks]
        expected += [(0, *shape[1:])] * (num_shards - len(expected))
        assert [layout.piece_shape(index, shard) for shard in range(num_shards)] == expected


def test_a_piece_says_where_it_lies_in_parameter_and_shard():
    layout = FlatLayout(((2, 2), (3,)), num_shards=2)
    assert [layout.piece(0, 0), layout.piece(1, 0)] == [Piece(0, 4, 0), Piece(0, 0, 0)]
    assert [layout.piece(0, 1), layout.piece(1, 1)] == [Piece(0, 0, 0), Piece(0, 3, 0)]


def test_no_shards_is_an_error():
    with pytest.raises(ValueError, match="num_shards must be at least 1, got 0"):
        FlatLayout(((1,),), num_shards=0)


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
def test_division_is_split_around_the_sum(size, factors):
    assert divide_factors(size) == factors
