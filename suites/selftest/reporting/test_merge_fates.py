"""Unit tests of the merge of reports where ranks died or hang."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.protocol import BuildLock
from lockstep.reporting.merge import as_option
from lockstep.world.diagnosis import Diagnosis
from suites.selftest.reporting.merged import LOST, Ranks, died, stuck


def test_a_death_is_placed_with_its_last_output(ranks: Ranks) -> None:
    lost = ranks.rank(0, "failed", f"E   RuntimeError: {LOST}")
    stack = 'Current thread 0x01 (most recent call first):\n  File "/base/b.py", line 3 in f'
    stack = f"Fatal Python error: Aborted\n\n{stack}"
    setup, call, teardown = ranks.merge(lost, died(ranks, 1, output=stack))
    assert (setup.outcome, call.outcome, teardown.outcome) == ("passed", "failed", "passed")
    assert call.longreprtext.splitlines()[0] == "rank 1 of 2 died: SIGKILL, at b.py:3 in f"
    assert "rank 1's last output:\nFatal Python error" in call.longreprtext
    crash: Any = call.longrepr.reprcrash  # type: ignore[union-attr]
    assert (crash.path, crash.lineno, crash.message) == ("b.py", 3, "rank 1: died: SIGKILL")
    assert dict(call.user_properties)["cause"] == "died: SIGKILL"
    assert call.sections == [("out (rank 1)", "before")]
    assert call.duration == 7.5


@pytest.mark.parametrize(
    ("fields", "title"),
    [
        (
            {"exitcode": -6, "output": "op.preamble.length <= op.nbytes. 8 vs 4"},
            "died: SIGABRT (gloo received 8 bytes where it expected 4: "
            "shapes or dtypes differ between ranks)",
        ),
        (
            {"exitcode": -6, "output": "x Assertion `a < b' failed y"},
            "died: SIGABRT (Assertion `a < b' failed)",
        ),
        ({"exitcode": -9, "output": "x Assertion `a < b' failed y"}, "died: SIGKILL"),
        ({"importing": "/base/c.py"}, "died: SIGKILL while importing c.py"),
        ({"exitcode": 3}, "exited with code 3"),
        ({"exitcode": None}, "closed its connection to the controller"),
        ({"stood_still": True}, "stood still, and was ended by the harness"),
        ({"exitcode": -99}, "died: signal 99"),
    ],
)
def test_a_death_says_what_is_known_of_it(ranks: Ranks, fields: dict[str, Any], title: str) -> None:
    lines = ranks.failure(ranks.rank(0), died(ranks, 1, **fields))
    assert lines[0] == f"rank 1 of 2 {title}"


def test_a_death_in_set_up_leaves_no_call(ranks: Ranks) -> None:
    reports = ranks.merge(died(ranks, 0, phases_over=0), ranks.rank(1))
    assert [(each.when, each.outcome) for each in reports] == [("setup", "failed"), ("teardown", "passed")]
    crash: Any = reports[0].longrepr.reprcrash  # type: ignore[union-attr]
    assert (crash.path, crash.lineno) == ("a.py", 7)


def test_a_host_that_is_gone_is_named_with_its_ranks(ranks: Ranks) -> None:
    gone = [died(ranks, number, host_gone="b") for number in (1, 2)]
    lines = ranks.failure(ranks.rank(0), *gone, died(ranks, 3, host_gone="c"))
    assert lines[0] == "host b is gone: ranks 1, 2"
    named = ranks.failure(ranks.rank(0, "failed", "E  no", host="b"), ranks.rank(1))
    assert named[0] == "rank 0 of 2 (host b) failed"


def test_an_excused_death_is_no_failure(ranks: Ranks) -> None:
    dead = died(ranks, 1)
    dead.excuse = "as the test expects"
    assert [report.outcome for report in ranks.merge(ranks.rank(0), dead)] == ["passed"] * 3
    lines = ranks.failure(ranks.rank(0, "failed", "E  no"), dead)
    assert lines[1] == "rank 1: died: SIGKILL, as the test expects"


def test_a_rank_that_hangs_is_shown_with_its_stacks(ranks: Ranks) -> None:
    hangs = stuck(ranks, 0, captured=(("stdout", "printed"),), output="last")
    _, call, _ = ranks.merge(hangs, ranks.rank(1), timed_out=True)
    lines = call.longreprtext.splitlines()
    assert lines[:2] == ["rank 0 of 2 timed out after 60 s, in b.py:1 in f", "rank 1: passed"]
    assert "stacks of 0\nrank 0's last output:\nlast\n" in call.longreprtext
    assert call.sections == [("Captured stdout call (rank 0)", "printed")]
    assert ranks.failure(hangs, ranks.rank(1))[0].startswith(
        "rank 0 of 2 killed by the harness after 7.5 s, in "
    )
    imports = stuck(ranks, 0, importing="/base/c.py")
    assert ranks.failure(imports, ranks.rank(1), timed_out=True)[0].startswith(
        "rank 0 of 2 did not finish importing c.py within 8 s, in "
    )


def test_ranks_that_wait_are_blamed_as_the_diagnosis_says(ranks: Ranks) -> None:
    blame = Diagnosis("rank 1 called something else", frozenset({1}), True)
    lines = ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnosis=blame)
    assert lines[:2] == [
        "rank 1 called something else",
        "rank 1 of 2 killed by the harness after 7.5 s, in b.py:2 in f",
    ]
    failed = ranks.rank(0, "failed", "E  no")
    lines = ranks.failure(failed, stuck(ranks, 1), diagnosis=blame)
    assert lines[:2] == ["rank 0 of 2 failed", "rank 1: was in b.py:2 in f"]


def test_a_rank_that_waits_for_votes_has_done_its_part(ranks: Ranks) -> None:
    votes = {"status": {"state": "votes", "case": "b=2, c=3"}}
    lines = ranks.failure(stuck(ranks, 0, **votes), stuck(ranks, 1))
    assert lines[:3] == [
        "rank 1 of 2 killed by the harness after 7.5 s, in b.py:2 in f",
        "subtests after [b=2, c=3] did not run",
        "rank 0: was in the wait for other ranks after [b=2, c=3]",
    ]
    assert lines[-1] == "pytest a.py --subtest b=2,c=3"
    assert as_option("b=2, c=3, d") == "b=2,c=3,d"
    alone = ranks.failure(stuck(ranks, 0, **votes), ranks.rank(1))
    assert alone[0].endswith("s, in the wait for other ranks after [b=2, c=3]")
    trial = {"status": {"state": "votes", "case": "example 3"}}
    assert ranks.failure(stuck(ranks, 0, **trial), stuck(ranks, 1))[-1] == "pytest a.py"


def test_locks_of_builds_that_stay_are_named(ranks: Ranks) -> None:
    held, left = ({"status": {"build_locks": (BuildLock("/a lock", held),)}} for held in (True, False))
    lines = ranks.failure(stuck(ranks, 0, **held), stuck(ranks, 1, **left))
    found = [line for line in lines if "torch's lock" in line]
    assert found == [
        "rank 0 was building a C++ extension, and torch's lock /a lock stays: every later build there waits "
        "for it; remove it: rm '/a lock'"
    ]
    lines = ranks.failure(stuck(ranks, 0, **left), stuck(ranks, 1, **left))
    found = [line for line in lines if "torch's lock" in line]
    assert found == [
        "rank 0 waits for torch's lock /a lock, which no rank of this test holds: unless another process is "
        "building now, remove it: rm '/a lock'"
    ]


def test_what_is_shown_of_ranks_without_a_report_has_its_word(ranks: Ranks) -> None:
    def head(**fields: Any) -> str:
        dead = (died(ranks, number, **fields) for number in (0, 1))
        return ranks.failure(*dead)[0]

    assert head() == "all 2 ranks died: SIGKILL"
    assert head(output="x") == "all 2 ranks died: SIGKILL, with the same last output; this is rank 0's"
