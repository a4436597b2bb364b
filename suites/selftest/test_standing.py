"""Progress of a rank, as the controller reads it of one that may have died."""

from __future__ import annotations

from pathlib import Path

from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.standing import Standing, read_standing


def test_the_controller_reads_how_far_a_rank_has_come(tmp_path: Path) -> None:
    session = SessionSpec((), "/", (), (), {}, {}, captures=True)
    of_rank, of_other = (
        RankSpec(rank, WorldKey(2, "gloo", "cpu"), session, 0, str(tmp_path), "") for rank in (0, 1)
    )
    assert read_standing(of_rank) == (0, 0)
    Path(of_rank.path_of("log")).write_bytes(bytes(70))
    standing = Standing(of_rank)
    standing.await_item()
    standing.record_phases_over(2)
    assert read_standing(of_rank) == (2, 70)
    assert read_standing(of_other) == (0, 0)
