"""The flat layout, as arithmetic: no ranks, no tensors."""

import itertools
import math

import pytest

from harness.engine.collectives import divide_factors
from harness.engine.layout import FlatLayout, Piece

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
