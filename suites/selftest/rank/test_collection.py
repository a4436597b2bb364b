"""The items of a file that a rank makes: those of the functions that the run has selected."""

from __future__ import annotations

import pytest

from suites.selftest.project import Project

TESTS = """
def test_a(): pass

@pytest.mark.parametrize("x", [1, 2])
def test_b(x): pass

class TestC:
    __test__ = True  # so that it could be called, as a function is

    def test_a(self): pass
    def test_d(self): pass
"""
NOTED_ON_RANK_0 = """
import os, pathlib

def pytest_itemcollected(item):
    if os.environ.get("RANK") == "0":
        with pathlib.Path(item.config.rootpath, "made.txt").open("a") as file:
            print(item.name, file=file)
"""
OF_OTHER_NAMES = """
import pytest

def pytest_pycollect_makeitem(collector, name, obj):
    if name == "test_a" and isinstance(collector, pytest.Module):
        return pytest.Function.from_parent(collector, name="test_variant", callobj=obj)
"""


@pytest.mark.parametrize(
    ("selection", "made"),
    [
        (["-k", "test_b and 1"], ["test_b[1]", "test_b[2]"]),
        (["test_sample.py::TestC::test_d"], ["test_d"]),
        (["--deselect", "test_sample.py::TestC"], ["test_a", "test_b[1]", "test_b[2]", "test_a"]),
    ],
)
def test_a_rank_makes_no_items_of_functions_that_are_not_selected(
    project: Project, selection: list[str], made: list[str]
) -> None:
    (project.path / "conftest.py").write_text(NOTED_ON_RANK_0)
    project.write(TESTS)
    project.run(*selection)
    assert (project.path / "made.txt").read_text().split() == made


def test_a_rank_finds_an_item_that_a_plugin_has_named_otherwise(project: Project) -> None:
    (project.path / "conftest.py").write_text(OF_OTHER_NAMES)
    project.write(TESTS)
    assert "= 1 passed, 4 deselected in" in project.run("-k", "test_variant")


OF_TWO_VALUES = """
import pytest

@pytest.fixture(scope="module", params=[1, 2])
def value(request): return request.param

def test_a(value): pass
def test_b(value): pass
"""
STARTS_A_SESSION = """
class Order:
    def pytest_collection_finish(self, session):
        self.names = [item.name for item in session.items]

def test_outer(world, request):
    order = Order()
    assert pytest.main(["values.py", "-p", "no:terminal", "-p", "no:lockstep"], plugins=[order]) == 0
    assert order.names == ["test_a[1]", "test_b[1]", "test_a[2]", "test_b[2]"]
"""


def test_a_session_that_a_test_starts_sorts_items_as_pytest_does(project: Project) -> None:
    project.write(STARTS_A_SESSION)
    (project.path / "values.py").write_text(OF_TWO_VALUES)
    assert "= 1 passed in" in project.run("test_sample.py")


def test_the_first_test_of_a_file_has_its_own_deadline(project: Project) -> None:
    """To import the file takes none of it, and what hangs later does not hang in the import."""
    test = "@pytest.mark.ranks(2, timeout=2)\ndef test_hangs():\n    threading.Event().wait()\n"
    project.write(f"import threading\n{test}")
    assert "all 2 ranks timed out after 2 s, in wait at test_sample.py:6 in test_hangs" in project.run()
