"""Messages that ranks agree on are shown once: failures, and warnings of what a test left behind."""

from __future__ import annotations

import pytest

from lockstep.reporting.differences import without_own_number
from suites.selftest.project import Project

TESTS = """
import os
import signal
import subprocess
import warnings

import pytest


def test_numbers(world):
    raise ValueError(f"rank {world.rank}: {object()} on cuda:{world.rank} is not {world.rank}")


def test_index():
    raise ValueError("at index (0, 1)")


@pytest.mark.xfail(strict=True)
def test_strict():
    pass


def test_deaths():
    os.kill(os.getpid(), signal.SIGKILL)


def test_values(world):
    assert [7, 8][world.rank] == 0


def test_leaks():
    subprocess.Popen(["sleep", "300"])


def test_warning():
    class Local(Warning):
        pass

    warnings.warn("of the test", Local)


def test_state_of_one(world):
    if world.rank == 1:
        os.environ["LEFT"] = "1"


def test_states_that_differ(world):
    os.environ[["EVEN", "ODD"][world.rank]] = "1"
"""


@pytest.fixture(scope="module")
def output(shared_project: Project) -> str:
    shared_project.write(TESTS)
    return shared_project.run()


def test_failures_that_differ_by_addresses_and_the_rank_are_shown_once(output: str) -> None:
    same = "all 2 ranks failed, with the same traceback but for the rank's own number; this is rank "
    assert output.count(same) == 1
    assert output.count("E       ValueError: rank ") == 1


def test_failures_that_name_one_index_on_all_ranks_are_shown_once(output: str) -> None:
    assert output.count("all 2 ranks failed, with the same traceback; this is rank ") == 1
    assert output.count("E       ValueError: at index (0, 1)") == 1


def test_failures_without_a_traceback_have_none_in_common(output: str) -> None:
    lines = output.splitlines()
    message = lines[lines.index("[XPASS(strict)]") - 1]
    assert message.startswith("all 2 ranks failed, with the same message; this is rank ")
    assert "all 2 ranks died: SIGKILL" in lines


def test_failures_with_other_values_are_shown_each(output: str) -> None:
    assert "rank 1: failed, see below" in output or "rank 0: failed, see below" in output
    assert "assert 7 == 0" in output
    assert "assert 8 == 0" in output


def test_a_leak_of_all_ranks_is_one_warning(output: str) -> None:
    (line,) = (line for line in output.splitlines() if "RankLeakWarning" in line)
    assert "RankLeakWarning: the test left behind process " in line
    assert line.endswith("(sleep 300), which was ended (rank 0; the others differ from it in numbers alone)")


def test_a_warning_whose_class_only_ranks_know_has_its_name(output: str) -> None:
    assert output.count("UserWarning: test_warning.<locals>.Local: of the test\n") == 1


def test_ranks_are_named_where_they_differ(output: str) -> None:
    warnings = output.partition("warnings summary")[2]
    assert "RankStateWarning: rank 1: the test left behind environ: LEFT\n" in warnings
    assert "RankStateWarning: rank 0: the test left behind environ: EVEN\n" in warnings
    assert "rank 1: the test left behind environ: ODD\n" in warnings
    assert warnings.count("RankStateWarning") == 2


@pytest.mark.parametrize(
    ("text", "differs"),
    [
        ("rank 1 has 1, on cuda:1", "rank <its rank> has <its rank>, on cuda:<its rank>"),
        ("rank1 wrote rank-1.txt.", "rank<its rank> wrote rank-<its rank>.txt."),
        ("11 of 1.5, -1, #1, torch.Size([1]), x1", "11 of 1.5, -1, #1, torch.Size([1]), x1"),
    ],
)
def test_the_own_number_of_a_rank_is_found_as_a_word(text: str, differs: str) -> None:
    assert without_own_number(text, 1) == differs
