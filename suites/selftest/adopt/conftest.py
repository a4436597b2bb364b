"""Modules of packages, and the verdicts of one session over the classes of a sample project."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lockstep.features.adopt import torch_internals
from suites.selftest.adopt.stand_ins import OfTorchcomms, Process, Workers
from suites.selftest.adopt.verdicts import verdicts_of
from suites.selftest.project import Project


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, shared_project: Project) -> dict[str, str]:
    """The verdicts on the requesting module's PROJECT, with its lines INI for pytest.ini."""
    shared_project.copy(request.module.PROJECT, getattr(request.module, "INI", "ranks_adopt = torch"))
    return verdicts_of(shared_project)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return the module `left_over`, and `left_over_else`, of another package."""
    made = ModuleType("left_over"), ModuleType("left_over_else")
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(one=1, gone=2, items=[1, 2], names={"a": 1}, members={1}, text="a")
    return made


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's module of test classes, with ours."""
    given = {
        "MultiProcessTestCase": Process,
        "MultiProcContinuousTest": Workers,
        "C10dTorchCommsTestBase": OfTorchcomms,
        "TIMEOUT_OVERRIDE": {"test_a": 500},
        "TEST_SKIPS": {"x": SimpleNamespace(exit_code=7, message="too few")},
        "logger": None,
    }
    monkeypatch.setitem(sys.modules, torch_internals.COMMON, SimpleNamespace(**given))  # type: ignore[arg-type]
