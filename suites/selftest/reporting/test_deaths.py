"""Reports of ranks that die before a test, or all at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from unittest.mock import Mock

from lockstep.protocol import RankStatus
from lockstep.reporting.problems import find_problems
from lockstep.reporting.rank_reports import Context, RankReports
from lockstep.world.outcome import Died, Fate, ItemOutcome, RankOutcome, Stuck

if TYPE_CHECKING:
    from suites.selftest.project import Project


def _title(fate: Fate) -> str:
    """Return what a report says of a rank that came to this end, and sent no report of any phase."""
    item = Mock(location=("test_sample.py", 3, "test_x"))
    item.config.invocation_params.dir = "/work"
    outcome = ItemOutcome((RankOutcome(0, fate=fate),), 60.0, False, 9.6)
    found = find_problems(Context(item, outcome, str, 0, None), [RankReports(0, fate=fate)])
    (problem,) = found["setup"]
    return problem.title


def test_a_death_at_import_names_the_file(project: Project) -> None:
    lines = ["import os", "if os.environ.get('RANK') == '1':", "    os.kill(os.getpid(), 9)"]
    project.write("\n".join([*lines, "def test_of_none(world): ..."]))
    assert "\nrank 1 of 2 died: SIGKILL while importing test_sample.py\n" in project.run()


def test_the_assertion_that_has_aborted_a_rank_is_shown(project: Project) -> None:
    written = 'index.cu:1: block: [0,0,0] Assertion `-n <= index && "index out of bounds"` failed.'
    code = f"os.write(2, {written.encode()!r}); os.abort()"
    project.write(
        f"import os\ndef test_aborts(world):\n    if world.rank == 1:\n        {code}\n    world.barrier()\n"
    )
    shown = re.escape('SIGABRT (Assertion `-n <= index && "index out of bounds"` failed)')
    assert re.search(
        rf"^rank 1 of 2 died: {shown}(, at test_sample\.py:\d+.*)?$", project.run(), re.MULTILINE
    )


def test_a_test_that_all_ranks_leave_has_a_duration(project: Project) -> None:
    project.write("import os, time\ndef test_leaves(world):\n    time.sleep(0.5)\n    os._exit(3)\n")
    output = project.run("--durations=1")
    assert re.findall(r"^(0\.[5-9]|[1-9]\.\d)\ds call +test_sample.py::test_leaves$", output, re.MULTILINE)


def test_sizes_by_which_gloo_has_aborted_a_rank_are_shown() -> None:
    output = "terminate called: [enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 16 vs 8. \n"
    sizes = "gloo received 16 bytes where it expected 8: shapes or dtypes differ between ranks"
    assert _title(Died(-6, output, 1.0)) == f"died: SIGABRT ({sizes})"


def test_a_rank_that_never_ends_an_import_names_the_file() -> None:
    stuck = Stuck(RankStatus("", "/work/test_a.py:1 in <module>"), 1.0, importing="/work/test_a.py")
    assert _title(stuck) == "did not finish importing test_a.py within 10 s, in /work/test_a.py:1 in <module>"
