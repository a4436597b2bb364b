def test_unmarked(rank_world):
    pass
