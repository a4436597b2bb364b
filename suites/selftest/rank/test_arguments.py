"""What the user typed means the same on ranks: arguments, ini files, plugins, environment, selection."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Run

SAMPLE = """
    import json, os, pathlib, sys, warnings
    import pytest

    def surroundings(config):
        options = ("mine", "world_seed", "importmode", "override_ini", "pythonwarnings", "of_the_plugin")
        return {
            "argv": sys.argv,
            "path": sys.path,
            "cwd": os.getcwd(),
            "root": str(config.rootpath),
            "ini": str(config.inipath),
            "args": [str(argument) for argument in config.invocation_params.args],
            "in ini": config.getini("of_the_ini"),
            **{option: config.getoption(option) for option in options},
        }

    def test_in_the_controller(pytestconfig):
        pathlib.Path("controller.json").write_text(json.dumps(surroundings(pytestconfig)))
        pathlib.Path("environ.json").write_text(json.dumps(dict(os.environ)))

    @pytest.mark.ranks(2)
    def test_surroundings(world, pytestconfig):
        assert surroundings(pytestconfig) == json.loads(pathlib.Path("controller.json").read_text())

    @pytest.mark.ranks(2)
    def test_environment(world):
        controller = json.loads(pathlib.Path("environ.json").read_text())
        del controller["PYTEST_CURRENT_TEST"]
        assert {name: os.environ.get(name) for name in controller} == controller
        assert controller["OF_THE_SHELL"] == "1"

    @pytest.mark.ranks(2)
    def test_fixtures_of_the_plugin(world, from_the_plugin):
        assert from_the_plugin == 5

    @pytest.mark.ranks(2)
    def test_warnings_are_errors(world):
        with pytest.raises(UserWarning, match="loud"):
            warnings.warn("loud")

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("letter", "abc")
    def test_letter(world, letter):
        assert letter == "b"

    @pytest.mark.slow
    @pytest.mark.ranks(2)
    def test_slow(world): raise AssertionError

    @pytest.mark.ranks(2)
    def test_calm(world):
        print("calm")

    @pytest.mark.ranks(2)
    def test_leaves_something_behind(world):
        print("said by", world.rank)
        os.environ["LEFT"] = "1"

    @pytest.mark.ranks(2)
    def test_after_the_first_failure(world): pass
"""
PLUGIN = """
    import pytest

    def pytest_addoption(parser):
        parser.addoption("--of-the-plugin")
        parser.addini("of_the_ini", "a setting")

    @pytest.fixture
    def from_the_plugin():
        return 5
"""
INI = """
    [pytest]
    addopts = -p own_plugin -m "not slow"
    markers = slow: takes long
    python_files = check_*.py
    of_the_ini = as the file has it
"""


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, run_pytest: Callable[..., Run]) -> Run:
    """One session with as many ways to say something to pytest as go together."""
    path = tmp_path_factory.mktemp("arguments")
    conftest = 'def pytest_addoption(parser): parser.addoption("--mine", type=int)'
    files = {"tests/conftest.py": conftest, "tests/check_sample.py": SAMPLE}
    for name, text in {**files, "plugins/own_plugin.py": PLUGIN, "other.ini": INI}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(dedent(text))
    words = "-c ../other.ini --rootdir=.. --import-mode=importlib -o of_the_ini=overridden -W error --mine=3"
    shown = "-x --tb=no -p no:cacheprovider --setup-show -o junit_logging=all"
    args = [*shlex.split(words), *shown.split(), "-k", "not letter or b"]
    environ = {
        "PYTEST_ADDOPTS": "--of-the-plugin=yes --world-seed=5",
        "PYTHONPATH": f"{path}/plugins:{os.environ.get('PYTHONPATH', '')}",
    }
    return run_pytest(path, *args, cwd="tests", OF_THE_SHELL="1", **environ)


@pytest.mark.parametrize(
    "name",
    [
        *("test_surroundings", "test_environment", "test_fixtures_of_the_plugin", "test_warnings_are_errors"),
        "test_letter[b]",
    ],
)
def test_what_the_user_typed_means_the_same_on_ranks(arguments: Run, name: str) -> None:
    assert arguments.outcome(name) == "passed"


def test_the_sample_was_told_what_it_claims(arguments: Run) -> None:
    told = json.loads((arguments.path / "tests" / "controller.json").read_text())
    assert (told["mine"], told["world_seed"], told["of_the_plugin"], told["in ini"]) == (
        3,
        5,
        "yes",
        "overridden",
    )
    assert told["cwd"] == str(arguments.path / "tests")
    assert told["ini"] == str(arguments.path / "other.ini")


def test_items_that_were_not_selected_do_not_run(arguments: Run) -> None:
    assert arguments.count() == "8 passed, 3 deselected, 1 error"


def test_where_warnings_are_errors_state_left_behind_is_an_error_at_teardown(arguments: Run) -> None:
    assert arguments.outcome("test_leaves_something_behind") == "error"
    told = arguments.cases["test_leaves_something_behind"].findtext("error", "")
    assert "RankStateWarning: rank 0: the test left behind environ: LEFT" in told


def test_the_first_failure_stops_the_run_when_asked_to(arguments: Run) -> None:
    assert list(arguments.cases)[-2:] == ["test_calm", "test_leaves_something_behind"]
    assert "stopping after 1 failures" in arguments.output


def test_no_traceback_is_shown_and_all_output_is_kept_where_the_user_asked_for_it(arguments: Run) -> None:
    assert "re-run" not in arguments.output
    assert arguments.cases["test_calm"].findtext("system-out", "").count("calm") == 2
    assert "said by 1" in arguments.cases["test_leaves_something_behind"].findtext("system-out", "")
