"""Worlds of the backend fake: items, reports and options, and one process that stands for many ranks."""

from __future__ import annotations

import shlex
from pathlib import Path

from suites.selftest.project import Run, copy_project, run_pytest

PROJECT = "fake"
OPTIONS = ("test_worlds.py", "-rP", "--rank-output-dir=output")


def test_each_rank_is_an_item_of_its_own(run: Run) -> None:
    assert [name for name in run.cases if "default" in name or "named" in name] == [
        *(f"test_default[rank-{rank}]" for rank in ("0-of-8", "7-of-8", "0-of-1024", "1023-of-1024")),
        *(f"test_named[{number}-rank-{rank}-of-1024]" for number in (1, 2) for rank in (0, 511, 1023)),
    ]
    assert all(run.outcome(name) == "passed" for name in run.cases if "default" in name or "named" in name)
    assert "seen by 1023 of 1024" in run.output


def test_a_failure_names_the_rank_and_how_to_run_it_again(run: Run) -> None:
    assert run.outcome("test_fails_on_one[rank-0-of-1024]") == "passed"
    text = run.failure("test_fails_on_one[rank-511-of-1024]")
    assert text.splitlines()[0] == "rank 511 of 1024 (fake) failed"
    line = next(line for line in text.splitlines() if line.startswith("pytest "))
    assert line.startswith("pytest 'test_worlds.py::test_fails_on_one[rank-511-of-1024]'")
    again = run_pytest(run.path, *shlex.split(line)[1:])
    assert again.count() == "1 failed"


def test_a_value_of_a_peer_is_refused_with_the_reason(run: Run) -> None:
    text = run.failure("test_reads")
    assert "FakeValueError: this value comes from all_reduce at test_worlds.py:" in text
    assert "the test runs as rank 511 of 1024 in a fake world, where no other rank exists" in text


def test_a_death_is_that_of_the_rank_it_stood_for(run: Run) -> None:
    assert run.failure("test_dies").splitlines()[0].startswith("rank 511 of 1024 (fake) exited with code 3")


def test_cases_run_after_a_failed_one_as_the_same_rank(run: Run) -> None:
    texts = [child.text or "" for child in run.case("test_cases") if child.tag == "failure"]
    assert texts[0].startswith("rank 3 of 4 (fake) failed")
    assert texts[1:] == ["contains 1 failed subtest"]


def test_what_a_rank_leaves_and_prints_carries_its_number(run: Run) -> None:
    assert "rank 2: the test left behind 1 process group(s)" in run.output
    kept = run.path / "output" / "test_worlds.py" / "test_default[rank-7-of-8]" / "rank-7.stdout"
    assert kept.read_text() == "seen by 7 of 8\n"


def test_a_class_of_unittest_stands_for_one_rank(run: Run) -> None:
    passed, refused = run.cases["test_rank"]
    assert list(passed) == []
    assert "give one size and one rank here: ranks(8, backend='fake', as_rank=0)" in (refused[0].text or "")


def test_a_mark_of_one_parameter_is_refused(run: Run) -> None:
    refused = [name for name in run.cases if name.startswith("test_marked_late")]
    assert len(refused) == 4
    assert all("its items are made before that is known" in run.failure(name, "error") for name in refused)


def test_the_option_runs_what_needs_no_values(tmp_path: Path) -> None:
    run = run_pytest(copy_project("fake", tmp_path), "test_claims.py", "--backend=fake")
    skipped = (
        "skipped: the test needs that a rank receives what the others have sent, which fake does not offer"
    )
    own_group = "skipped: the test makes its own group (group=False), and a fake world has one"
    assert {name: run.outcome(name) for name in run.cases} == {
        "test_makes_its_group[rank-0-of-2]": own_group,
        "test_makes_its_group[rank-1-of-2]": own_group,
        "test_needs_nothing[rank-0-of-2]": "passed",
        "test_needs_nothing[rank-1-of-2]": "passed",
        "test_needs_values[rank-0-of-2]": skipped,
        "test_needs_values[rank-1-of-2]": skipped,
        "test_property[rank-0-of-3]": "passed",
        "test_property[rank-2-of-3]": "passed",
        "test_unmarked": "passed",
        "test_values_of_unittest": skipped,
    }


def test_selection_and_distribution_work_as_ever(tmp_path: Path) -> None:
    path = copy_project("fake", tmp_path)
    chosen = ("-k", "test_fails_on_one or test_default")
    assert run_pytest(path, "test_worlds.py", *chosen, "-n2").count() == "1 failed, 5 passed"
    assert run_pytest(path, "test_worlds.py", "--lf").count() == "1 failed, 21 deselected"
