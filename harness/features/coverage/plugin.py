"""The plugin of coverage: where pytest-cov measures the controller, ranks measure themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.coverage import FEATURE
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

# In the controller


def pytest_ranks_imports(config: pytest.Config, preload: list[str]) -> None:
    """Leave what is measured to ranks: none runs, and so measures, what the server runs as it imports."""
    if _measures(config):
        from lockstep.launch.processes import is_of_torch

        preload[:] = filter(is_of_torch, preload)


def pytest_ranks_session(config: pytest.Config, args: list[str], parts: dict[str, Any]) -> None:
    if config.pluginmanager.hasplugin("_cov"):
        args.append("--no-cov")  # pytest-cov in a rank would erase what others have measured
    parts[FEATURE] = _measures(config)


def _measures(config: pytest.Config) -> bool:
    """Return whether pytest-cov measures this run."""
    return config.pluginmanager.hasplugin("_cov") and not config.option.no_cov


# In a rank


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Begin to measure before other plugins are configured."""
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and session.rank.spec.session.parts[FEATURE]:
        from lockstep.features.coverage.rank import RankCoverage

        config.pluginmanager.register(RankCoverage(config))
