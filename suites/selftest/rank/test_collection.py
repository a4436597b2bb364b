"""The items of a file that a rank makes: those of the functions that the run has selected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import RunItem
from lockstep.rank import collection as module
from lockstep.rank.collection import RankCollection, argument_of
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


# Without a session


class Collected:
    """A session that collects items of one file, and says what it was asked for."""

    def __init__(self, collection: RankCollection, *nodeids: str, rootdir: str = "/root") -> None:
        self.collection = collection
        self.asked: list[Any] = []
        self.items = [SimpleNamespace(nodeid=nodeid) for nodeid in nodeids]
        self.config = SimpleNamespace(rootpath=Path(rootdir))
        self.error: BaseException | None = None
        self.reports: list[Any] = []

    def perform_collect(self, args: list[str]) -> list[Any]:
        self.asked.append((*args, self.collection._argument, self.collection._functions))
        for report in self.reports:
            self.collection.pytest_collectreport(report)
        if self.error is not None:
            raise self.error
        return self.items


@pytest.fixture
def collection() -> RankCollection:
    return RankCollection("/root")


def test_a_file_is_collected_once(collection: RankCollection) -> None:
    session: Any = Collected(collection, "a.py::x", "a.py::y")
    functions = frozenset({"x"})
    found = collection.find(session, "a.py::x", "/out/a.py", functions)
    assert found is session.items[0]
    assert collection.find(session, "a.py::y", "/out/a.py", None) is session.items[1]
    assert collection.find(session, "a.py::z", "/out/a.py", None) is None
    assert session.asked == [("/out/a.py", Path("/out"), functions)]
    assert (collection._functions, collection.errors) == (None, {"/out/a.py": ""})
    other: Any = Collected(collection, "a.py::x")
    assert collection.find(other, "a.py::x", "/other/a.py", None) is other.items[0]
    assert collection.find(session, "a.py::x", "/out/a.py", None) is session.items[0]


def test_a_file_that_raises_says_so_and_is_not_collected_again(collection: RankCollection) -> None:
    session: Any = Collected(collection)
    session.error = pytest.UsageError("exit")
    for _ in range(2):
        assert collection.find(session, "a.py::x", "/a.py", frozenset()) is None
    assert (collection.errors, len(session.asked)) == ({"/a.py": "exit"}, 1)
    assert collection._functions is None
    session.reports = [SimpleNamespace(failed=True, longreprtext="broken")]
    collection.find(session, "b.py::x", "/b.py", None)
    assert collection.errors["/b.py"] == "broken"


def test_the_first_reason_why_a_file_has_fewer_items_stays(collection: RankCollection) -> None:
    def report(text: str, failed: bool = False, skipped: bool = False, longrepr: object = "") -> Any:
        return SimpleNamespace(failed=failed, skipped=skipped, longreprtext=text, longrepr=longrepr)

    collection.pytest_collectreport(report("of no file", failed=True))
    assert collection.errors == {}
    collection.errors = {"/a.py": "", "/b.py": ""}
    collection.pytest_collectreport(report("passed"))
    assert collection.errors == {"/a.py": "", "/b.py": ""}
    collection.pytest_collectreport(report("", skipped=True, longrepr=("b.py", 3, "no GPU")))
    skipped = "this rank skipped /b.py at import and others did not (no GPU)"
    assert collection.errors == {"/a.py": "", "/b.py": skipped}
    collection.pytest_collectreport(report("later", failed=True))
    assert collection.errors["/b.py"] == skipped
    collection.errors["/c.py"] = ""
    collection.pytest_collectreport(report("in words", skipped=True))
    assert collection.errors["/c.py"].endswith("and others did not (in words)")


def test_an_item_that_a_rank_has_not_found_is_a_failure_with_the_reason(collection: RankCollection) -> None:
    order = RunItem("a.py::C::x[1]", "/root/a.py", None, "")
    collection.errors = {"/root/a.py": "broken"}
    elsewhere: Any = Collected(collection, rootdir="/root/sub")
    here: Any = Collected(collection)
    report = collection.report_missing(order, elsewhere)
    assert (report.nodeid, report.when, report.outcome) == ("a.py::C::x[1]", "setup", "failed")
    assert (report.location, report.longrepr) == (("a.py", None, "C.x[1]"), "broken")
    collection.errors = {"/root/a.py": ""}
    assert collection.report_missing(order, elsewhere).longrepr == (
        "this rank has the rootdir /root/sub, where the pytest that you started has /root, so that its node "
        "ids are others: give it with --rootdir=/root"
    )
    text = str(collection.report_missing(order, here).longrepr)
    assert text.startswith("this rank collected /root/a.py and did not find a.py::C::x[1] in it. The items")


def test_items_are_made_of_functions_that_are_selected(collection: RankCollection) -> None:
    asked: list[Any] = []

    def is_function(obj: object, name: str) -> bool:
        asked.append((obj, name))
        return callable(obj)

    collector: Any = SimpleNamespace(istestfunction=is_function)
    make = collection.pytest_pycollect_makeitem
    assert make(collector, "test_a", print) is None
    collection._functions = frozenset({"test_a"})
    assert make(collector, "test_a", print) is None
    assert make(collector, "TestA", type) is None
    assert asked == []
    assert make(collector, "test_b", print) == []
    assert make(collector, "test_b", 3) is None
    assert asked == [(print, "test_b"), (3, "test_b")]


def drive(hook: Any, result: object = None) -> object:
    """Run a wrapper of a hook around one that returns `result`."""
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(result)
    return end.value.value


def test_directories_and_conftests_outlast_the_collection_of_a_file(
    collection: RankCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent: Any = object()
    other: Any = object()
    directory = collection.pytest_collect_directory
    assert drive(directory(Path("/a"), parent), "first") == "first"
    assert drive(directory(Path("/a"), parent), "second") == "first"
    assert drive(directory(Path("/a"), other), "third") == "third"
    assert drive(directory(Path("/b"), parent), "fourth") == "fourth"
    waiting = {"a": 1}
    monkeypatch.setattr(module, "waiting_conftests", lambda session: waiting)
    finish = collection.pytest_collection_finish(other)
    next(finish)
    waiting.clear()
    waiting["b"] = 2
    with pytest.raises(StopIteration):
        next(finish)
    assert waiting == {"a": 1, "b": 2}


def test_the_argument_of_a_file_is_that_of_the_session(
    collection: RankCollection, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(module, "set_argument", lambda *given: said.append(given))
    collection._argument = Path("/a")
    assert drive(collection.pytest_make_collect_report(request.session), "report") == "report"
    assert drive(collection.pytest_make_collect_report(request.node.parent), "report") == "report"
    assert said == [(request.session, Path("/a"))]


@pytest.mark.parametrize(
    ("nodeid", "path", "argument"),
    [
        ("a.py::x", "/out/a.py", "/out"),
        ("sub/a.py::x", "/out/sub/a.py", "/out"),
        ("a.py::x/b.py", "/out/a.py", "/out"),
        ("::x", "/out/a.py", "/out/a.py"),
        ("other.py::x", "/out/a.py", "/out/a.py"),
    ],
)
def test_a_node_id_begins_below_an_argument(nodeid: str, path: str, argument: str) -> None:
    assert argument_of(nodeid, path) == Path(argument)
