"""The verdicts of one session over the classes of a sample project."""

from __future__ import annotations

import pytest

from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, shared_project: Project) -> dict[str, str]:
    """The verdicts on the requesting module's PROJECT, with its lines INI for pytest.ini."""
    shared_project.copy(request.module.PROJECT, getattr(request.module, "INI", "ranks_adopt = torch"))
    return verdicts_of(shared_project)
