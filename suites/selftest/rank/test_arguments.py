"""Arguments, ini files, plugins, environment and selection: they mean the same on ranks."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from suites.selftest.project import HEADER, Project, Run, copy_project, run_pytest


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One session with as many kinds of arguments as go together."""
    path = copy_project("arguments", tmp_path_factory.mktemp("arguments"))
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
def test_arguments_and_surroundings_are_the_same_on_ranks(arguments: Run, name: str) -> None:
    assert arguments.outcome(name) == "passed"


def test_the_controller_has_the_arguments_of_the_command_line(arguments: Run) -> None:
    seen = json.loads((arguments.path / "tests" / "controller.json").read_text())
    assert (seen["mine"], seen["world_seed"]) == (3, 5)
    assert (seen["of_the_plugin"], seen["in ini"]) == ("yes", "overridden")
    assert seen["cwd"] == str(arguments.path / "tests")
    assert seen["ini"] == str(arguments.path / "other.ini")


def test_deselected_items_do_not_run(arguments: Run) -> None:
    assert arguments.count() == "8 passed, 3 deselected, 1 error"


def test_state_left_behind_is_an_error_where_warnings_are(arguments: Run) -> None:
    assert arguments.outcome("test_leaves_something_behind") == "error"
    error = arguments.failure("test_leaves_something_behind", "error")
    assert "RankStateWarning: the test left behind environ: LEFT" in error
    assert "RankLeakWarning: the test left behind process" in error


def test_the_first_failure_stops_the_run_with_x(arguments: Run) -> None:
    assert list(arguments.cases)[-2:] == ["test_calm", "test_leaves_something_behind"]
    assert "stopping after 1 failures" in arguments.output


def test_tb_no_and_junit_logging_all_work_for_ranks(arguments: Run) -> None:
    assert "re-run" not in arguments.output
    assert arguments.case("test_calm").findtext("system-out", "").count("calm") == 2
    assert "said by 1" in arguments.case("test_leaves_something_behind").findtext("system-out", "")


def test_asserts_are_rewritten_in_a_file_of_any_name(tmp_path: Path) -> None:
    """Of one that the command line names, as pytest does."""
    (tmp_path / "checks.py").write_text(
        "import pytest\n\n@pytest.mark.ranks(2)\ndef test_sum(world):\n    assert [world.size] == [3]\n"
    )
    assert "assert [2] == [3]" in run_pytest(tmp_path, "checks.py").output


def test_asserts_of_an_installed_plugin_are_rewritten(tmp_path: Path) -> None:
    """Also those of its other modules, which pytest finds in the list of files of the package."""
    info = tmp_path / "installed" / "sizes-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sizes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nsizes = sizes_plugin\n")
    (info / "RECORD").write_text("sizes_plugin.py,,\nsizes_checks.py,,\n")
    (info.parent / "sizes_plugin.py").touch()
    (info.parent / "sizes_checks.py").write_text("def is_three(size):\n    assert [size] == [3]\n")
    (tmp_path / "test_size.py").write_text(
        "import pytest\n\n@pytest.mark.ranks(2)\ndef test_size(world):\n"
        "    from sizes_checks import is_three\n\n    is_three(world.size)\n"
    )
    assert "assert [2] == [3]" in run_pytest(tmp_path, PYTHONPATH=str(info.parent)).output


def test_a_plugin_that_the_server_has_imported_is_no_warning_of_ranks(tmp_path: Path) -> None:
    """torch's module for tests imports hypothesis, whose asserts a rank can no longer rewrite."""
    (tmp_path / "test_sum.py").write_text(
        "import sys\n\nimport pytest\nfrom torch.testing._internal.common_utils import TestCase\n\n\n"
        '@pytest.mark.ranks(2)\ndef test_sum(world):\n    assert "hypothesis" in sys.modules\n'
    )
    run = run_pytest(tmp_path, "-W", "error")
    assert run.count() == "1 passed", run.output


def test_a_plugin_may_replace_one_of_pytests_own(project: Project) -> None:
    own = 'def pytest_addoption(parser):\n    parser.addoption("--log-level", default="of the plugin")\n'
    (project.path / "own.py").write_text(own)
    project.write("def test_x(pytestconfig):\n    assert pytestconfig.option.log_level == 'of the plugin'\n")
    assert "= 1 passed in" in project.run("-p", "no:logging", "-p", "own")


def test_a_feature_may_be_left_out(project: Project) -> None:
    project.write(
        "def test_x(pytestconfig):\n"
        "    names = dict(pytestconfig.pluginmanager.list_name_plugin())\n"
        "    assert names['lockstep.features.leaks.plugin'] is None\n"
        "    assert names['lockstep.features.leases.plugin'] is not None\n"
    )
    assert "= 1 passed in" in project.run("-p", "no:lockstep.features.leaks.plugin")


@pytest.mark.parametrize("name", ["lockstep.plugin", "harness.plugin"])
def test_a_conftest_may_name_the_plugin(tmp_path: Path, name: str) -> None:
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = ['{name}']\n")
    (tmp_path / "test_x.py").write_text(
        "import pytest\n\n@pytest.mark.ranks(2)\ndef test_x(world, pytestconfig):\n"
        f"    assert pytestconfig.pluginmanager.hasplugin('{name}')\n"
        "    assert pytestconfig.getoption('--backend') == 'shm'\n"
    )
    run = run_pytest(tmp_path, "--backend=shm", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert run.count() == "1 passed", run.output


# The rootdir


@pytest.mark.parametrize("workers", [(), ("-n1",)])
@pytest.mark.parametrize("has_ini", [True, False])
def test_a_folder_that_the_run_makes_changes_no_rootdir(
    project: Project, has_ini: bool, workers: tuple[str, ...]
) -> None:
    """pytest takes arguments that exist for its rootdir: also the value of an option, behind a blank."""
    tests, other = project.path / "tests", project.path / "other"
    tests.mkdir()
    other.mkdir()
    (other / "pytest.ini").write_text("[pytest]\naddopts = --unknown\n")
    if has_ini:
        (tests / "pytest.ini").write_text("[pytest]\n")
    (tests / "test_sample.py").write_text(
        f"{HEADER}def test_root(pytestconfig):\n"
        f"    assert str(pytestconfig.rootpath) == {str(tests)!r}\n"
        f"    assert (pytestconfig.inipath is not None) == {has_ini}\n"
    )
    project.plugins = True  # an option is then known late, as it is to every user
    args = ["--timeline", str(other / "pages"), "--rank-output-dir", "below/kept", *workers]
    output = project.run(*args, cwd="tests")
    assert "= 1 passed in" in output
    assert (other / "pages/index.html").exists()


def test_a_rank_with_another_rootdir_says_so(project: Project) -> None:
    (project.path / "conftest.py").write_text(
        "import os, pathlib\n\n"
        "def pytest_configure(config):\n"
        "    if 'RANK' in os.environ:\n"
        "        config._rootpath = pathlib.Path('/')\n"
    )
    project.write("def test_x(world):\n    pass\n")
    output = project.run()
    assert f"has the rootdir /, where the pytest that you started has {project.path}, so that its" in output
    assert "depend on the rank" not in output
