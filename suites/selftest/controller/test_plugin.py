"""The controller without processes: its start of the server, and the end of its session."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lockstep.controller import plugin
from lockstep.controller.requests import REQUEST, Refusal
from lockstep.launch.processes import RankProgram
from suites.selftest.controller.stand_ins import REQUESTED, Hooks, Server, Worlds, item_named

# The server


def test_the_server_starts_with_the_first_file_that_mentions_ranks(
    controller: Any, server: Server, hooks: Hooks, tmp_path: Path
) -> None:
    texts = {
        "test_plain.py": "import pytest",
        "notes.txt": "ranks",
        "test_first.py": "import torch.nn\n  import torch.no\nfrom lockstep.x import y\n# ranks, optim",
        "test_second.py": "# ranks\ntorch.compile(f)",
        "test_other.py": "optim",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        controller._look_into(tmp_path / name)
        if name == "notes.txt":
            assert server.program is None
    controller._look_into(tmp_path / "test_missing.py")
    assert server.said == ["prestart", "expect torch._dynamo.repro.after_dynamo"]
    hints = ("torch.nn", "lockstep.x", "torch._dynamo")
    modules = ("lockstep.plugin", "lockstep.subtests", "lockstep.recorders")
    assert server.program == RankProgram("lockstep.rank:RankSession", modules, ("own",), hints)
    assert not server.forks
    assert hooks.asked["pytest_ranks_imports"]["hints"] == list(hints)
    controller._stop_server()
    assert (server.said[-1], controller._launcher) == ("stop", None)
    assert server.signals == ["handle", "restore"]


def test_a_file_that_a_feature_recognises_starts_the_server(
    controller: Any, server: Server, hooks: Hooks, tmp_path: Path
) -> None:
    hooks.answers["pytest_ranks_mentioned"] = lambda config, text: [False, b"worlds" in text]
    (tmp_path / "test_x.py").write_text("worlds")
    controller._config.option.collectonly = True
    controller._look_into(tmp_path / "test_x.py")
    assert server.said == []
    controller._config.option.collectonly = False
    controller._config.args = [f"{tmp_path}/test_x.py::test_y"]
    controller.pytest_configure(controller._config)
    assert server.said == ["prestart"]


def test_a_server_that_cannot_start_is_no_failure_of_collection(
    controller: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prestart = Mock(side_effect=OSError)
    monkeypatch.setattr(server, "prestart", prestart)
    (tmp_path / "test_x.py").write_text("ranks")
    controller.pytest_pycollect_makemodule(tmp_path / "test_x.py")
    prestart.assert_called_once_with()
    assert server.said == []


def test_modules_of_the_backends_that_a_file_names_are_imported(controller: Any, server: Server) -> None:
    controller._config.option.ranks_backend = "gloo"
    controller._launch(b"backend='shm'")
    assert server.program is not None
    assert server.program.modules[3:] == ()
    controller._stop_server()
    controller._launch(b'backend="shm"')
    assert [*server.program.modules[3:]] == [plugin.BACKENDS["shm"].module]
    controller._stop_server()
    controller._config.option.ranks_backend = "shm"
    controller._launch()
    assert [*server.program.modules[3:]] == [plugin.BACKENDS["shm"].module]


def test_the_launcher_of_this_machine_is_made_ready(controller: Any, server: Server, hooks: Hooks) -> None:
    assert controller.ready_launcher() is None
    controller._stop_server()
    hooks.answers["pytest_ranks_launcher"] = None
    launcher = controller._launch()
    done: list[object] = []
    launcher.restore_directory = lambda: done.append("restored")
    launcher.make_ready = done.append
    assert controller.ready_launcher() is launcher
    restored, until = done
    assert restored == "restored"
    assert abs(until - plugin.time.monotonic() - plugin.START_WITHIN) < 30  # type: ignore[operator]


def test_a_server_that_no_test_needs_is_stopped(
    controller: Any, server: Server, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(None))
    found: list[Any] = []
    monkeypatch.setattr(plugin, "request_of", lambda item: found.pop(0))
    items = [item_named(controller, name, None) for name in "abc"]
    controller._launch()
    hooks.answers["pytest_ranks_needs_server"] = [False, True]
    refused = [None, Refusal("skipped", "no"), None]
    found[:] = refused
    controller.pytest_collection_modifyitems(items)
    assert (server.said, frozen) == ([], [])
    assert [item.stash.get(REQUEST, None) for item in items] == refused
    found[:] = [None, REQUESTED, Refusal("skipped", "no")]
    hooks.answers["pytest_ranks_needs_server"] = []
    controller.pytest_collection_modifyitems(items)
    assert (server.said, frozen) == ([], [None])
    assert items[1].stash[REQUEST] is REQUESTED
    assert REQUEST not in items[0].stash
    found[:] = [None] * 3
    controller.pytest_collection_modifyitems(items)
    assert (server.said, frozen) == (["stop"], [None])


# The end


@pytest.mark.parametrize("of_xdist", [False, True])
def test_what_breaks_as_a_world_closes_fails_its_last_item(controller: Any, of_xdist: bool) -> None:
    last, current = item_named(controller, "last"), item_named(controller, "current")
    controller._last_items, controller._current = {"w": last}, current
    if of_xdist:
        controller._config.workerinput = {}
    controller._fail_last_item(SimpleNamespace(name="w"), "broken")
    item, other = (current, last) if of_xdist else (last, current)
    report = item.ihook.asked["pytest_runtest_logreport"]["report"]
    text = "after test_x.py::last: broken" if of_xdist else "broken"
    assert (report.nodeid, report.when, report.outcome) == (item.nodeid, "teardown", "failed")
    assert report.longrepr == text
    assert other.ihook.asked == {}
    controller._current = last
    controller._fail_last_item(SimpleNamespace(name="w"), "broken")
    assert last.ihook.asked["pytest_runtest_logreport"]["report"].longrepr == "broken"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ["close"]),
        (KeyboardInterrupt(), ["interrupt 5.0"]),
        (pytest.exit.Exception("x"), ["interrupt 5.0"]),
        (pytest.Session.Failed(), ["close"]),
        (pytest.Session.Interrupted(), ["close"]),
        (ValueError(), []),
    ],
)
def test_worlds_end_with_the_loop_of_tests(
    controller: Any, error: BaseException | None, said: list[str]
) -> None:
    controller._worlds = worlds = Worlds()
    loop = controller.pytest_runtestloop()
    next(loop)
    if error is None:
        with pytest.raises(StopIteration) as ended:
            loop.send("result")
        assert ended.value.value == "result"
    else:
        with pytest.raises(type(error)):
            loop.throw(error)
    assert worlds.said == said
    assert controller._interrupted == ("interrupted" if said == ["interrupt 5.0"] else None)


def test_an_interrupted_run_says_what_ran(controller: Any) -> None:
    written: list[str] = []
    controller.pytest_terminal_summary(None)
    interrupted = SimpleNamespace(world="w", write=lambda reporter, nodeid: written.append(nodeid))
    controller._interrupted = interrupted
    controller.pytest_terminal_summary(None)
    controller._last_items = {"w": item_named(controller, "test_a")}
    controller.pytest_terminal_summary(None)
    interrupted.world = None
    controller.pytest_terminal_summary(None)
    assert written == ["", "test_x.py::test_a", ""]


def test_nothing_is_left_once_a_session_is_over(controller: Any, server: Server) -> None:
    controller._worlds = worlds = Worlds()
    controller._launch()
    controller.pytest_sessionfinish()
    assert (worlds.said, server.said) == (["kill"], [])
    controller.pytest_unconfigure()
    assert (worlds.said, server.said) == (["kill", "kill"], ["stop"])
    controller.close_worlds()
    assert worlds.said[-1] == "close"


def test_garbage_is_left_while_files_with_ranks_are_collected(controller: Any, tmp_path: Path) -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 7)
        collecting = controller.pytest_collection()
        next(collecting)
        (tmp_path / "test_x.py").write_text("")
        controller.pytest_pycollect_makemodule(tmp_path / "test_x.py")
        assert gc.get_threshold()[:2] == (700, 7)
        (tmp_path / "test_x.py").write_text("ranks")
        controller.pytest_pycollect_makemodule(tmp_path / "test_x.py")
        assert gc.get_threshold()[:2] == (10_000, 7)
        with pytest.raises(StopIteration) as ended:
            collecting.send(True)
        assert ended.value.value is True
        assert gc.get_threshold()[:2] == (700, 7)
        for own in ((0, 7), (50_000, 7), (1, 3)):
            gc.set_threshold(*own)
            collecting = controller.pytest_collection()
            next(collecting)
            controller.pytest_pycollect_makemodule(tmp_path / "test_x.py")
            assert gc.get_threshold()[0] == (10_000 if own[0] == 1 else own[0])
            collecting.close()
            assert gc.get_threshold()[:2] == own
    finally:
        gc.set_threshold(*before)
