"""Items of layouts: their names and ranks, which run, which are skipped, and the line at the end."""

from __future__ import annotations

import pytest

from suites.selftest.project import Project

TESTS = """
import pytest

def test_plan(layout, world):
    assert world.size == 2 * layout["cp"] * layout["tp"] // 2 * layout["dp"]
    assert layout["cp"] == 1

def test_other(layout):
    assert layout.mesh.mesh_dim_names == layout.large
"""
HEADER = "import pytest\npytestmark = pytest.mark.layouts(dp=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)\n"


def write(project: Project, tests: str) -> None:
    (project.path / "test_sample.py").write_text(tests)
    project.write_ini("")


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    write(shared_project, HEADER + TESTS)
    return shared_project.run("-v", "-rs")


def test_items_are_named_after_their_layouts_smallest_first(output: str) -> None:
    run = [
        line.split()[0].rpartition("::")[2]
        for line in output.splitlines()
        if line.startswith("test_sample.py::")
    ]
    names = ["dp2", "cp2", "tp2", "dp2-cp2", "dp2-tp2", "cp2-tp2"]
    assert run == [f"{test}[{name}]" for test in ("test_plan", "test_other") for name in names]


def test_a_layout_that_contains_a_failed_one_is_skipped(output: str) -> None:
    assert "9 passed, 2 skipped" in output
    assert "1 failed" in output
    assert output.count("contains cp2, which failed") >= 1
    assert "test_sample.py::test_plan[cp2-tp2] SKIPPED" in output


def test_the_end_says_how_many_layouts_held(output: str) -> None:
    lines = output.splitlines()
    assert "layouts of test_sample.py::test_plan: 3 of 6 held, 1 failed, cp2 the smallest, 2 not run" in lines
    assert "layouts of test_sample.py::test_other: 6 of 6 held" in lines


def test_options_select_layouts_and_run_all(project: Project) -> None:
    write(project, HEADER + TESTS)
    output = project.run("--layouts", "tp2*, cp2*", "--all-layouts", "-k", "plan")
    assert "1 passed" in output
    assert "2 failed" in output
    assert "contains" not in output
    assert "pytest test_sample.py::test_plan[cp2-tp2]" in output.replace("'", "")


def test_the_line_at_the_end_is_there_for_a_single_layout_that_was_selected(project: Project) -> None:
    write(project, HEADER + TESTS)
    output = project.run("--layouts", "tp2", "-k", "plan")
    assert "layouts of test_sample.py::test_plan: 1 of 1 held" in output.splitlines()


LEAK = """
import pytest

class Plan:
    used = []

@pytest.mark.layouts(dp=(1, 2), tp=(1, 2), at_most=2, both_orders=True)
def test_plan(layout):
    Plan.used += [axis for axis in ("dp", "tp") if layout[axis] > 1]
    assert Plan.used[:2] != ["dp", "tp"]{also}
"""


def test_both_orders_show_what_one_layout_leaves_to_the_next(project: Project) -> None:
    write(project, LEAK.format(also=" or len(Plan.used) > 2"))
    output = project.run("-v")
    run = [line.split()[0] for line in output.splitlines() if line.startswith("test_sample.py::")]
    names = ["dp2", "tp2", "tp2-again", "dp2-again"]
    assert run == [f"test_sample.py::test_plan[{name}]" for name in names]
    line = "layouts of test_sample.py::test_plan: 3 of 4 held, 1 failed, tp2 the smallest; "
    assert line + "tp2 in one order alone: another layout leaves state in the process" in output.splitlines()


WRONG = {
    "unmarked": (
        "def test_x(layout):\n    pass\n",
        "the fixture `layout` exists only in layouts: mark the test with",
    ),
    "ranks": (
        "@pytest.mark.ranks(2)\n@pytest.mark.layouts(dp=(1, 2))\ndef test_x(layout):\n    pass\n",
        "layouts: a layout says on how many ranks the test runs; remove the mark `ranks`",
    ),
    "orders": (
        "@pytest.mark.layouts(dp=(1, 2), both_orders=True, fresh=True)\ndef test_x(layout):\n    pass\n",
        "layouts(both_orders=True): True or False, and not with fresh=True: new processes have no state of",
    ),
    "place": (
        "@pytest.mark.layouts(dp=(1, 2), backend='fake', as_rank=(0, 1))\ndef test_x(layout):\n    pass\n",
        "layouts(as_rank=(0, 1)): one rank, which each layout runs as",
    ),
    "sizes": (
        "@pytest.mark.layouts(dp=2)\ndef test_x(layout):\n    pass\n",
        "layouts(dp=2): no option of this name, nor sizes of an axis, which are a tuple of different whole "
        "numbers from 1 on, dp=(2,): write layouts(dp=(1, 2), tp=(1, 2), at_most=8)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mark_is_refused_at_collection(project: Project, name: str) -> None:
    tests, message = WRONG[name]
    write(project, f"import pytest\n{tests}")
    output = project.run()
    assert message in output
    assert "During handling" not in output


def test_a_project_keeps_its_own_fixture_layout(project: Project) -> None:
    own = "@pytest.fixture\ndef layout():\n    return 1\ndef test_x(layout):\n    assert layout == 1\n"
    write(project, f"import pytest\n{own}")
    assert "1 passed" in project.run()
