"""The plugin of annotations: in GitHub Actions each failure is shown beside its line."""

from __future__ import annotations

import os

import pytest

from lockstep.hookspecs import RANK_PLUGIN

SAME_WORK = "pytest_github_actions_annotate_failures"
"""A plugin that writes annotations too; where it is loaded, this one writes none."""


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("GITHUB_ACTIONS") != "true" or config.pluginmanager.hasplugin(SAME_WORK):
        return
    if not (config.pluginmanager.hasplugin(RANK_PLUGIN) or hasattr(config, "workerinput")):
        from lockstep.features.annotations.annotations import Annotations

        config.pluginmanager.register(Annotations(config, os.environ), "harness-annotations")
