"""Inside a rank: join the process group, run a pytest session, watch the wire, report."""

from lockstep.rank.process import Rank
from lockstep.rank.world_fixture import RankWorld

__all__ = ["Rank", "RankWorld"]
