"""What pytest offers works on ranks as it does elsewhere: arguments, fixtures, hooks, reports, plugins."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest


@dataclass(frozen=True)
class Session:
    """A pytest run that is over: what it printed, and what its XML report says of each test."""

    path: Path
    output: str
    cases: dict[str, ElementTree.Element]

    def outcome(self, name: str) -> str:
        """One word, and the reason of a skip."""
        children = [child for child in self.cases[name] if child.tag in ("failure", "error", "skipped")]
        skips = [f"skipped: {child.get('message')}" for child in children if child.tag == "skipped"]
        return ", ".join(skips or [child.tag for child in children]) or "passed"

    def notes(self, name: str) -> list[str]:
        path = self.path / f"{name}.txt"
        return path.read_text().splitlines() if path.exists() else []


def write(path: Path, **files: str) -> Path:
    """Write Python files into the directory `path`."""
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / f"{name}.py").write_text(dedent(text))
    return path


def run(path: Path, *args: str, cwd: str = ".", **environ: str) -> Session:
    command = [sys.executable, "-m", "pytest", f"--junitxml={path}/report.xml", "-ra", *args]
    done = subprocess.run(
        command,
        cwd=path / cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    report = path / "report.xml"
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else []
    return Session(path, done.stdout, {case.attrib["name"]: case for case in cases})


def count(session: Session) -> str:
    """The last line of pytest's output, without the time it took."""
    return re.sub(r" in [\d.]+s.*|=", "", session.output.splitlines()[-1]).strip()


# Fixtures

NOTES = """
    def note(world, what):
        with open(f"rank-{world.rank}-of-{world.size}.txt", "a") as file:
            print(what, file=file)
"""
SCOPES = """
    import os
    import pytest
    from notes import note

    @pytest.fixture(scope="session", autouse=True)
    def session(request):
        world = request.getfixturevalue("world") if "RANK" in os.environ else None
        if world:
            note(world, "session up")
        yield
        if world:
            note(world, "session down")
"""
PACKAGE = """
    import pytest
    from notes import note

    @pytest.fixture(scope="package")
    def package(world):
        note(world, "package up")
        yield "the package's own"
        note(world, "package down")

    @pytest.fixture(scope="module")
    def module(world, package, request):
        note(world, f"{request.module.__name__} up")
        yield
        note(world, f"{request.module.__name__} down")

    @pytest.fixture(scope="class")
    def of_class(world, module):
        note(world, "class up")
        yield
        note(world, "class down")
"""
FIRST = """
    import pytest
    from notes import note

    @pytest.fixture(scope="module")
    def of_the_controller():
        with open("controller.txt", "a") as file:
            print("up", file=file)
            yield
            print("down", file=file)

    @pytest.mark.ranks(2)
    def test_a(world, module):
        note(world, "a")

    def test_plain(of_the_controller):
        pass

    @pytest.mark.ranks(1)
    def test_of_another_world(world, module):
        note(world, "other")

    @pytest.mark.ranks(2)
    class TestClass:
        def test_b(self, world, of_class):
            note(world, "b")

        def test_c(self, world, of_class):
            note(world, "c")

    def test_plain_too(of_the_controller):
        pass
"""
SECOND = """
    import pytest
    from notes import note

    @pytest.mark.ranks(2)
    def test_d(world, module, package):
        assert package == "the package's own"
        note(world, "d")
"""


@pytest.fixture(scope="module")
def scopes(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = write(tmp_path_factory.mktemp("scopes"), notes=NOTES, conftest=SCOPES)
    write(path / "pkg", __init__="", conftest=PACKAGE, test_first=FIRST, test_second=SECOND)
    return run(path)


@pytest.mark.parametrize("rank", [0, 1])
def test_fixtures_of_all_scopes_live_once_a_rank_as_long_as_they_should(scopes: Session, rank: int) -> None:
    assert count(scopes) == "7 passed"
    assert scopes.notes(f"rank-{rank}-of-2") == [
        *("session up", "package up", "pkg.test_first up", "a", "class up", "b", "c", "class down"),
        *("pkg.test_first down", "pkg.test_second up", "d", "pkg.test_second down"),
        *("package down", "session down"),
    ]


def test_fixtures_of_another_world_and_of_the_controller_keep_their_own_time(scopes: Session) -> None:
    first, last = ["session up", "package up", "pkg.test_first up"], ["pkg.test_first down", "package down"]
    assert scopes.notes("rank-0-of-1") == [*first, "other", *last, "session down"]
    assert scopes.notes("controller") == ["up", "down"]


def test_a_tear_down_that_fails_on_ranks_and_one_in_the_controller_are_both_told(tmp_path: Path) -> None:
    tests = """
        import pytest

        @pytest.fixture(scope="module")
        def wide():
            yield
            raise ValueError("wide")

        @pytest.fixture
        def narrow():
            yield
            raise KeyError("narrow")

        def test_plain(wide): pass

        @pytest.mark.ranks(1)
        def test_a(narrow): pass
    """
    write(tmp_path, test_it=tests)
    output = run(tmp_path).output
    errors = [line for line in output.splitlines() if line.startswith("ERROR test_it.py")]
    assert errors == [
        "ERROR test_it.py::test_a - rank 0: KeyError: 'narrow'",
        "ERROR test_it.py::test_a - ValueError: wide",
    ]


def test_conftests_of_several_directories_named_on_the_command_line_are_found(tmp_path: Path) -> None:
    for name in ("one", "two"):
        conftest = f"import pytest\n\n@pytest.fixture\ndef where(): return {name!r}"
        tests = f"import pytest\n\n@pytest.mark.ranks(2)\ndef test_{name}(where): assert where == {name!r}"
        write(tmp_path / name, conftest=conftest, **{f"test_{name}": tests})
    assert count(run(tmp_path, "one", "two")) == "2 passed"


# What passes and what skips

ORDINARY = '''
    """
    >>> import os
    >>> "RANK" in os.environ
    False
    """
    import logging, os, sys, unittest, warnings
    import pytest
    import torch

    pytestmark = pytest.mark.ranks(2)

    def test_monkeypatch(world, monkeypatch):
        monkeypatch.setenv("HOME", str(world.rank))
        assert world.gather(os.environ["HOME"]) == ["0", "1"]

    def test_monkeypatch_is_undone(world):
        assert world.gather(os.environ["HOME"]) == [os.environ["HOME"]] * 2 != ["0", "1"]

    def test_capsys(world, capsys):
        print("out", world.rank)
        print("err", world.rank, file=sys.stderr)
        assert capsys.readouterr() == (f"out {world.rank}\\n", f"err {world.rank}\\n")

    def test_capfd(world, capfd):
        os.write(1, b"native")
        assert capfd.readouterr().out == "native"

    def test_caplog(world, caplog):
        logging.warning("from %d", world.rank)
        assert caplog.messages == [f"from {world.rank}"]

    def test_tmp_path(world, tmp_path):
        assert tmp_path.is_dir() and len(set(world.gather(str(tmp_path)))) == 2

    def test_shared_tmp_path(world):
        world.assert_same(str(world.shared_tmp_path))
        (world.shared_tmp_path / str(world.rank)).touch()
        world.barrier()
        assert sorted(path.name for path in world.shared_tmp_path.iterdir()) == ["0", "1"]

    def test_shared_tmp_path_is_of_one_test(world):
        assert not list(world.shared_tmp_path.iterdir())

    def test_properties(world, record_property):
        record_property("same", 1)
        record_property("rank", f"is {world.rank}")
        record_property("loss", torch.tensor(0.5))

    @pytest.mark.parametrize("n", [3, 5], ids=["three", "five"])
    def test_parametrized(world, n, request):
        assert request.node.callspec.id == {3: "three", 5: "five"}[n]

    class TestClass:
        def setup_method(self):
            self.value = 3

        def test_method(self, world):
            assert self.value == 3 and world.size == 2

    class TestOld(unittest.TestCase):
        def setUp(self):
            self.rank = int(os.environ["RANK"])

        def test_unittest(self):
            self.assertIn(self.rank, (0, 1))

    def test_warnings(world):
        warnings.warn("seen by all", DeprecationWarning)

    class OwnWarning(UserWarning):
        pass

    def test_own_warning(world):
        if world.rank == 1:
            warnings.warn("seen by one", OwnWarning)

    @pytest.mark.skip(reason="marked")
    def test_skip(world): pass

    @pytest.mark.skipif("sys.platform != 'amiga'", reason="wrong machine")
    def test_skipif(world): pass

    def test_skip_by_hook(world): pass

    def test_importorskip(world):
        pytest.importorskip("no_such_module")
'''
HOOKS = """
    import os, pytest

    def pytest_collection_modifyitems(items):
        for item in items:
            if item.name == "test_marked_by_hook":
                item.add_marker(pytest.mark.ranks(1))

    def pytest_runtest_setup(item):
        if item.name == "test_skip_by_hook":
            pytest.skip("hook")

    def pytest_runtest_call(item):
        item.user_properties.append(("hook", "RANK" in os.environ))
"""
OTHERS = """
    import os
    def test_marked_by_hook(): assert os.environ["RANK"] == "0"
    def test_in_the_controller(): assert "RANK" not in os.environ
"""
ABSENT = """
    import pytest
    pytest.importorskip("no_such_module")
    @pytest.mark.ranks(2)
    def test_never(world): pass
"""


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("ordinary")
    write(path, conftest=HOOKS, test_ordinary=ORDINARY, test_others=OTHERS, test_absent=ABSENT)
    return run(path, "--doctest-modules")


@pytest.mark.parametrize(
    "name",
    [
        *("test_monkeypatch", "test_monkeypatch_is_undone", "test_capsys", "test_capfd", "test_caplog"),
        *("test_tmp_path", "test_shared_tmp_path", "test_shared_tmp_path_is_of_one_test", "test_properties"),
        *(
            "test_parametrized[three]",
            "test_parametrized[five]",
            "test_method",
            "test_unittest",
            "test_warnings",
        ),
        *("test_own_warning", "test_marked_by_hook", "test_in_the_controller", "test_ordinary"),
    ],
)
def test_what_pytest_offers_works_on_ranks(ordinary: Session, name: str) -> None:
    assert ordinary.outcome(name) == "passed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skip", "marked"),
        ("test_skipif", "wrong machine"),
        ("test_skip_by_hook", "hook"),
        ("test_importorskip", "could not import 'no_such_module': No module named 'no_such_module'"),
    ],
)
def test_a_skip_keeps_its_reason(ordinary: Session, name: str, reason: str) -> None:
    assert ordinary.outcome(name) == f"skipped: {reason}"


def test_a_module_that_skips_itself_is_skipped_once(ordinary: Session) -> None:
    assert ordinary.output.count("test_absent.py:3: could not import 'no_such_module'") == 1


def test_a_warning_of_all_ranks_appears_once_with_its_category_and_line(ordinary: Session) -> None:
    assert len(re.findall(r"test_ordinary\.py:\d+: DeprecationWarning: seen by all", ordinary.output)) == 1
    assert ordinary.output.count("OwnWarning: seen by one") == 1
    assert count(ordinary).endswith("2 warnings")


def test_properties_of_all_ranks_are_recorded_equal_ones_once(ordinary: Session) -> None:
    nodes = ordinary.cases["test_properties"].iter("property")
    assert sorted((node.get("name"), node.get("value")) for node in nodes) == [
        ("hook", "True"),
        ("loss", "tensor(0.5000)"),
        ("rank", "is 0"),
        ("rank", "is 1"),
        ("same", "1"),
    ]


# What the user typed

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
    def test_leaves_something_behind(world):
        os.environ["LEFT"] = "1"
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
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One session with as many ways to say something to pytest as go together."""
    path = tmp_path_factory.mktemp("arguments")
    conftest = 'def pytest_addoption(parser): parser.addoption("--mine", type=int)'
    write(path / "tests", conftest=conftest, check_sample=SAMPLE)
    write(path / "plugins", own_plugin=PLUGIN)
    (path / "other.ini").write_text(dedent(INI))
    words = "-c ../other.ini --rootdir=.. --import-mode=importlib -o of_the_ini=overridden -W error --mine=3"
    args = [*shlex.split(words), "-k", "not letter or b"]
    environ = {"PYTEST_ADDOPTS": "--of-the-plugin=yes --world-seed=5", "PYTHONPATH": str(path / "plugins")}
    return run(path, *args, cwd="tests", OF_THE_SHELL="1", **environ)


@pytest.mark.parametrize(
    "name",
    [
        *("test_surroundings", "test_environment", "test_fixtures_of_the_plugin", "test_warnings_are_errors"),
        "test_letter[b]",
    ],
)
def test_what_the_user_typed_means_the_same_on_ranks(arguments: Session, name: str) -> None:
    assert arguments.outcome(name) == "passed"


def test_the_sample_was_told_what_it_claims(arguments: Session) -> None:
    told = json.loads((arguments.path / "tests" / "controller.json").read_text())
    assert (told["mine"], told["world_seed"], told["of_the_plugin"], told["in ini"]) == (
        3,
        5,
        "yes",
        "overridden",
    )
    assert told["cwd"] == str(arguments.path / "tests")
    assert told["ini"] == str(arguments.path / "other.ini")


def test_items_that_were_not_selected_do_not_run(arguments: Session) -> None:
    assert count(arguments) == "7 passed, 3 deselected, 1 error"


def test_where_warnings_are_errors_state_left_behind_is_an_error_at_teardown(arguments: Session) -> None:
    assert arguments.outcome("test_leaves_something_behind") == "error"
    assert "RankStateWarning: rank 0: the test left behind environ: LEFT" in arguments.output


# What fails, and how it is shown

FAILURES = """
    import random
    import pytest

    pytestmark = pytest.mark.ranks(2)

    def test_calm(world):
        print("calm")

    def test_seeds(world):
        import numpy, torch
        here = [random.random(), float(numpy.random.rand()), torch.rand(2)]
        world.assert_same(here)
        assert here[0] == random.Random(world.seed).random()
        assert here[2].tolist() == torch.rand(2, generator=torch.Generator().manual_seed(world.seed)).tolist()

    def test_fails(world):
        print("said by", world.rank)
        assert world.rank == 0

    def test_exits(world):
        if world.rank == 1:
            pytest.exit("enough")
        world.barrier()

    def test_is_interrupted(world):
        if world.rank == 0:
            raise KeyboardInterrupt

    def test_after(world): pass
"""
FAILED = ["test_exits", "test_fails", "test_is_interrupted"]


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("failures")
    write(path, test_failures=FAILURES, test_plain="def test_plain(): pass")
    return run(path, "-v", "--tb=short", "--durations=3", "--durations-min=0", "--world-seed=7")


def test_every_item_has_one_line_in_verbose_output(failures: Session) -> None:
    lines = re.findall(r"^test_\w+\.py::(\w+) ([A-Z]+)", failures.output, re.MULTILINE)
    assert [name for name, _ in lines] == list(failures.cases)
    assert sorted(name for name, word in lines if word == "FAILED") == FAILED


def test_exit_and_interrupt_inside_a_rank_fail_their_test_only(failures: Session) -> None:
    assert count(failures) == "3 failed, 4 passed"
    assert "FAILED test_failures.py::test_exits - rank 1: _pytest.outcomes.Exit: enough" in failures.output
    assert "FAILED test_failures.py::test_is_interrupted - rank 0: KeyboardInterrupt" in failures.output
    assert "rank 0: cut off by that at" in failures.cases["test_exits"].findtext("failure", "")


def test_the_xml_report_has_one_case_an_item_and_names_the_rank(failures: Session) -> None:
    assert len(failures.cases) == 7
    case = failures.cases["test_fails"]
    assert case.attrib["classname"] == "test_failures"
    assert case.findall("failure")[0].get("message", "").startswith("rank 1: assert 1 == 0")
    assert float(case.attrib["time"]) > 0


def test_a_short_traceback_is_short(failures: Session) -> None:
    text = failures.cases["test_fails"].findtext("failure", "")
    assert re.search(r"^test_failures.py:\d+: in test_fails$", text, re.MULTILINE)
    assert "def test_fails" not in text


def test_durations_are_listed(failures: Session) -> None:
    assert len(re.findall(r"^\d+\.\d+s (?:setup|call|teardown) +test_", failures.output, re.MULTILINE)) == 3


def test_the_seed_is_part_of_the_report_and_of_the_line_that_runs_it_again(failures: Session) -> None:
    assert "re-run (seed 7)" in failures.output
    assert "\npytest test_failures.py::test_fails --world-seed 7\n" in failures.output


def test_the_line_that_runs_a_failure_again_does_so(failures: Session) -> None:
    program, *args = shlex.split(re.findall(r"^pytest .*::test_fails.*$", failures.output, re.MULTILINE)[0])
    again = run(failures.path, *args, "-p", "no:cacheprovider")
    assert program == "pytest"
    assert count(again) == "1 failed"
    assert "re-run (seed 7)" in again.output


def test_last_failed_runs_only_what_failed(failures: Session) -> None:
    cache = failures.path / ".pytest_cache/v/cache/lastfailed"
    ids = [f"test_failures.py::{name}" for name in FAILED]
    assert sorted(json.loads(cache.read_text())) == ids
    again = run(failures.path, "--lf", "-q", "--tb=line", "-s")
    assert count(again) == "3 failed"
    assert sorted(json.loads(cache.read_text())) == ids
    assert re.search(r"^/.*/test_failures.py:\d+: rank 1: assert 1 == 0$", again.output, re.MULTILINE)
    assert sorted(re.findall(r"said by (\d)", again.output)) == ["0", "1"]


def test_a_native_traceback_and_the_debug_log_come_out_whole(failures: Session) -> None:
    session = run(failures.path, "-p", "no:cacheprovider", "--tb=native", "--debug", "-k", "fails")
    assert "FAILED test_failures.py::test_fails - rank 1: assert 1 == 0\n" in session.output
    assert "\0" not in (failures.path / "pytestdebug.log").read_text()


def test_the_first_failure_stops_the_run_when_asked_to(failures: Session) -> None:
    args = "-x --tb=no -p no:cacheprovider --setup-show -o junit_logging=all"
    session = run(failures.path, *args.split())
    assert count(session) == "1 failed, 2 passed"
    assert "stopping after 1 failures" in session.output
    assert "re-run" not in session.output
    assert session.cases["test_calm"].findtext("system-out", "").count("calm") == 2
    assert "said by 1" in session.cases["test_fails"].findtext("system-out", "")
