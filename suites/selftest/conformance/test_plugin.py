"""Unit tests of the plugin of engines: engines of a run, known deviations, and where a run ends at once."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.conformance import plugin
from lockstep.conformance.deviations import Deviation
from lockstep.conformance.registry import INSTALLED_SUITES, built_in_names
from lockstep.hookspecs import RANK_PLUGIN


def config_of(
    tmp_path: Path, *engines: str, blocked: bool = False, on_ranks: bool = False, **more: Any
) -> Any:
    """Return the configuration of a run of these engines, with the plugins that are registered in it."""
    options = {"engine": [*engines], "conformance": None, "runxfail": False}
    options |= {"ranks_device": None, "ranks_backend": None, **more}
    registered: dict[str, Any] = {}
    manager = SimpleNamespace(
        hasplugin=lambda name: on_ranks and name == RANK_PLUGIN,
        is_blocked=lambda name: blocked and name == "lockstep",
        register=lambda found, name: registered.update({name: found}),
    )
    return SimpleNamespace(
        pluginmanager=manager,
        registered=registered,
        invocation_params=SimpleNamespace(dir=tmp_path),
        getoption=options.get,
        option=SimpleNamespace(collectonly=False, **options),
    )


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    return sys.path


def test_engines_of_the_user_are_looked_for_where_pytest_was_started(tmp_path: Path, path: list[str]) -> None:
    (tmp_path / "of_mine.py").touch()
    before = [*path]
    plugin.pytest_configure(config_of(tmp_path, "lockstep"))
    assert path == before
    config = config_of(tmp_path, "lockstep", "of_mine:Engine")
    for _ in range(2):
        plugin.pytest_configure(config)
        assert path == [*before, str(tmp_path)]


def test_an_engine_that_is_no_built_in_one_may_end_the_run(tmp_path: Path) -> None:
    built_in = config_of(tmp_path, *built_in_names())
    plugin.pytest_configure(built_in)
    assert built_in.registered == {}
    (tmp_path / "of_mine.py").touch()
    own = config_of(tmp_path, "lockstep", "of_mine:Engine", conformance="out")
    plugin.pytest_configure(own)
    assert list(own.registered) == [
        "harness-engines",
        "harness-conformance-items",
        "harness-conformance-reports",
    ]
    assert (tmp_path / "out").is_dir()


def test_engines_are_refused_where_their_tests_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match="`-p no:lockstep` blocks the plugin that runs them"):
        plugin.pytest_configure(config_of(tmp_path, blocked=True))
    with pytest.raises(pytest.UsageError, match=r"^--engine zero: no engine is called 'zero'"):
        plugin.pytest_configure(config_of(tmp_path, "zero"))
    of_rank = config_of(tmp_path, "zero", blocked=True, on_ranks=True)
    plugin.pytest_configure(of_rank)
    assert of_rank.registered == {}


def test_the_server_imports_adapters_of_built_in_engines(tmp_path: Path) -> None:
    hints = ["first"]
    plugin.pytest_ranks_imports(config_of(tmp_path, "torch-ddp", "of_mine:Engine"), hints)
    assert hints == ["first", "lockstep.conformance.adapters.torch_ddp"]


def test_a_test_is_an_item_of_each_engine_where_there_are_several(tmp_path: Path) -> None:
    def made(engines: tuple[str, ...], *fixtures: str) -> list[Any]:
        asked: list[Any] = []
        metafunc: Any = SimpleNamespace(
            config=config_of(tmp_path, *engines),
            fixturenames=fixtures,
            parametrize=lambda *args, **kwargs: asked.append((args, kwargs)),
        )
        running = plugin.pytest_generate_tests(metafunc)
        next(running)
        assert asked == []  # after those of all others
        with pytest.raises(StopIteration):
            next(running)
        return asked

    assert made(("a", "b"), "engine_name") == [
        (("engine_name", ("a", "b")), {"ids": ("a", "b"), "indirect": True})
    ]
    assert made(("a",), "engine_name") == made(("a", "b"), "engine") == []


def test_the_engine_of_a_test_is_that_of_its_case_or_the_only_one(tmp_path: Path) -> None:
    name_of: Any = inspect.unwrap(plugin.engine_name)

    def engine(*engines: str, **case: str) -> str:
        found: str = name_of(SimpleNamespace(config=config_of(tmp_path, *engines), **case))
        return found

    assert engine("a", "b", param="b") == "b"
    assert engine("a") == "a"
    with pytest.raises(pytest.fail.Exception, match="there are several engines: name `engine`") as failed:
        engine("a", "b")
    assert not failed.value.pytrace


WHOLE = Deviation(("*",), "it rounds", run=False)
OF_CASES = Deviation(("*",), "it waits", ("a=*",))


def test_a_known_deviation_marks_an_item_or_is_about_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str | None, str]] = []

    def known(engine: str | None, claim: str) -> tuple[Deviation, ...]:
        asked.append((engine, claim))
        return WHOLE, OF_CASES

    monkeypatch.setattr(plugin, "known_deviations", known)

    def marks(**options: Any) -> list[tuple[str, dict[str, Any]]]:
        found: list[pytest.MarkDecorator] = []
        item: Any = SimpleNamespace(
            config=config_of(tmp_path, "a", **options),
            nodeid="t::x",
            path=tmp_path / "t",
            fixturenames=["engine_name"],
            add_marker=found.append,
        )
        plugin.pytest_itemcollected(item)
        cases = plugin.pytest_ranks_expected_failures(item)
        assert [*cases] == ([OF_CASES] if found else [])
        return [(mark.name, dict(mark.kwargs)) for mark in found]

    expected = [("xfail", {"strict": True, "reason": WHOLE.reason, "run": False})]
    assert marks() == marks(ranks_device="cpu", ranks_backend="gloo") == expected
    assert asked[0] == ("a", "t::x")
    assert marks(runxfail=True) == marks(ranks_device="cuda") == marks(ranks_backend="nccl") == []


def test_a_claim_of_installed_suites_is_run_again_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = SimpleNamespace(path=INSTALLED_SUITES / "core" / "test_core.py")
    monkeypatch.setattr(plugin, "engine_of", lambda item: "torch-ddp")
    monkeypatch.setattr(plugin, "claim_of", lambda item: "suites/core/test_core.py::TestA::test_a[x/y.py]")
    assert plugin.pytest_ranks_rerun(item) == [
        "--pyargs",
        "lockstep_suites.core.test_core::TestA::test_a[x/y.py]",
        "--engine",
        "torch-ddp",
    ]
    monkeypatch.setattr(plugin, "engine_of", lambda item: None)
    assert plugin.pytest_ranks_rerun(item) is None


def test_a_run_ends_where_a_test_could_not_have_its_engine(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(config=config_of(tmp_path, "a", "b:C"), shouldfail=False)
    stops = plugin.StopsWithoutEngine()
    stops.pytest_sessionstart(session)

    def ended(text: str, when: str = "setup", outcome: str = "failed") -> object:
        session.shouldfail = False
        report: Any = SimpleNamespace(failed=outcome == "failed", when=when, longreprtext=text)
        stops.pytest_runtest_logreport(report)
        return session.shouldfail

    text = "rank 0 of 1 failed\nFailed: --engine b:C: b has no 'C'\nrank 1: passed"
    assert ended(text) == "--engine b:C: b has no 'C'"
    assert ended(text, "call") is ended(text, outcome="passed") is ended("--engine c: no") is False
