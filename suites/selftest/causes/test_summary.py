"""The summary of a run: subtests are counted, failures are grouped by cause."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.causes.causes import LONGEST_MESSAGE, Ran, cause_of, narrow
from lockstep.features.causes.summary import Cause, Failed, Summary, lines
from lockstep.reporting.pytest_internals import ReprFileLocation
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
    output = project.run("..", cwd="deep")
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


def test_a_line_that_ends_in_a_colon_takes_the_next_with_it() -> None:
    first, second = "AssertionError: dp2 is not the unsharded model (step 0):", "gradient lacks a sum over dp"
    what = "AssertionError: dpN is not the unsharded model (step N):"
    end = "a.py:14: AssertionError"
    text = f"E   {first}\nE     {second}\nE     and more\n\n{end}"
    assert cause_of(text) == ("a.py:14", f"{what} {second}")
    assert cause_of(f"E   {first}\n\n{end}") == ("a.py:14", what)
    assert cause_of(f"rank 1 of 2 failed\nrank 0: passed\n{first}\n  {second}") == ("", f"{what} {second}")


def test_a_message_of_one_long_word_is_read_once() -> None:
    _, what = cause_of(f"E   ValueError: {'x' * 10**6}\na.py:7: ValueError")
    assert what == f"ValueError: {'x' * 10**6}"[:LONGEST_MESSAGE] + " ..."


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


class Shown(str):
    """A text of a failure whose line pytest knows."""

    reprcrash: ReprFileLocation


def report(name: str, text: str = "", *, outcome: str = "failed", **fields: Any) -> pytest.TestReport:
    given: Any = outcome
    return pytest.TestReport(name, ("a.py", 1, name), {}, given, text or None, **{"when": "call", **fields})


def summed_up(
    stats: dict[str, list[Any]], causes: str = "auto", verbose: int = 0, subtest: tuple[str, ...] = ()
) -> list[str]:
    """Return what the end of a run says, of a run that was started in /base/t, with the rootdir /base."""
    options = {"ranks_causes": causes, "subtest": [*subtest]}
    config: Any = SimpleNamespace(
        getini=lambda name: ["slow: takes long", "zone(n): in one", "ranks(n): on ranks", "skipif(why)"],
        getoption=options.get,
        option=SimpleNamespace(verbose=verbose),
        rootpath=Path("/base"),
        invocation_params=SimpleNamespace(dir=Path("/base/t")),
    )
    written: list[str] = []
    reporter: Any = SimpleNamespace(stats=stats, write_line=written.append)
    running = Summary(config).pytest_terminal_summary(reporter)
    next(running)
    with pytest.raises(StopIteration) as end:
        running.send("result")
    assert end.value.value == "result"
    return written


ERROR = "E   ValueError: no\na.py:7: ValueError"


def test_causes_are_shown_where_they_are_fewer_than_failures_or_asked_for() -> None:
    one, two = report("t/a.py::test_1", ERROR), report("t/a.py::test_2", ERROR)
    in_setup = report("t/a.py::test_3", ERROR, when="setup")
    good = report("t/b.py::test_4", outcome="passed")
    stats = {
        "failed": [one, two],
        "error": [in_setup],
        "passed": [good],
    }
    shown = [
        "",
        "3 failures, 2 causes:",
        "    2 at a.py:7: ValueError: no",
        "      one of them: pytest a.py::test_1",
        "      all of them: pytest a.py (and 1 more)",
        "    1 at a.py:7: ValueError: no (in setup)",
        "      one of them: pytest a.py::test_3",
    ]
    assert summed_up(stats) == shown
    assert summed_up(stats, verbose=-1) == shown
    assert summed_up(stats, verbose=-2) == summed_up(stats, "no") == []
    alone: dict[str, list[Any]] = {"failed": [one], "error": [pytest.CollectReport("x", "failed", "x", None)]}
    assert summed_up(alone) == []
    assert summed_up(alone, "all")[1] == "1 failure, 1 cause:"
    many = [report(f"t/a.py::test_{number}", f"E   {'x' * (number // 2 + 1)}") for number in range(22)]
    assert summed_up({"failed": many})[-1] == "      and 1 cause more: --causes=all"
    assert len(summed_up({"failed": many}, "all")) == 2 + 11 * 3


def test_a_test_that_failed_for_its_subtests_alone_is_no_failure_of_the_summary() -> None:
    line = "[gw1] linux -- Python 3.12 /usr/bin/python\n"
    cases = [report("t/a.py::test_1", f"{line}{ERROR}") for _ in range(2)]
    for number, case in enumerate(cases):
        case.context = SimpleNamespace(msg=f"n={number}")
    total = report("t/a.py::test_1", f"{line}contains 2 failed subtests")
    shown = summed_up({"failed": [*cases, total]})
    assert shown[1:3] == ["2 failures, 1 cause:", "    2 at a.py:7: ValueError: no"]
    assert shown[-1] == "      all of them: pytest a.py::test_1"


def test_marks_of_the_project_narrow_a_run_and_marks_of_all_tests_do_not() -> None:
    marked = {"ranks": 1, "zone": 1, "skipif": 1, "test_1": 1}
    bad = [report(f"t/{name}::test_1", ERROR) for name in ("a.py", "b.py")]
    good = report("t/c.py::test_1", outcome="passed")
    for each in bad:
        each.keywords = {**marked}
    good.keywords = {"skipif": 1}
    shown = summed_up({"failed": bad, "passed": [good], "": ["no report"]})
    assert shown[-1] == "      all of them: pytest -m zone"


def test_a_failure_without_a_traceback_has_the_line_that_pytest_knows() -> None:
    def where(path: str) -> str:
        text = Shown("E   ValueError: no")
        text.reprcrash = ReprFileLocation(path, 3, "no")
        return summed_up({"failed": [report("t/a.py::test_1", text)]}, "all")[2]

    assert where("/base/t/a.py") == "    1 at a.py:3: ValueError: no"
    assert where("/base/a.py") == "    1 at /base/a.py:3: ValueError: no"
    assert where("/x/site-packages/a.py") == "    1: ValueError: no"


def test_the_command_of_a_failure_on_ranks_keeps_its_options_and_the_choice_of_the_user() -> None:
    found = []
    for number in (1, 2):
        words = f"torchrun -- --pyargs pkg.a::test_1 --subtest n={number} -x"
        properties = [("rerun", words), (7, "not a name")]
        found.append(report("t/a.py::test_1", ERROR, user_properties=properties))
        found[-1].context = SimpleNamespace(msg=f"n={number}, m=1")
    shown = summed_up({"failed": found}, subtest=("m=1",))
    assert shown[-2:] == [
        "      one of them: torchrun -- --pyargs pkg.a::test_1 --subtest n=1 -x",
        "      all of them: torchrun -- --pyargs pkg.a::test_1 -x --subtest m=1",
    ]
