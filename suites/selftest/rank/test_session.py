"""What pytest offers works on ranks as it does elsewhere: fixtures, hooks, skips, warnings, properties."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Run

# One session over six directories that are named on the command line.

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
# What is collected before this package is set up is the next item's file, from another directory.
ALONE = """
    import pytest

    @pytest.mark.ranks(2)
    def test_alone(world): pass
"""
TEAR_DOWNS = """
    import pytest

    @pytest.fixture(scope="module")
    def wide():
        yield
        raise ValueError("wide")

    @pytest.fixture
    def narrow():
        yield
        raise KeyError("narrow")

    def test_wide(wide): pass

    @pytest.mark.ranks(1)
    def test_narrow(narrow): pass
"""
WHERE = """
    import pytest

    @pytest.fixture
    def where(): return {name!r}
"""
NAMED = """
    import pytest

    @pytest.mark.ranks(2)
    def test_{name}(where): assert where == {name!r}
"""
ORDINARY = '''
    """
    >>> import os
    >>> "RANK" in os.environ
    False
    """
    import logging, os, sys, unittest, warnings
    import pytest

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
        import torch
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
UNBOUND = """
    import pytest, sys

    def of_leases():
        ours = [name for name in sys.modules if name.startswith("harness.")]
        return [name for name in ours if "leas" in name or "ledger" in name or "claim" in name]

    @pytest.mark.ranks(1)
    def test_unbound_on_a_rank(world): assert of_leases() == []

    def test_unbound_in_the_controller(): assert of_leases() == []
"""


def write(path: Path, **files: str) -> Path:
    """Write Python files into the directory `path`."""
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / f"{name}.py").write_text(dedent(text))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, run_pytest: Callable[..., Run]) -> Run:
    path = tmp_path_factory.mktemp("session")
    write(path / "scopes", notes=NOTES, conftest=SCOPES)
    write(path / "scopes" / "pkg", __init__="", conftest=PACKAGE, test_first=FIRST, test_second=SECOND)
    write(path / "ordinary", conftest=HOOKS, test_ordinary=ORDINARY, test_others=OTHERS, test_absent=ABSENT)
    write(path / "ordinary", test_unbound=UNBOUND)
    for name in ("one", "two"):
        files = {"conftest": WHERE, f"test_{name}": NAMED}
        write(path / name, **{file: text.format(name=name) for file, text in files.items()})
    write(path / "tear_downs", test_it=TEAR_DOWNS)
    (path / "alone").mkdir()
    write(path / "alone" / "package", __init__="", test_alone=ALONE)
    directories = ("alone", "one", "two", "ordinary", "tear_downs", "scopes")
    options = ("--doctest-modules", "--ignore-glob=*/conftest.py")  # several modules of one name
    return run_pytest(path, *directories, *options, LOCKSTEP_LEASES="/nowhere/to/be/found")


def notes(run: Run, name: str) -> list[str]:
    return (run.path / f"{name}.txt").read_text().splitlines()


# Fixtures


@pytest.mark.parametrize("rank", [0, 1])
def test_fixtures_of_all_scopes_live_once_a_rank_as_long_as_they_should(run: Run, rank: int) -> None:
    names = re.findall(r"def (test_\w+)", FIRST + SECOND)
    assert {run.outcome(name) for name in names} == {"passed"}
    assert notes(run, f"rank-{rank}-of-2") == [
        *("session up", "package up", "pkg.test_first up", "a", "class up", "b", "c", "class down"),
        *("pkg.test_first down", "pkg.test_second up", "d", "pkg.test_second down"),
        *("package down", "session down"),
    ]


def test_fixtures_of_another_world_and_of_the_controller_keep_their_own_time(run: Run) -> None:
    first, last = ["session up", "package up", "pkg.test_first up"], ["pkg.test_first down", "package down"]
    assert notes(run, "rank-0-of-1") == [*first, "other", *last, "session down"]
    assert notes(run, "controller") == ["up", "down"]


def test_a_tear_down_that_fails_on_ranks_and_one_in_the_controller_are_both_told(run: Run) -> None:
    errors = [line for line in run.output.splitlines() if line.startswith("ERROR ")]
    assert errors == [
        "ERROR tear_downs/test_it.py::test_narrow - rank 0: KeyError: 'narrow'",
        "ERROR tear_downs/test_it.py::test_narrow - ValueError: wide",
    ]


@pytest.mark.parametrize("name", ["one", "two"])
def test_conftests_of_several_directories_named_on_the_command_line_are_found(run: Run, name: str) -> None:
    assert run.outcome(f"test_{name}") == "passed"


def test_a_directory_that_pytest_puts_first_for_a_package_is_not_left_by_a_test(run: Run) -> None:
    assert run.outcome("test_alone") == "passed"
    assert "left behind sys path" not in run.output


# What passes and what skips


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
def test_what_pytest_offers_works_on_ranks(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skip", "marked"),
        ("test_skipif", "wrong machine"),
        ("test_skip_by_hook", "hook"),
        ("test_importorskip", "could not import 'no_such_module': No module named 'no_such_module'"),
    ],
)
def test_a_skip_keeps_its_reason(run: Run, name: str, reason: str) -> None:
    assert run.outcome(name) == f"skipped: {reason}"


def test_a_module_that_skips_itself_is_skipped_once(run: Run) -> None:
    assert run.output.count("test_absent.py:3: could not import 'no_such_module'") == 1


def test_a_warning_of_all_ranks_appears_once_with_its_category_and_line(run: Run) -> None:
    assert len(re.findall(r"test_ordinary\.py:\d+: DeprecationWarning: seen by all", run.output)) == 1
    assert run.output.count("OwnWarning: seen by one") == 1
    assert run.count() == "32 passed, 6 skipped, 2 warnings, 2 errors"


def test_properties_of_all_ranks_are_recorded_equal_ones_once(run: Run) -> None:
    nodes = run.cases["test_properties"].iter("property")
    assert sorted((node.get("name"), node.get("value")) for node in nodes) == [
        ("hook", "True"),
        ("loss", "tensor(0.5000)"),
        ("rank", "is 0"),
        ("rank", "is 1"),
        ("same", "1"),
    ]


@pytest.mark.parametrize("name", ["test_unbound_on_a_rank", "test_unbound_in_the_controller"])
def test_without_a_bound_no_lease_is_kept_and_nothing_of_it_is_imported(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"
