"""The report of a test that spawns, the names of torch that it takes, and what makes the adoption active."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing import spawn

from lockstep.features.spawn import plugin, pytest_internals, torch_internals
from lockstep.features.spawn.hang import REPORT
from lockstep.features.spawn.report import complete_report
from lockstep.features.spawn.worlds import PRINTED
from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN
from lockstep.reporting.pytest_internals import ExceptionChainRepr, as_traceback

OF_TORCH: Any = sys.modules["torch.multiprocessing.spawn"]


def report_of(outcome: str = "failed", longrepr: object = "plain", **properties: object) -> Any:
    given: Any = outcome
    made = pytest.TestReport("a.py::x", ("a.py", 1, "x"), {}, given, longrepr, "call")  # type: ignore[arg-type]
    made.user_properties = [*properties.items()]
    return made


def of_ranks(**properties: object) -> Any:
    return report_of("failed", ExceptionChainRepr([(as_traceback("of ranks"), None, None)]), **properties)


class Item:
    """An item whose phase has ended by an exception, and the processes that know a report of one pid."""

    def __init__(self, error: BaseException | None, of_pid: object = None) -> None:
        self.stash = pytest.Stash()
        self.config = SimpleNamespace(rootpath=Path(__file__).parent)
        self.asked: list[object] = []
        self.of_pid = of_pid
        self.excinfo: Any = None
        if error is not None:
            try:
                raise error
            except BaseException as raised:
                self.excinfo = pytest.ExceptionInfo.from_exception(raised)

    def report_of(self, item: object, pid: int) -> Any:
        self.asked.append((item is self, pid))
        return self.of_pid

    def complete(self, report: Any) -> Any:
        complete_report(self, SimpleNamespace(excinfo=self.excinfo), report, self)  # type: ignore[arg-type]
        return report


def error_with(**attributes: object) -> Exception:
    error = ValueError("no\nmore")
    vars(error).update(attributes)
    return error


def test_what_ranks_have_printed_is_in_one_report() -> None:
    item = Item(None)
    item.stash[PRINTED] = [("out", "1")]
    report = report_of("passed", None)
    report.sections = [("own", "0")]
    assert item.complete(report).sections == [("own", "0"), ("out", "1")]
    assert item.complete(report_of("passed", None)).sections == []


def test_a_failure_of_ranks_is_shown_with_the_call() -> None:
    known = of_ranks(rank="1", rerun="again")
    outer = RuntimeError()
    outer.__cause__ = error_with(**{REPORT: known})
    report = Item(outer).complete(report_of(rank="1", own=2))
    assert report.longrepr is known.longrepr
    ((title, called, _),) = report.longrepr.sections
    line = Item.__init__.__code__.co_firstlineno
    assert (title, len(called.splitlines())) == ("called", 1)
    assert called.startswith("test_report.py:")
    assert called.endswith(" in __init__\n")
    assert line < int(called.split(":")[1].split(" ")[0]) < line + 20
    assert report.user_properties == [("rank", "1"), ("own", 2), ("rerun", "again")]


def test_processes_are_asked_for_the_report_of_an_exception_of_spawn() -> None:
    item = Item(error_with(error_pid=12), of_ranks())
    report = item.complete(report_of())
    assert item.asked == [(True, 12)]
    ((_, called, _),) = report.longrepr.sections
    assert called.splitlines()[-1] == "ValueError: no"
    elsewhere = Item(error_with(error_pid=12), of_ranks())
    elsewhere.config.rootpath = Path("/nowhere")
    ((_, called, _),) = elsewhere.complete(report_of()).longrepr.sections
    assert called == "ValueError: no"
    shown = Item(error_with(error_pid=12, **{REPORT: of_ranks()}), of_ranks())
    shown.complete(report_of())
    assert shown.asked == []
    context = RuntimeError("outer")
    context.__context__ = error_with(error_pid=13)
    other = Item(context, of_ranks())
    other.complete(report_of())
    assert other.asked == [(True, 13)]


@pytest.mark.parametrize(
    "error", [error_with(), error_with(error_pid="12"), error_with(**{REPORT: report_of()}), None]
)
def test_a_failure_that_is_not_of_ranks_stays(error: Exception | None) -> None:
    item = Item(error, of_ranks())
    assert item.complete(report_of()).longrepr == "plain"
    assert item.asked == []


def test_a_phase_that_passed_stays() -> None:
    item = Item(error_with(**{REPORT: of_ranks()}))
    assert item.complete(report_of("passed", None)).longrepr is None


def test_a_chain_of_exceptions_that_leads_back_has_an_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert Item(one).complete(report_of()).longrepr == "plain"


# Names of torch


def test_a_process_of_spawn_is_known_by_what_it_runs() -> None:
    args = (print, 3, (), None)
    assert torch_internals.index_of(OF_TORCH._wrap, args) == 3
    assert torch_internals.function_of(OF_TORCH._wrap, args) is print
    assert torch_internals.index_of(print, args) is None
    assert torch_internals.function_of(spawn, args) is spawn
    assert torch_internals.code_of_wrap() is OF_TORCH._wrap.__code__


def test_calls_of_spawn_are_replaced_for_a_while() -> None:
    modules = [sys.modules[name] for name in ("torch.multiprocessing", "torch.multiprocessing.spawn")]
    before = [vars(module)["start_processes"] for module in modules]
    with torch_internals.start_processes_replaced(lambda original: ("replaced", original)):  # type: ignore[arg-type, return-value]
        now = [vars(module)["start_processes"] for module in modules]
    assert now == [("replaced", each) for each in before]
    assert [vars(module)["start_processes"] for module in modules] == before


def test_joins_without_a_limit_are_preceded(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    def join(context: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> str:
        said.append((timeout, args, kwargs))
        return "joined"

    monkeypatch.setattr(OF_TORCH.ProcessContext, "join", join)
    contexts: list[Any] = [object.__new__(OF_TORCH.ProcessContext) for _ in range(2)]
    contexts[0].sentinels, contexts[1].sentinels = [1], []
    with torch_internals.joins_preceded(lambda context: said.append(context)):
        assert [each.join() for each in contexts] == ["joined"] * 2
        contexts[0].join(1.5, 2, grace_period=3)
    none = (None, (), {})
    assert said == [contexts[0], none, none, (1.5, (2,), {"grace_period": 3})]
    assert OF_TORCH.ProcessContext.join is join


def test_the_signal_at_the_end_of_a_parent_is_requested_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"torch.multiprocessing.spawn": SimpleNamespace()}
    monkeypatch.setattr(torch_internals, "sys", SimpleNamespace(modules=modules))
    torch_internals.replace_parent_death_signal(print)  # type: ignore[arg-type]
    assert vars(modules["torch.multiprocessing.spawn"]) == {"_prctl_pr_set_pdeathsig": print}
    modules.clear()
    torch_internals.replace_parent_death_signal(print)  # type: ignore[arg-type]
    assert torch_internals.code_of_wrap() is torch_internals.index_of(None, (1, 2)) is None
    with torch_internals.joins_preceded(print), torch_internals.start_processes_replaced(print):  # type: ignore[arg-type]
        pass


# Asserts


def test_asserts_of_those_modules_are_rewritten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = [*sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", [*path])
    pytest_internals.rewrite_asserts_of(())
    assert sys.meta_path == path
    pytest_internals.rewrite_asserts_of(["rewritten_of_spawn"])
    assert sys.meta_path[1:] == path
    for name in ("rewritten_of_spawn", "plain_of_spawn"):
        (tmp_path / f"{name}.py").write_text("def check(x):\n    assert x == 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import plain_of_spawn
    import rewritten_of_spawn

    with pytest.raises(AssertionError, match=r"\Aassert 1 == 2"):
        rewritten_of_spawn.check(1)
    with pytest.raises(AssertionError, match=r"\A\Z"):
        plain_of_spawn.check(1)
    for name in ("rewritten_of_spawn", "plain_of_spawn"):
        del sys.modules[name]


def test_rewritten_modules_are_those_of_a_session_that_rewrites(request: pytest.FixtureRequest) -> None:
    assert __name__.rpartition(".")[2] in {
        name.rpartition(".")[2] for name in pytest_internals.rewritten_modules(request.config)
    }
    assert pytest_internals.rewritten_modules(SimpleNamespace(stash=pytest.Stash())) == ()  # type: ignore[arg-type]
    stash = pytest.Stash()
    stash[pytest_internals.assertstate_key] = SimpleNamespace(hook=None)  # type: ignore[assignment]
    assert pytest_internals.rewritten_modules(SimpleNamespace(stash=stash)) == ()  # type: ignore[arg-type]


# The plugin


def configured(monkeypatch: pytest.MonkeyPatch, families: str, where: str = "worlds", **plugins: Any) -> Any:
    """Return a configuration, with the names of the plugins that were registered in it."""
    monkeypatch.setattr(plugin, "families_of", lambda config: families)
    registered: list[str] = []
    manager = SimpleNamespace(
        get_plugin=plugins.get,
        register=lambda found, name: registered.append(f"{type(found).__name__} {name}"),
    )
    config = SimpleNamespace(
        addinivalue_line=lambda name, line: registered.append(f"{name} {line[:13]}"),
        getini=lambda name: where,
        pluginmanager=manager,
        stash=pytest.Stash(),
        registered=registered,
    )
    return config


def test_each_side_of_the_adoption_has_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, counts = "markers own_processes", "Counts harness-spawn-counts"
    on_rank = "SpawnOnRank harness-spawn"
    controller = SimpleNamespace(prepare=print, ready_launcher=print)
    for families, plugins, expected in (
        ("torch", {CONTROLLER_PLUGIN: controller}, [mark]),
        (
            "spawn",
            {RANK_PLUGIN: object(), CONTROLLER_PLUGIN: controller},
            [mark, on_rank],
        ),
        ("spawn", {}, [mark, counts]),
        (
            "spawn",
            {CONTROLLER_PLUGIN: controller},
            [
                *(mark, counts, "SpawnOnWorlds harness-spawn-worlds", "SpawnAdoption harness-spawn"),
                "TestProcesses harness-spawn-processes",
            ],
        ),
    ):
        config = configured(monkeypatch, families, **plugins)
        plugin.pytest_configure(config)
        assert config.registered == expected
    inis: list[Any] = []
    parser: Any = SimpleNamespace(addini=lambda name, words, default: inis.append((name, default)))
    plugin.pytest_addoption(parser)
    assert inis == [("ranks_adopt_spawn", "worlds")]
    with pytest.raises(pytest.UsageError, match=r"\Aranks_adopt_spawn = 'x': choose worlds, processes\Z"):
        plugin.pytest_configure(configured(monkeypatch, "", "x"))


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        (b"import multiprocessing", True),
        (b"mp.start_processes(f)", True),
        (b"mp.spawn(f)", True),
        (b"spawned = respawn(f)", False),
    ],
)
def test_a_file_that_may_start_processes_needs_the_server(
    monkeypatch: pytest.MonkeyPatch, text: bytes, starts: bool
) -> None:
    config = configured(monkeypatch, "spawn")
    assert not plugin.pytest_ranks_needs_server(config)
    assert plugin.pytest_ranks_mentioned(config, text) is starts
    assert plugin.pytest_ranks_needs_server(config) is starts
    other = configured(monkeypatch, "torch")
    assert plugin.pytest_ranks_mentioned(other, text) is plugin.pytest_ranks_needs_server(other) is False


def test_the_server_imports_what_processes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    hints = ["first"]
    plugin.pytest_ranks_imports(configured(monkeypatch, "torch"), hints)
    assert hints == ["first"]
    plugin.pytest_ranks_imports(configured(monkeypatch, "spawn"), hints)
    parts = ["lockstep.features.spawn.child", "lockstep.features.spawn.rank"]
    assert hints == ["first", "torch.multiprocessing", *parts]
