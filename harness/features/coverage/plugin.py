"""The plugin of coverage: where pytest-cov measures the controller, ranks measure themselves."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

FEATURE = "coverage"

# Of no use in a rank: other processes run what this one does not, the server imports some of it first, and
# no context is switched to.
_DISABLED_WARNINGS = [
    *("already-imported", "module-not-imported", "module-not-measured", "no-data-collected"),
    *("dynamic-conflict", "no-sysmon-context"),
]

# In the controller


@pytest.hookimpl(trylast=True)  # of all hints
def pytest_ranks_imports(config: pytest.Config, preload: list[str], hints: list[str]) -> None:
    """Leave what is measured to ranks: none runs, and so measures, what the server runs as it imports."""
    if _measures(config):
        from lockstep.launch.processes import is_of_torch

        preload[:] = filter(is_of_torch, preload)
        hints[:] = filter(is_of_torch, hints)


def pytest_ranks_session(config: pytest.Config, args: list[str], parts: dict[str, Any]) -> None:
    if config.pluginmanager.hasplugin("_cov"):
        args.append("--no-cov")  # pytest-cov in a rank would erase what others have measured
    parts[FEATURE] = _measures(config)


def _measures(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("_cov") and not config.option.no_cov


# In a rank


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Begin to measure before other plugins are configured."""
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and session.rank.spec.session.parts[FEATURE]:
        config.pluginmanager.register(RankCoverage(config))


class RankCoverage:
    """Measures this process as pytest-cov would, with the same options, into its own file."""

    def __init__(self, config: pytest.Config) -> None:
        options = config.option
        coverage: Any = importlib.import_module("coverage")
        self._coverage = coverage.Coverage(
            source=None if True in options.cov_source else options.cov_source,  # a plain `--cov`
            branch=options.cov_branch,
            config_file=options.cov_config,
            data_suffix=True,
        )
        disabled = self._coverage.get_option("run:disable_warnings")
        self._coverage.set_option("run:disable_warnings", [*disabled, *_DISABLED_WARNINGS])
        self._coverage.start()

    def pytest_runtest_logfinish(self) -> None:
        """Write what was measured: the rank may be killed in the next test, or as another one is."""
        self._coverage.switch_context("")  # 1 ms; `save` takes 20, as it looks for files that never ran

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()
