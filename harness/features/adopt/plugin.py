"""The plugin of adoption: where `ranks_adopt` names kinds of existing test classes, these run on ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.features.adopt.kinds import AdoptedKind
    from lockstep.rank.session import RankSession

FAMILIES = ("torch", "deepspeed", "spawn")
"""Words of the option `ranks_adopt`."""
GROUPS = ("own", "reuse")
"""Values of the option `ranks_adopt_groups`."""
# What files of adopted tests import, 0.6 s in all; the last two add nothing to the first.
IMPORTS = (
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
)
_SUBCLASS = re.compile(rb"^class \w+\(\w", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption(
        "--ranks-adopt",
        metavar="KINDS",
        help="run existing test classes on ranks, unchanged: torch (MultiProcessTestCase and "
        "MultiProcContinuousTest), deepspeed (DistributedTest); spawn (processes that tests "
        "start come from the server of the ranks); or several with a comma between (default: the ini option)",
    )
    for name, what in (
        ("cpu", "run adopted tests that want accelerators on gloo and the CPU; see docs/how_to/adopt.md"),
        ("report", "list the classes adopted, and those left to their own launcher, with the reason"),
    ):
        group.addoption(f"--ranks-adopt-{name}", action="store_true", help=what)
    parser.addini(
        "ranks_adopt", "kinds of existing tests to run on ranks: torch, deepspeed, spawn", "args", default=[]
    )
    parser.addini(
        "ranks_adopt_groups",
        "process groups of adopted tests: own (each makes its own), or reuse (a request for a group like the "
        "rank's gets the rank's)",
        default="own",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and register the half of this side.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    families = families_of(config)
    for family in families:
        if family not in FAMILIES:
            raise pytest.UsageError(f"ranks_adopt: unknown kind {family!r}; there are {', '.join(FAMILIES)}")
    if (groups := config.getini("ranks_adopt_groups")) not in GROUPS:
        raise pytest.UsageError(f"ranks_adopt_groups = {groups!r}: choose {', '.join(GROUPS)}")
    if config.getoption("ranks_adopt_cpu") and "torch" not in families:
        raise pytest.UsageError("--ranks-adopt-cpu: add --ranks-adopt torch, whose tests it is for")
    if kinds := _kinds_of(families):
        _register(config, kinds)


def _register(config: pytest.Config, kinds: tuple[AdoptedKind, ...]) -> None:
    from lockstep.features.adopt.kinds import KIND

    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        from lockstep.features.adopt.controller import Adoption

        config.pluginmanager.register(Adoption(config, kinds), "harness-adopt")
    else:
        from lockstep.features.adopt.rank import RankAdoption

        config.pluginmanager.register(RankAdoption(config, session, kinds), "harness-adopt")
    for kind in kinds:
        config.pluginmanager.register(kind)
    if config.getoption("ranks_adopt_cpu"):
        from lockstep.features.adopt.cpu import CpuDevices

        cpu_devices = CpuDevices(runs_here=lambda item: KIND in item.stash)
        config.pluginmanager.register(cpu_devices, "harness-adopt-cpu")


def _kinds_of(families: tuple[str, ...]) -> tuple[AdoptedKind, ...]:
    """Return the kinds of these families; a class is of the first one that matches it."""
    if not {"torch", "deepspeed"}.intersection(families):
        return ()
    from lockstep.features.adopt.continuous import Continuous
    from lockstep.features.adopt.distributed_test import DistributedTest
    from lockstep.features.adopt.multi_process import MultiProcess, MultiThreaded

    kinds: tuple[AdoptedKind, ...] = (MultiProcess(), Continuous(), MultiThreaded(), DistributedTest())
    return tuple(kind for kind in kinds if kind.family in families)


def families_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the kinds of tests that are adopted: those of `--ranks-adopt`, else of the ini option."""
    given: str | None = config.getoption("ranks_adopt")
    return tuple(config.getini("ranks_adopt") if given is None else given.replace(",", " ").split())


# In the controller


def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> bool:
    """Return whether a file may have classes to adopt.

    Where this is wrong, the server only starts late, or idly.
    """
    of_classes = {"torch", "deepspeed"}.intersection(families_of(config))
    return bool(of_classes) and b"istributed" in text and _SUBCLASS.search(text) is not None


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    if "torch" in families_of(config):
        hints += IMPORTS


def pytest_ranks_repeated_options() -> Mapping[str, Any]:
    return {"ranks_adopt": None, "ranks_adopt_cpu": False}
