"""The half of a rank of compilations, without a compiler: hooks, records, skips, and what a test leaves."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lockstep.features.compiles import FEATURE, FINDINGS, plugin, rank, torch_internals
from lockstep.features.compiles.compilation import DISAGREE, Frame
from lockstep.features.compiles.finding import Finding
from lockstep.features.compiles.rank import CheckedItem, Compiler
from lockstep.features.compiles.torch_internals import (
    TRACE,
    hide_trace_from_root,
    is_without_compiler,
    loaded,
    name_compile_threads,
    on_compile,
    remember_probes,
)
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.protocol import Part


class Session:
    """A session of a rank, its plugins, and what was posted."""

    def __init__(self, backend: str = "gloo") -> None:
        self.posted: list[Part] = []
        spec = SimpleNamespace(
            key=SimpleNamespace(size=2),
            rank=1,
            directory="/nowhere",
            session=SimpleNamespace(cwd="/base", parts={}),
        )
        self.rank = SimpleNamespace(spec=spec, wire=SimpleNamespace(post=self.posted.append))
        self.world = SimpleNamespace(rank=1, backend=backend)
        self.registered: list[object] = []
        self.manager: Any = SimpleNamespace(
            is_registered=lambda each: each in self.registered, register=self.registered.append
        )

    def compiler(self) -> Compiler:
        return Compiler(self, "", self.manager)  # type: ignore[arg-type]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls that were registered before and after a compilation, and resets."""
    calls: list[Any] = []
    monkeypatch.setattr(rank, "on_compile", lambda *given: calls.append(given))
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(rank, "name_compile_threads", calls.append)
    before, handlers = sys.getrecursionlimit(), [*TRACE.handlers]
    monkeypatch.setattr(TRACE, "parent", TRACE.parent)
    monkeypatch.setattr(TRACE, "propagate", TRACE.propagate)
    yield calls
    sys.setrecursionlimit(before)
    TRACE.handlers[:] = handlers


def test_a_rank_that_compiles_nothing_is_left_alone(compiled: list[Any]) -> None:
    session = Session()
    compiler = session.compiler()
    ending = SimpleNamespace(usable=True, parts={})
    compiler.pytest_ranks_called()
    compiler.pytest_ranks_finished(ending)  # type: ignore[arg-type]
    assert (session.registered, ending.usable, ending.parts, compiled) == ([], True, {}, [])


def test_compiled_code_is_forgotten_behind_each_test(compiled: list[Any]) -> None:
    session = Session()
    compiler = session.compiler()
    compiler._caches._compiles()
    assert session.registered == [compiler]
    hooks = (compiler._begin, compiler._end)
    assert compiled == [hooks]
    ending = SimpleNamespace(usable=True, parts={})
    compiler.pytest_ranks_finished(ending)  # type: ignore[arg-type]
    assert (ending.usable, ending.parts) == (True, {FEATURE: True})
    assert compiled == [hooks, "reset", hooks]
    again = SimpleNamespace(usable=False, parts={})
    compiler.pytest_ranks_finished(again)  # type: ignore[arg-type]
    assert (again.usable, again.parts, len(compiled)) == (False, {}, 3)
    compiler._begin()
    compiler.pytest_ranks_finished(again)  # type: ignore[arg-type]
    assert len(compiled) == 5


def test_a_compilation_leaves_the_limit_of_recursion(compiled: list[Any]) -> None:
    compiler = Session().compiler()
    limit = sys.getrecursionlimit()
    compiler._end()
    assert sys.getrecursionlimit() == limit
    compiler._begin()
    sys.setrecursionlimit(limit + 500)
    compiler._end()
    assert sys.getrecursionlimit() == limit
    assert compiled == ["InductorPool"] * 2
    sys.setrecursionlimit(limit - 1)
    compiler._end()
    assert sys.getrecursionlimit() == limit - 1


def test_a_trace_is_read_while_it_is_watched(compiled: list[Any]) -> None:
    session = Session()
    compiler = session.compiler()
    before = [*TRACE.handlers]
    with compiler.watched() as watched, compiler.watched() as other:
        assert session.registered == [compiler]
        assert watched is not other
    assert TRACE.handlers == before
    with compiler.watched() as watched:
        (reader,) = (each for each in TRACE.handlers if each not in before)
        assert watched._number == 1
        assert reader._base == "/base/"  # type: ignore[attr-defined]
        compared: list[int] = []
        watched.compare_ranks = lambda: compared.append(1)  # type: ignore[method-assign]
        compiler.pytest_ranks_called()
        frame = Frame("f", "a.py:1", "0/0")
        reader._changed(3, frame)  # type: ignore[attr-defined]
    compiler.pytest_ranks_called()
    assert compared == [1]
    assert session.posted == [Part(FEATURE, (3, frame))]


@pytest.mark.parametrize(("backend", "disabled"), [("gloo", None), ("fake", "1")])
def test_a_rank_of_a_fake_world_keeps_no_code(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Any], backend: str, disabled: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(rank, "tensor_data_variable", lambda: {"POINTER": "12"})
    compiler = Session(backend).compiler()
    compiler.install()
    assert compiler._caches in TRACE.handlers
    assert os.environ["POINTER"] == "12"
    assert os.environ.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == disabled
    assert (TRACE.parent, TRACE.propagate) == (None, True)


class NoCompiler(Exception):
    pass


def raised(error: Exception) -> pytest.ExceptionInfo[BaseException]:
    try:
        raise error
    except Exception as caught:
        return pytest.ExceptionInfo.from_exception(caught)


def report_of(compiler: Compiler, when: str, info: object) -> Any:
    call = SimpleNamespace(when=when, excinfo=info)
    hook = compiler.pytest_runtest_makereport(call)  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration) as stopped:
        hook.send("report")
    assert stopped.value.value == "report"
    return call.excinfo


def test_a_test_without_a_compiler_is_skipped_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "is_without_compiler", lambda error: isinstance(error, NoCompiler))
    compiler = Session().compiler()
    lacks, other = raised(NoCompiler()), raised(ValueError())
    assert report_of(compiler, "call", None) is None
    assert report_of(compiler, "call", other) is other
    assert report_of(compiler, "teardown", lacks) is lacks
    ending = SimpleNamespace(usable=True, parts={})
    compiler.pytest_ranks_finished(ending)  # type: ignore[arg-type]
    assert ending.usable
    skipped = report_of(compiler, "setup", lacks)
    assert isinstance(skipped.value, pytest.skip.Exception)
    assert str(skipped.value).startswith("inductor needs a C++ compiler")
    assert skipped.traceback[-1].lineno + 1 == raised.__code__.co_firstlineno + 2
    compiler.pytest_ranks_finished(ending)  # type: ignore[arg-type]
    assert not ending.usable
    assert rank._line_of_user(None) is None


def test_the_line_of_a_skip_is_the_users_innermost(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None:
        raise NoCompiler

    monkeypatch.setattr(rank, "is_installed", lambda file: file != "/user.py")
    space: dict[str, Any] = {"inner": inner}
    exec(compile("def call():\n\n    inner()\n\ndef outer():\n    call()", "/user.py", "exec"), space)
    with pytest.raises(NoCompiler) as failed:
        space["outer"]()
    found = rank._line_of_user(failed.value)
    assert found is not None
    assert (found.tb_lineno, found.tb_next) == (3, None)


def test_a_checked_item_sends_findings_and_is_gone_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.features.compiles import checked_graphs

    sent: list[Part] = []
    done: list[object] = []

    class Checks:
        def __init__(self, found: Any) -> None:
            found(Finding(backend="x"))

        def on(self) -> Any:
            return Mock(__enter__=lambda _: done.append("on"), __exit__=lambda *_: done.append("off"))

    monkeypatch.setattr(checked_graphs, "GraphChecks", Checks)
    only = Mock(return_value=Mock(__enter__=Mock(), __exit__=Mock(return_value=False)))
    monkeypatch.setattr(rank, "only_cases", only)
    manager = Mock()
    checked = CheckedItem(SimpleNamespace(send=sent.append), manager)  # type: ignore[arg-type]
    hook = checked.pytest_ranks_run_item(
        SimpleNamespace(config="config"),  # type: ignore[arg-type]
        SimpleNamespace(parts={FEATURE: "cases"}),  # type: ignore[arg-type]
    )
    next(hook)
    only.assert_called_once_with("config", "cases")
    assert (sent, done) == ([Part(FINDINGS, Finding(backend="x"))], ["on"])
    with pytest.raises(StopIteration) as stopped:
        hook.send("ran")
    assert (stopped.value.value, done) == ("ran", ["on", "off"])
    manager.unregister.assert_not_called()
    checked.pytest_ranks_finished(SimpleNamespace())  # type: ignore[arg-type]
    manager.unregister.assert_called_once_with(checked)


def test_only_an_order_with_cases_has_its_graphs_checked() -> None:
    registered: list[Any] = []
    session = SimpleNamespace(rank=SimpleNamespace(wire="wire"))
    manager = SimpleNamespace(get_plugin={RANK_PLUGIN: session}.get, register=registered.append)
    item: Any = SimpleNamespace(config=SimpleNamespace(pluginmanager=manager))
    plugin.pytest_ranks_item(item, SimpleNamespace(parts={}))  # type: ignore[arg-type]
    assert registered == []
    plugin.pytest_ranks_item(item, SimpleNamespace(parts={FEATURE: ()}))  # type: ignore[arg-type]
    (checked,) = registered
    assert (checked._wire, checked._manager) == ("wire", manager)


@pytest.mark.parametrize("parts", [{}, {FEATURE: "/kept"}])
def test_a_rank_prepares_its_compiler(monkeypatch: pytest.MonkeyPatch, parts: dict[str, str]) -> None:
    made: list[Any] = []
    monkeypatch.setattr(rank, "Compiler", lambda *given: made.append([given, Mock()]) or made[-1][1])
    session = Session()
    session.rank.spec.session.parts = parts
    manager = SimpleNamespace(get_plugin={RANK_PLUGIN: session}.get)
    config: Any = SimpleNamespace(pluginmanager=manager, stash={})
    plugin.pytest_configure(config)
    ((given, compiler),) = made
    assert given == (session, parts.get(FEATURE, ""), manager)
    compiler.install.assert_called_once_with()
    assert [*config.stash.values()] == [compiler]


def test_the_controller_prepares_the_folder_and_names_it_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.features.compiles import cache_directory

    prepared: list[object] = []
    monkeypatch.setattr(cache_directory, "prepare", prepared.append)
    monkeypatch.setattr(cache_directory, "cache_directory", lambda config: f"/kept/{config}")
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: None))
    plugin.pytest_configure(config)
    assert prepared == [config]
    parts: dict[str, Any] = {}
    plugin.pytest_ranks_session("config", parts)  # type: ignore[arg-type]
    assert parts == {FEATURE: "/kept/config"}


# In the controller


def context(compiled: object, ranks: int = 2, verbosity: int = 0) -> Any:
    outcome = SimpleNamespace(parts={FEATURE: compiled}, ranks=[None] * ranks)
    config = SimpleNamespace(get_verbosity=lambda: verbosity)
    return SimpleNamespace(outcome=outcome, item=SimpleNamespace(config=config))


def test_what_ranks_compiled_is_a_section_where_they_disagree_or_under_v() -> None:
    one, two = Frame("f", "a.py:1", "0/0"), Frame("g", "a.py:2", "1/0")
    sections = plugin.pytest_ranks_sections
    assert sections(context({}), None) is None
    assert sections(context(None, verbosity=1), None) is None
    same = {0: {1: two, 0: one}, 1: {0: one, 1: two}}
    assert sections(context(same), None) is None
    listed = sections(context(same, verbosity=1), None)
    lines = "  f (a.py:1): no graph\n  g (a.py:2): no graph"
    assert listed == ("compiled by torch.compile", f"all ranks: 2 frames, 0.0 s on each\n{lines}")
    other: Any = SimpleNamespace(longreprtext="no")
    assert sections(context(same), other) is None
    other.longreprtext = f"E {DISAGREE}: x"
    assert sections(context(same), other) == listed
    less = {0: {0: one, 1: two}}
    assert sections(context(less), None) is None
    differs = sections(context({0: {0: one}, 1: {0: two}}), None)
    assert differs is not None
    assert differs[1].splitlines()[:2] == [
        f"{DISAGREE}: compilation 1: rank 0 compiled f (a.py:1); rank 1 compiled g (a.py:2)",
        "rank 0: 1 frame, 0.0 s",
    ]


def test_messages_of_ranks_are_kept_by_rank_and_place() -> None:
    run: Any = SimpleNamespace(parts={})
    first, second = Frame("f", "a.py:1", "0/0"), Frame("g", "a.py:2", "1/0")
    plugin.pytest_ranks_message(run, 1, Part("other", (0, first)))
    assert run.parts == {}
    for place, frame in ((0, first), (1, first), (1, second)):
        plugin.pytest_ranks_message(run, 1, Part(FEATURE, (place, frame)))
    plugin.pytest_ranks_message(run, 0, Part(FEATURE, (0, first)))
    plugin.pytest_ranks_message(run, 1, Part(FINDINGS, Finding(backend="x")))
    plugin.pytest_ranks_message(run, 0, Part(FINDINGS, Finding(backend="y")))
    assert run.parts == {
        FEATURE: {1: {0: first, 1: second}, 0: {0: first}},
        FINDINGS: {1: Finding(backend="x"), 0: Finding(backend="y")},
    }


# Private names of torch


@pytest.fixture
def fake_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a module in the place of one of torch that may not be imported."""

    def put(name: str, **content: Any) -> Any:
        module = SimpleNamespace(**content)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


def test_names_of_modules_that_are_not_imported_are_none(fake_module: Any) -> None:
    fake_module("torch._fake", a=SimpleNamespace(b=3))
    assert loaded("torch._fake", "a.b") == 3
    assert loaded("torch._fake", "a.c.d") is None
    assert loaded("torch._no_such", "a.b") is None


def test_functions_are_called_around_a_compilation_once_registered(fake_module: Any) -> None:
    handler = SimpleNamespace(start_callbacks=[], ends=[])
    handler.register_start_callback = handler.start_callbacks.append
    handler.register_end_callback = handler.ends.append
    fake_module("torch._dynamo.callback", callback_handler=handler)
    for _ in range(2):
        on_compile(print, repr)
    assert (handler.start_callbacks, handler.ends) == ([print], [repr])
    fake_module("torch._dynamo.callback")
    on_compile(print, repr)


def test_the_error_of_a_missing_compiler_is_found_inside_of_others(fake_module: Any) -> None:
    fake_module("torch._inductor.exc", InvalidCxxCompiler=NoCompiler)
    lacks, inner, outer = NoCompiler(), ValueError(), KeyError()
    assert is_without_compiler(lacks)
    inner.__cause__ = lacks
    assert is_without_compiler(inner)
    outer.inner_exception = inner  # type: ignore[attr-defined]
    outer.__cause__ = OSError()
    assert is_without_compiler(outer)
    assert not is_without_compiler(ValueError())
    assert not is_without_compiler(None)
    fake_module("torch._inductor.exc")
    assert not is_without_compiler(lacks)


def test_a_probe_of_the_processor_is_remembered_by_what_it_compiles(fake_module: Any) -> None:
    probed: list[tuple[object, str]] = []

    class Isa:
        def check_build(self, code: str) -> int:
            probed.append((self, code))
            return 1

        def build_arch_flags(self) -> str:
            return "flags"

        def __str__(self) -> str:
            return "avx2"

    asked: list[str] = []

    def remembered(name: str, probe: Any) -> bool:
        asked.append(name)
        return bool(probe() is True)

    remember_probes(remembered)
    module = fake_module("torch._inductor.cpu_vec_isa", VecISA=Isa)
    remember_probes(remembered)
    isa = Isa()
    isa.check_build("code")
    assert asked == []
    module._get_isa_dry_compile_fingerprint = lambda flags: f"print of {flags}"
    remember_probes(remembered)
    assert isa.check_build("code") is True  # type: ignore[comparison-overlap]
    assert asked == ["avx2 print of flags code"]
    assert probed == [(isa, "code")] * 2


def test_the_trace_of_torch_reaches_no_handler_of_another_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("lockstep.trace.of.a.test")
    monkeypatch.setattr(torch_internals, "TRACE", logger)
    logger.propagate = False
    hide_trace_from_root()
    assert (logger.parent, logger.propagate) == (None, True)


def test_threads_that_compile_get_a_name(fake_module: Any) -> None:
    name_compile_threads("none")
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait, args=(60,), name="ThreadPoolExecutor-1_0", daemon=True)
    thread.start()
    pool = SimpleNamespace(_threads={thread})
    cached = Mock(return_value=pool)
    cached.cache_info = lambda: SimpleNamespace(currsize=cached.size)
    cached.size = 0
    fake_module("torch._inductor.async_compile", AsyncCompile=SimpleNamespace(pool=cached))
    name_compile_threads("Pool")
    cached.assert_not_called()
    cached.size = 1
    name_compile_threads("Pool")
    ends.set()
    thread.join(60)
    assert thread.name == "Pool"
