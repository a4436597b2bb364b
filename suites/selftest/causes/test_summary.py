"""The summary of a run: subtests are counted, failures are grouped by cause."""

from __future__ import annotations

import re

import pytest

from lockstep.features.causes.causes import Ran, cause_of, narrow
from lockstep.features.causes.summary import Cause, Failed, lines
from suites.selftest.project import PROJECTS, Project, line_of

FILE = PROJECTS / "many_failures" / "test_many.py"


@pytest.fixture(scope="module")
def output(shared_project: Project) -> list[str]:
    shared_project.copy("many_failures")
    return shared_project.run("--tb=short").splitlines()


def test_subtests_are_counted(output: list[str]) -> None:
    counts = re.sub(r" in .*|=", "", output[-1]).strip()
    assert counts == "10 failed, 2 passed, 4 subtests passed"


def test_failures_are_grouped_by_cause_below_all_else(output: list[str]) -> None:
    summary = output[output.index("9 failures, 4 causes:") : -1]
    check, bad = line_of("assert value", FILE), line_of("raise ValueError", FILE)
    options = "-p no:cacheprovider -p lockstep.plugin"
    rerun = f"pytest test_many.py::test_cases {options} --subtest"
    assert summary[1:7] == [
        f"    4 at test_many.py:{check}: AssertionError: value of N at ID",
        f"      one of them: {rerun} lr=2,size=1",
        f"      all of them: pytest test_many.py {options} (and 11 more)",
        f"    2 at test_many.py:{bad}: ValueError: bad shape [...]",
        f"      one of them: {rerun} lr=0,size=3",
        f"      all of them: pytest test_many.py::test_cases --subtest size=3 {options} (and 1 more)",
    ]
    assert summary[7] == f"    2 at test_many.py:{line_of('raise KeyError', FILE)}: KeyError: N"
    assert summary[9] == "      all of them: pytest test_many.py::test_plain -k bf16"
    assert summary[10].endswith("No such file or directory: '.../state.pt'")
    assert len(summary) == 12


def test_commands_are_of_the_directory_where_pytest_was_started(project: Project) -> None:
    (project.path / "deep").mkdir()
    project.write_ini("")
    tests = "import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): assert n < 0\n"
    (project.path / "test_plain.py").write_text(f"{tests}def test_a(): pass\n")
    output = project.start("..", cwd="deep").communicate(timeout=300)[0]
    assert "      one of them: pytest '../test_plain.py::test_b[1]'\n" in output
    assert "      all of them: pytest ../test_plain.py::test_b\n" in output


def test_tests_that_could_not_start_are_run_again_with_their_options(project: Project) -> None:
    project.write("def test_a(world): pass\ndef test_b(world): pass\n")
    output = project.run("-o", "ranks_at_once=1")
    options = "-o ranks_at_once=1 -p no:cacheprovider -p lockstep.plugin"
    assert f"      one of them: pytest test_sample.py::test_a {options}\n" in output
    assert f"      all of them: pytest test_sample.py {options}\n" in output


def test_one_cause_for_each_failure_is_no_news(project: Project) -> None:
    project.write("def test_a(world): assert 0\ndef test_b(world): assert not world\n")
    assert "cause" not in project.run()


def ran(*names: str, case: str = "", marks: tuple[str, ...] = ()) -> list[Ran]:
    return [Ran(name, case, frozenset(marks)) for name in names]


def test_a_cause_is_narrowed_to_what_its_failures_share_and_others_lack() -> None:
    slow = ran("t/a.py::A::test_1[bf16-2-ranks]", "t/a.py::B::test_2[bf16]", marks=("slow",))
    quick = ran("t/a.py::A::test_1[fp32-2-ranks]", "t/b.py::test_3[bf16]")
    assert narrow(slow, slow + quick).arguments == ("t/a.py", "-m", "slow")
    assert narrow(slow[:1] + quick[:1], slow + quick).arguments == ("t/a.py::A::test_1",)
    assert narrow(slow + quick[1:], slow + quick).arguments == ("t", "-k", "bf16")
    assert narrow(quick, slow + quick).num_selected == 4
    assert narrow(ran("t/a.py::test_1", "u/a.py::test_1"), slow).arguments == ()


def test_a_command_names_what_is_above_a_failure_as_the_command_line_did() -> None:
    (test,) = ran("t/a/test_b.py::test_1")
    of_module = Failed(test, "pkg.a.test_b::test_1", is_module=True)
    assert of_module.command_of("t/a/test_b.py::test_1") == ["--pyargs", "pkg.a.test_b::test_1"]
    assert of_module.command_of("t/a") == ["--pyargs", "pkg.a"]
    assert of_module.command_of("t") == ["--pyargs", "pkg"]
    of_file = Failed(test, "a/test_b.py::test_1", is_module=False)  # pytest was started in t
    assert of_file.command_of("t/a") == ["a"]
    assert of_file.command_of("t") == []


def test_the_most_frequent_causes_are_shown_with_one_command_for_all_if_there_is_one() -> None:
    tests = ran("test_a.py::test_1", "test_a.py::test_2", "b/test_b.py::test_3", "test_c.py::test_4")
    failed = [Failed(each, each.nodeid, is_module=False) for each in tests]
    causes = [
        Cause("test_a.py:7", "ValueError", failed[:2], "python -m pytest -- test_a.py::test_1 -x", ("-x",)),
        Cause("", "OSError", failed[2:], "pytest b/test_b.py::test_3"),
        Cause("", "KeyError", failed[2:3], "pytest b/test_b.py::test_3"),
    ]
    shown = [
        "    2 at test_a.py:7: ValueError",
        "      one of them: python -m pytest -- test_a.py::test_1 -x",
        "      all of them: python -m pytest -- test_a.py -x",
        "    2: OSError",
        "      one of them: pytest b/test_b.py::test_3",
    ]
    end = ["      and 1 cause more: --causes=all"]
    assert [*lines(causes, tests, 2)] == ["", "5 failures, 3 causes:", *shown, *end]
    others = [*shown, "    1: KeyError", "      one of them: pytest b/test_b.py::test_3"]
    assert [*lines(causes, tests, None)] == ["", "5 failures, 3 causes:", *others]


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            "ValueError: torch.Size([2, 3]) is not (4,)",
            "ValueError: torch.Size([...]) is not (...)",
        ),
        ("AssertionError: assert tensor([1., 2.]) is None", "AssertionError: assert tensor(...) is None"),
        ("OSError: no '/tmp/pytest-of-me/pytest-3/test_a0/state.pt'", "OSError: no '.../state.pt'"),
        ("KeyError: 'layers.11.weight'", "KeyError: 'layers.N.weight'"),
        ("AssertionError: off by 1e-05 at 0x7f12ab", "AssertionError: off by N at ID"),
        (
            "AssertionError: mlp.0.weight: Mismatched elements: 3 / 8; Greatest absolute difference: 2.0",
            "AssertionError: NAME: Mismatched elements: N / N",
        ),
    ],
)
def test_numbers_shapes_and_folders_are_left_out(message: str, what: str) -> None:
    kind = message.partition(":")[0]
    assert cause_of(f"E   {message}\nmine/engine.py:7: {kind}") == ("mine/engine.py:7", what)


def test_the_first_exception_of_a_chain_is_the_cause() -> None:
    text = (
        "a.py:3: in load\nE   ValueError: no key\n\n"
        "The above exception was the direct cause of the following exception:\n"
        "b.py:9: in step\nE   RuntimeError: step failed\n"
    )
    assert cause_of(text) == ("a.py:3", "ValueError: no key")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("all 2 ranks failed, with the same message; this is rank 1's\n[XPASS(strict)]", "[XPASS(strict)]"),
        ("rank 1 of 2 failed\nrank 0: passed\nfaults.kill() never struck", "faults.kill() never struck"),
        ("rank 0 of 2 died: SIGABRT (`x` failed)\nrank 1: passed", "rank N of N died: SIGABRT (`x` failed)"),
        (
            "all 2 ranks died: SIGKILL, with the same last output; this is rank 1's",
            "all N ranks died: SIGKILL",
        ),
    ],
)
def test_the_first_line_of_a_report_is_no_cause_where_another_says_more(text: str, what: str) -> None:
    assert cause_of(f"{text}\n------ re-run (seed 0) ------\npytest test_x.py") == ("", what)


def test_tracebacks_of_python_are_read_too() -> None:
    text = 'Traceback (most recent call last):\n  File "a.py", line 3, in load\n    x\nValueError: no key 3\n'
    assert cause_of(text) == ("a.py:3", "ValueError: no key N")
