"""Inside a rank: join the process group, run a pytest session, watch the wire, report."""

from harness.rank.process import Rank
from harness.rank.world_fixture import RankWorld

__all__ = ["Rank", "RankWorld"]
