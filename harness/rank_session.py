"""The session of a rank, as fixtures reach it. Used on both sides; must not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession


def session_of(request: pytest.FixtureRequest) -> RankSession:
    """Return the session of the rank that sets up one of our fixtures; fail the test off ranks."""
    session: RankSession | None = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        pytest.fail(
            f"the fixture `{request.fixturename}` exists only on ranks: mark the test with "
            "pytest.mark.ranks(2)",
            pytrace=False,
        )
    return session
