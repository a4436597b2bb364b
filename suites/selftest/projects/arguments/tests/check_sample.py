"""Options, settings, environment and selection, as tests in the controller and on ranks see them."""

import json
import os
import pathlib
import sys
import warnings

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
    for name in [name for name in controller if name.startswith("PYTEST_XDIST_")]:
        del controller[name]  # of a run around this one: each rank is a worker of its own
    for name in ("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"):
        controller.pop(name, None)  # torch may have set them there: those of a rank are its own
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
def test_slow(world):
    raise AssertionError


@pytest.mark.ranks(2)
def test_calm(world):
    print("calm")


@pytest.mark.ranks(2)
def test_leaves_something_behind(world):
    os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)  # ended, though the state is an error already
    print("said by", world.rank)
    os.environ["LEFT"] = "1"


@pytest.mark.ranks(2)
def test_after_the_first_failure(world):
    pass
