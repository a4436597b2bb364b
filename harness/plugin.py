"""The pytest plugin: options, the `ranks` marker, fixtures. Every pytest run loads it; must not import torch.

In a run, and in a rank of it, everything else is delegated: to `controller` there, to `rank.session` here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from harness import hookspecs
from harness.marker import MarkError, read_mark
from harness.protocol import RANK_PLUGIN

if TYPE_CHECKING:
    from harness.rank.session import RankSession
    from harness.rank.world_fixture import RankWorld
    from harness.recorders import CollectivesLog
    from harness.subtests import RunSubtests


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on several ranks (marker `ranks`)")
    group.addoption("--backend", help="torch.distributed's backend, gloo or nccl, for items that name none")
    group.addoption(
        "--device", choices=("cpu", "cuda"), help="device of the ranks (default: cpu, cuda under nccl)"
    )
    group.addoption(
        "--world-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="deadline of a test on ranks, set-up and tear-down included, and of each example of a property "
        "(default: %(default)s)",
    )
    group.addoption(
        "--world-seed", type=int, default=0, help="seed of every rank before each test (default: 0)"
    )
    group.addoption(
        "--rank-pdb",
        type=int,
        metavar="RANK",
        help="debug rank RANK: at its failures and breakpoints; the others wait, without a deadline",
    )
    group.addoption(
        "--check-collectives",
        action="store_true",
        help="after each test compare the collectives of all ranks (operation, dtypes, sizes): a mismatch "
        "that nobody noticed fails it",
    )
    group.addoption("--fresh-worlds", action="store_true", help="new processes for every test on ranks")
    group.addoption(
        "--rank-output",
        choices=("failed", "all", "none"),
        default="failed",
        help="whose captured output a failure shows: of the ranks to blame, of all, of none",
    )
    group.addoption(
        "--rank-output-dir",
        metavar="DIR",
        help="keep everything that ranks print, in full, in DIR/<test>/rank-N.stdout, .stderr and .log; "
        "of a rank that died or hung also .output: what was written outside of pytest's capture",
    )
    group.addoption(
        "--subtest",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="of run_subtests, run only the cases with these settings",
    )
    _add_ini_options(parser)


def _add_ini_options(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_preload",
        "modules that the server imports once for all ranks, beside torch",
        "args",
        default=["torch.distributed.fsdp"],  # half a second of CPU, which each rank would need for itself
    )
    parser.addini("ranks_start_method", "how rank processes start: forkserver or spawn", default="forkserver")
    parser.addini(
        "ranks_leaks",
        "what a test that leaves something behind in its rank gets: warn, error (at tear-down) or off",
        default="warn",
    )
    parser.addini(
        "ranks_at_once",
        "how many ranks may run at once over all pytest runs of this user on this machine",
        "int",
        None,
    )
    parser.addini("ranks_wait", "seconds that a world waits until others leave it room", "float", 600.0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None, fresh=False, timeout=None): run the test on so many ranks, one item a "
        "size; on `backend`, in processes of its own if `fresh`, within `timeout` seconds. The nearest "
        "mark wins.",
    )
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    from harness.controller.plugin import Controller
    from harness.controller.requests import check_options
    from harness.reporting.annotations import Annotations, wanted

    check_options(config)  # also where others will run the tests: they could only crash, each for itself
    if not hasattr(config, "workerinput") and wanted(config, os.environ):
        config.pluginmanager.register(Annotations(config, os.environ), "harness-annotations")
    if not _only_distributes(config):
        config.pluginmanager.register(Controller(config), "harness-controller")


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this is the process of `pytest -n` that runs no test; its workers are controllers."""
    return getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    nodeid = metafunc.definition.nodeid
    mark, wrong = None, ""
    try:
        mark = read_mark(metafunc.definition)
    except MarkError as error:
        wrong = str(error)
    if wrong:
        pytest.fail(f"{nodeid}: {wrong}", pytrace=False)
    elif mark is None:
        if "world" in metafunc.fixturenames:
            pytest.fail(
                f"{nodeid}: the fixture `world` exists only on ranks: mark the test, its class or its module "
                "with pytest.mark.ranks(2)",
                pytrace=False,
            )
    elif len(mark.sizes) > 1:
        metafunc.fixturenames.append("ranks_size")
        ids = [f"{size}-rank" if size == 1 else f"{size}-ranks" for size in mark.sizes]
        metafunc.parametrize("ranks_size", mark.sizes, ids=ids)


def _session(request: pytest.FixtureRequest) -> RankSession:
    session: RankSession | None = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        pytest.fail(
            f"the fixture `{request.fixturename}` exists only on ranks: mark the test with "
            "pytest.mark.ranks(2)",
            pytrace=False,
        )
    return session


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> RankWorld:
    """The world this rank belongs to: rank, size, device, mesh, gather and more."""
    return _session(request).world


@pytest.fixture
def run_subtests(request: pytest.FixtureRequest, subtests: Any) -> RunSubtests:
    """Run a claim for each case of a product of settings, on all ranks alike."""
    from harness.subtests import RunSubtests, parse_selection

    selection = parse_selection(request.config.getoption("subtest"))
    expected = request.config.hook.pytest_ranks_expected_failures(item=request.node) or ()
    return RunSubtests(_session(request).rank, subtests, selection, expected)


@pytest.fixture
def collectives() -> Iterator[CollectivesLog]:
    """A log of every collective that this rank issues during the test, forward and backward."""
    from harness.recorders import CollectivesLog

    with CollectivesLog() as log:
        yield log
