"""`--skew` and the mark `skew`: what they find, and what they leave alone."""

from __future__ import annotations

import re

import pytest
import torch

from lockstep.features.injection.schedule import Schedule
from lockstep.features.injection.skew import poison
from suites.selftest.project import PROJECTS, WITHOUT_PLUGINS, Project, Run, copy_project, line_of, run_pytest

FILE = PROJECTS / "skew" / "test_skew.py"
ON_EACH = pytest.mark.parametrize("backend", ["gloo", "shm"])


def run_file(factory: pytest.TempPathFactory, *args: str) -> Run:
    path = copy_project("skew", factory.mktemp("skew"))
    (path / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore::FutureWarning\n")
    return run_pytest(path, *args, **WITHOUT_PLUGINS)


@pytest.fixture(scope="module")
def option(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the option."""
    return run_file(tmp_path_factory, "--skew", "7:2", "test_skew.py", "test_mark.py::test_wrong_mark")


@pytest.fixture(scope="module")
def mark(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of tests with the mark."""
    return run_file(tmp_path_factory, "test_mark.py")


@ON_EACH
def test_a_race_names_the_collective_and_both_lines(option: Run, backend: str) -> None:
    used = line_of("tensor.sum()", FILE)
    text = option.failure(f"test_output_read_early[{backend}]")
    assert f"all_reduce #1 (float32[3], 2 ranks), begun at test_skew.py:{used - 1}, was not waited" in text
    assert f"read its output at test_skew.py:{used}" in text
    assert "--skew 7:2" in text


EARLY = {
    "test_input_overwritten_early": "before `aten.zero_` wrote to its tensors",
    "test_input_overwritten_where_torch_does_not_see_it": "its input was overwritten (float32[3]) before it",
    "test_output_written_early": "its output was written to (int64[3]) before it was waited for",
    "test_memory_freed_early": "the memory of its input was freed (float32[3]) before it was waited for",
}


@ON_EACH
@pytest.mark.parametrize("name", EARLY)
def test_what_is_touched_early_fails(option: Run, name: str, backend: str) -> None:
    assert EARLY[name] in option.failure(f"{name}[{backend}]")


GOOD = (
    "test_output_read_early_on_purpose",
    "test_output_read_where_torch_does_not_see_it",
    "test_collectives_that_are_waited_for",
    "test_ddp",
)


@ON_EACH
@pytest.mark.parametrize("name", GOOD)
def test_collectives_that_are_waited_for_are_right(option: Run, name: str, backend: str) -> None:
    assert option.outcome(f"{name}[{backend}]") == "passed", option.output


def test_fsdp2_is_right_under_skew(option: Run) -> None:
    assert option.outcome("test_fsdp2") == "passed", option.output


def test_dtensor_may_compute_while_a_collective_is_in_flight(option: Run) -> None:
    assert option.outcome("test_dtensor_while_a_collective_is_in_flight") == "passed", option.output


def test_the_mark_runs_a_subtest_for_each_seed(mark: Run) -> None:
    for seed in (1, 2, 3):
        assert re.search(
            rf"^pytest test_mark.py::test_race .*--subtest skew={seed}$", mark.output, re.MULTILINE
        )
    assert "contains 3 failed subtests" in mark.output


def test_one_seed_of_a_mark_runs_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = run_file(tmp_path_factory, "test_mark.py::test_race", "--subtest", "skew=2")
    assert "contains 1 failed subtest" in run.output
    assert "test_race [skew=2]" in run.output


def test_nothing_is_disturbed_without_a_mark(mark: Run) -> None:
    assert mark.outcome("test_the_same_race_undisturbed") == "passed"


def test_a_marked_test_may_have_subtests(mark: Run) -> None:
    assert mark.outcome("test_with_subtests_of_its_own") == "passed"
    assert re.search(
        r"^pytest test_mark.py::test_race_in_a_case .*--subtest skew=4,value=2$", mark.output, re.M
    )


def test_a_wrong_mark_says_what_to_write(mark: Run, option: Run) -> None:
    for run in (mark, option):
        assert "skew(seeds=0): a number from 1 to 10000, or a list of" in run.failure("test_wrong_mark")


@pytest.mark.parametrize("text", ["x", "1:", "-1", "1:0", "1:x", "1:nan", "9" * 40, "9" * 5000])
def test_a_wrong_option_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"SEED|seed"):
        Schedule.parse(text)


@pytest.mark.parametrize(
    ("dtype", "filling"),
    [
        (torch.bool, True),
        (torch.uint8, 255),
        (torch.int64, 2**63 - 1),
        *((dtype, None) for dtype in (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)),
    ],
)
def test_the_output_of_a_collective_in_flight_is_poisoned(dtype: torch.dtype, filling: int | None) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    poison(tensor)
    if filling is None:
        assert tensor.to(torch.complex64).isnan().all()
    else:
        assert tensor.tolist() == [filling, filling]


def test_a_seed_always_draws_the_same_delays() -> None:
    points = [
        (rank, number, point) for rank in (0, 1) for number in range(50) for point in ("before", "after")
    ]
    drawn = [Schedule(3, 10).delay(*point) for point in points]
    assert drawn == [Schedule(3, 10).delay(*point) for point in points]
    assert drawn != [Schedule(4, 10).delay(*point) for point in points]
    assert 20 < sum(delay > 0 for delay in drawn) < 100
    assert max(drawn) <= 0.01


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--skew=1:nan"], "'1:nan': a seed is from 0 to 2**64 - 1, a delay above 0 and at most 60000"),
        (["--skew", "9" * 5000], f"'{'9' * 59}... (5002 characters): write SEED or SEED:MILLISECONDS"),
        (["--skew="], "'': write SEED or SEED:MILLISECONDS"),
    ],
    ids=["nan", "long", "empty"],
)
def test_a_schedule_that_is_none_is_refused(pytester: pytest.Pytester, args: list[str], message: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(f'--skew {message}')}"):
        pytester.parseconfigure(*args)


MARKS = {
    "seeds": ("seeds=10**9", "skew(seeds=1000000000): a number from 1 to 10000, or a list of at most"),
    "range": ("seeds=range(10**30)", "skew(seeds=range(0, 1"),
    "true": ("seeds=[True]", "skew(seeds=[True]): a number from 1 to 10000"),
    "ever": ('milliseconds=float("inf")', "skew(milliseconds=inf): above 0 and at most 60000"),
}


def test_a_mark_with_a_number_that_is_none_fails_its_test(project: Project) -> None:
    tests = [f"@pytest.mark.skew({mark})\ndef test_{name}(world): ...\n" for name, (mark, _) in MARKS.items()]
    project.write("\n".join(tests) + "\ndef test_sound(world): ...\n")
    output = project.run("--tb=short")
    assert [name for name, (_, message) in MARKS.items() if message not in output] == []
    assert "4 failed, 1 passed" in output or "1 passed, 4 failed" in output
