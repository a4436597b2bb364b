"""The private names of pytest by which a rank's session starts quickly, and is that of its controller."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.rank import pytest_internals as module

Patch = pytest.MonkeyPatch


def test_a_session_has_the_root_that_it_is_given_once(monkeypatch: Patch) -> None:
    asked: list[dict[str, Any]] = []

    def find(**given: Any) -> tuple[Any, ...]:
        asked.append(given)
        return "root", "file", {"a": 1}, ["b"]

    patched = SimpleNamespace(determine_setup=find)
    monkeypatch.setattr(module, "pytest_config", patched)
    module.set_root(Path("/root"), Path("/root/x.ini"))
    given = {"inifile": "other", "args": ["a"], "rootdir_cmd_arg": "/r", "invocation_dir": "/i"}
    assert patched.determine_setup(**given) == (Path("/root"), Path("/root/x.ini"), {"a": 1}, ["b"])
    assert patched.determine_setup is find
    module.set_root(Path("/root"), None)
    assert patched.determine_setup(**given)[:2] == (Path("/root"), None)
    same = {"args": [], "rootdir_cmd_arg": None, "invocation_dir": "/i"}
    assert asked == [{**same, "inifile": "/root/x.ini"}, {**same, "inifile": os.devnull}]


@pytest.mark.parametrize(
    ("args", "variable", "is_taken"),
    [
        (("-q", "test_a.py"), "", True),
        (("-p", "no:cacheprovider", "-p", "mine"), "", True),
        (("-pno:logging",), "", False),
        (("-p", "cacheprovider"), "", False),
        (("-p", "no:terminal"), "", False),
        (("-q",), "1", False),
    ],
)
def test_a_session_has_the_config_unless_its_arguments_change_plugins(
    monkeypatch: Patch, args: tuple[str, ...], variable: str, is_taken: bool
) -> None:
    considered: list[Any] = []
    patched: Any = SimpleNamespace(
        get_config=lambda *given, **others: ("made", given, others),
        default_plugins=("logging", "terminal", "cacheprovider"),
    )
    monkeypatch.setattr(module, "pytest_config", patched)
    monkeypatch.delenv("PYTEST_DEBUG", raising=False)
    if variable:
        monkeypatch.setenv("PYTEST_DEBUG", variable)
    make = patched.get_config
    manager = SimpleNamespace(consider_preparse=lambda *given, **more: considered.append((given, more)))
    config: Any = SimpleNamespace(pluginmanager=manager)
    module.use_config(config)
    found = patched.get_config(args, ["plugin"], prog="x")
    assert patched.get_config is make
    if not is_taken:
        assert (found, considered) == (("made", (args, ["plugin"]), {"prog": "x"}), [])
        return
    assert found is config
    assert considered == [((args,), {"exclude_only": True})]
    parameters = config.invocation_params
    assert (parameters.args, parameters.plugins, parameters.dir) == (args, ["plugin"], Path.cwd())


def test_asserts_of_named_plugins_are_rewritten(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pytest.Config, "_mark_plugins_for_rewrite", None)
    module.expect_plugins(("a", "b"))
    hook = SimpleNamespace(_must_rewrite={"c"})
    config = SimpleNamespace(pluginmanager=SimpleNamespace())
    vars(pytest.Config)["_mark_plugins_for_rewrite"](config, hook, True)
    assert config.pluginmanager.rewrite_hook is hook
    assert hook._must_rewrite == {"a", "b", "c"}


@pytest.fixture
def of_module() -> None: ...


class Odd:
    """A plugin that chooses its names itself."""

    def __dir__(self) -> list[str]:
        return []


class Without:
    """A class of plugins without a fixture."""


class WithStatic:
    made = staticmethod(of_module)


class WithFixture:
    made = of_module


class Derived(WithFixture):
    pass


def test_fixtures_are_looked_for_in_plugins_that_have_some(monkeypatch: Patch) -> None:
    registered: list[str] = []
    holders: dict[str, Any] = {}
    sorted_items: list[str] = []

    class Manager:
        def __init__(self, session: Any) -> None:
            for name, plugin in session.items():
                self.pytest_plugin_registered(plugin, name)
            self.pytest_collection_modifyitems()

        def pytest_plugin_registered(self, plugin: object, plugin_name: str) -> None:
            registered.append(plugin_name)
            holders[plugin_name] = plugin

        def pytest_collection_modifyitems(self) -> None:
            sorted_items.append("sorted")

    monkeypatch.setattr(module, "FixtureManager", Manager)
    plain, full = ModuleType("plain"), ModuleType("full")
    vars(full).update(made=of_module, other=print)
    session: dict[str, Any] = {
        "plain": plain,
        "full": full,
        "odd": Odd(),
        "object": object(),
        "static": WithStatic(),
        "instance": WithFixture(),
        "derived": Derived(),
        "class": WithFixture,
        "int": 3,
        "without": Without,
        "": plain,
        "/a/conftest.py": plain,
        "/a/conftest.py.bak": plain,
    }
    make = Manager.__init__
    module.manage_fixtures_quickly()
    Manager(session)
    assert registered == ["full", "odd", "static", "instance", "derived", "class", "/a/conftest.py"]
    assert sorted_items == []
    found = {name: value for name, value in vars(holders.pop("full")).items() if name not in vars(plain)}
    assert found == {"made": of_module}  # looked for in no other name of a module
    assert all(holder is session[name] for name, holder in holders.items())
    assert Manager.__init__ is make
    registered.clear()
    Manager(session)
    assert (len(registered), sorted_items) == (len(session), ["sorted"])


def test_a_location_that_is_given_need_not_be_found(
    monkeypatch: Patch, request: pytest.FixtureRequest
) -> None:
    function = pytest.Function.from_parent(request.node.parent, name="x", callobj=lambda: None)
    module.set_location(function, ("x.py", 3, "x"))
    assert function.location == ("x.py", 3, "x")
    monkeypatch.setattr(pytest.Item, "location", property(lambda self: "computed"))
    other: Any = SimpleNamespace()
    module.set_location(other, ("x.py", 3, "x"))
    assert vars(other) == {}


def test_what_is_kept_of_fixtures_that_have_ended_is_dropped() -> None:
    ended, living = (object.__new__(pytest.FixtureDef) for _ in range(2))
    ended.cached_result, living.cached_result = None, (1, 2, None)
    other = SimpleNamespace(finish=print, cached_result=None)
    kept: list[Any] = [
        *(functools.partial(living.finish, request=1), print, ended.finish),
        *(functools.partial(print, 1), functools.partial(other.finish)),
    ]
    finalizers = [functools.partial(ended.finish, request=1), *kept]
    fixture: Any = SimpleNamespace(_finalizers=finalizers)
    module.forget_ended_dependents(fixture)
    assert fixture._finalizers == kept
    assert fixture._finalizers is finalizers


def test_files_outside_of_the_root_have_the_ids_of_an_argument() -> None:
    hooked: list[Any] = []
    stash = pytest.Stash()
    session: Any = SimpleNamespace(
        config=SimpleNamespace(rootpath=Path("/root"), stash=stash),
        _initialpaths=frozenset({Path("/root/a.py"), Path("/out/b.py"), Path("/rooted")}),
    )
    module.set_argument(session, Path("/out"))
    assert session._initialpaths == {Path("/out"), Path("/root/a.py")}
    state: Any = SimpleNamespace(hook=None)
    stash[module.assertstate_key] = state
    module.set_argument(session, Path("/other"))
    assert session._initialpaths == {Path("/other"), Path("/root/a.py")}
    state.hook = SimpleNamespace(set_session=hooked.append)
    module.set_argument(session, Path("/other"))
    assert hooked == [session]


def test_conftests_that_wait_and_sections_are_those_of_pytest(request: pytest.FixtureRequest) -> None:
    waiting = {Path("/a"): 1}
    session: Any = SimpleNamespace(_fixturemanager=SimpleNamespace(_pending_conftests=waiting))
    assert module.waiting_conftests(session) is waiting
    session._fixturemanager = SimpleNamespace()
    assert module.waiting_conftests(session) == {}
    request.node.add_report_section("call", "kind", "text")
    assert module.captured_sections(request.node)[-1] == ("call", "kind", "text")
    asked: list[object] = []
    item: Any = SimpleNamespace()
    item.session = SimpleNamespace(_setupstate=SimpleNamespace(teardown_exact=asked.append))
    module.tear_down_except_for(item)
    assert asked == [item]
