"""Converted tests have the verdicts that their launcher gives them, on warm ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.port.module import port
from suites.selftest.project import PROJECTS, Run, run_pytest

INPUT = PROJECTS / "port" / "test_launched.py"

# Of the tests whose names are the same before and after. torch 2.13's own launchers say the same of each.
VERDICTS = {
    "test_sum": "passed",
    "test_one_rank_fails": "failure",
    "test_expected_failure": "skipped: ",  # how a report in XML writes xfailed
    "test_skipped": "skipped: not today",
    "test_of_many_gpus": "skipped: needs 8 accelerators",
    "test_skip_inside": "skipped: said inside",
    "test_mesh": "passed",
    "test_subtests": "passed",
    "test_class_set_up": "passed",
    "test_of_gpus": "skipped: needs an accelerator for each rank",
    "test_value[1]": "passed",
    "test_value[two]": "passed",
    "test_pair[1-2]": "passed",
    "test_pair[larger]": "passed",
    "test_on_device": "passed",
}


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of the converted file."""
    path = tmp_path_factory.mktemp("ported")
    (path / INPUT.name).write_text(port(INPUT.read_text()).code)
    (path / "pytest.ini").write_text("[pytest]\n")
    return run_pytest(path, "-v", "-p", "lockstep.plugin", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_a_converted_file_has_the_verdicts_of_its_launchers(ported: Run) -> None:
    assert {name: ported.outcome(name) for name in VERDICTS} == VERDICTS


def test_a_converted_file_has_no_other_tests(ported: Run) -> None:
    names = {name.partition(" ")[0] for name in ported.cases}
    assert names == {name.partition(" ")[0] for name in VERDICTS}


def test_a_failure_names_the_rank_and_shows_the_assertion(ported: Run) -> None:
    (failure,) = ported.case("test_one_rank_fails").iter("failure")
    assert "rank 1" in str(failure.text)
    assert 'assert world.rank == 0, "the second rank is not the first"' in str(failure.text)


def test_all_cases_of_run_subtests_ran(ported: Run) -> None:
    ran = [line.partition("SUBPASSED[")[2].partition("]")[0] for line in ported.lines]
    cases = [f"factor={factor}, offset={offset}" for factor in (1, 2) for offset in (0, 3)]
    assert [case for case in ran if case] == cases


def test_comments_and_layout_are_kept() -> None:
    code = port(INPUT.read_text()).code
    assert code.startswith("# Owner(s): the header stays\n")
    for comment in (
        "        # this comment is about joining\n",
        "        # and so is this one\n",
        "        # the sum of ranks\n",
        "  # close is enough\n",
        "            # twice one\n",
    ):
        assert comment in code
    assert "        tensor = torch.ones(\n            2,\n            device=device,\n        )\n" in code


def test_only_the_imports_that_are_used_stay(tmp_path: Path) -> None:
    code = port(INPUT.read_text()).code
    lines = [line for line in code.splitlines() if line.startswith(("import ", "from "))]
    assert lines == [
        "import os",
        "import pytest",
        "import torch",
        "import torch.distributed as dist",
        "from lockstep.assertions import assert_equal",
        "from torch.distributed.tensor import Shard, distribute_tensor",
    ]
