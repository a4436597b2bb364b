"""Inside a rank: join the process group, run a pytest session, watch the wire, report."""

from lockstep.rank.session import RankSession
from lockstep.rank.world_fixture import RankWorld

__all__ = ["RankSession", "RankWorld"]
