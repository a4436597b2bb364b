"""Unit tests of the merge of ranks' reports into one: causes, victims, times, output, properties."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import SKIPS_ALL
from lockstep.reporting.rank_reports import RankReports
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import RankOutcome
from suites.selftest.reporting.merged import LOST, Ranks, made

RERUN = ["------------------------------- re-run (seed 3) --------------------------------", "pytest a.py"]


def brief(lines: list[str]) -> list[str]:
    """Return lines with the titles of sections alone."""
    return [line.strip("- ") if line.startswith("-----") else line for line in lines]


END = ["a section", "text of 0", "re-run (seed 3)", "pytest a.py"]


def test_a_test_that_passed_has_the_times_of_all_ranks(ranks: Ranks) -> None:
    late = {"start": 0.5, "stop": 9.0, "duration": 4.0}
    reports = ranks.merge(ranks.rank(0), ranks.rank(1, call_fields=late))
    assert [(report.when, report.outcome) for report in reports] == [
        ("setup", "passed"),
        ("call", "passed"),
        ("teardown", "passed"),
    ]
    assert [(each.start, each.stop, each.duration) for each in reports[:2]] == [
        (1.0, 2.0, 1.0),
        (0.5, 9.0, 4.0),
    ]
    times = [(each.start, each.stop, each.duration) for each in reports]
    assert times == [(1.0, 2.0, 1.0), (0.5, 9.0, 4.0), (1.0, 2.0, 1.0)]
    sections = ranks.merge(ranks.rank(0), ranks.rank(1, call_fields=late | {"sections": [("out", "x")]}))
    assert [(each.start, each.stop, each.duration) for each in sections] == times


def test_a_rank_that_failed_is_shown_with_the_word_of_the_others(ranks: Ranks) -> None:
    lines = ranks.failure(ranks.rank(0, "failed", "E   ValueError: no"), ranks.rank(1))
    assert brief(lines) == ["rank 0 of 2 failed", "rank 1: passed", "a remark", "E   ValueError: no", *END]


def test_ranks_that_failed_alike_are_shown_once(ranks: Ranks) -> None:
    both = [ranks.rank(number, "failed", f"E   ValueError: 0x1{number}") for number in (0, 1)]
    assert brief(ranks.failure(*both))[:2] == [
        "all 2 ranks failed, with the same message; this is rank 0's",
        "a remark",
    ]
    own = [ranks.rank(number, "failed", f"E   ValueError: rank {number}") for number in (0, 1)]
    assert ranks.failure(*own)[0] == (
        "all 2 ranks failed, with the same message but for the rank's own number; this is rank 0's"
    )
    three = ranks.failure(*both, ranks.rank(2))
    assert three[:3] == ["rank 0 of 3 failed", "rank 1: the same", "rank 2: passed"]


def test_causes_are_in_the_order_of_time_and_victims_are_lines(ranks: Ranks) -> None:
    late = ranks.rank(0, "failed", "E   ValueError: late", call_fields={"stop": 5.0})
    first = ranks.rank(2, "failed", "E   ValueError: first", call_fields={"stop": 3.0})
    victim = ranks.rank(1, "failed", f"E   RuntimeError: {LOST}", call_fields={"stop": 1.0})
    lines = brief(ranks.failure(late, victim, first))
    assert lines[:3] == [
        "rank 2 of 3 failed first",
        "rank 0: failed, see below",
        "rank 1: lost a connection at a.py:7 (Connection closed by peer)",
    ]
    assert lines[4:8] == ["E   ValueError: first", "rank 0 failed", "E   ValueError: late", "a section"]
    two = ranks.failure(victim, ranks.rank(0, "failed", "E   ValueError: no"))
    assert two[1] == "rank 1: lost its connection to rank 0 at a.py:7 (Connection closed by peer)"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("this example failed on another rank: x", "passed this example"),
        ("this case failed on another rank: x", "did not fail this case"),
        (
            "this case failed on another rank: it had already ended the test",
            "stopped, as another rank had ended the test",
        ),
    ],
)
def test_a_rank_that_learned_of_a_failure_by_a_vote_is_no_cause(ranks: Ranks, text: str, word: str) -> None:
    lines = ranks.failure(
        ranks.rank(0, "failed", f"E   X: {text}"), ranks.rank(1, "failed", "E   ValueError: no")
    )
    assert lines[:2] == ["rank 1 of 2 failed", f"rank 0: {word}"]


def test_a_failure_has_rank_cause_and_rerun_as_properties(ranks: Ranks) -> None:
    ranks.item.config.options["subtest"] = ["a=1", "b c"]
    properties = [("mine", 1)]
    failed = ranks.rank(0, "failed", "E   ValueError: no", call_fields={"user_properties": properties})
    both = failed, ranks.rank(1, call_fields={"user_properties": [*properties, ("yours", 2)]})
    setup, call, teardown = ranks.merge(*both)
    assert setup.user_properties == []
    assert call.user_properties == [
        ("mine", 1),
        ("yours", 2),
        ("rank", "0"),
        ("cause", "ValueError: no"),
        ("rerun", "pytest a.py --subtest a=1 --subtest 'b c'"),
    ]
    assert teardown.user_properties == call.user_properties
    ranks.item.fixturenames = ()
    (_, call, _) = ranks.merge(*both)
    assert call.user_properties[-1] == ("rerun", "pytest a.py")


def test_output_is_that_of_ranks_to_blame(ranks: Ranks) -> None:
    def found(shown: str, call: str = "failed") -> list[str]:
        ranks.item.config.options["rank_output"] = shown
        fields = [{"sections": [("out", f"of {number}"), ("Hypothesis", "the same")]} for number in range(3)]
        outcomes = [
            ranks.rank(
                number,
                call if number == 1 else "passed",
                "E  no" if call == "failed" else None,
                call_fields=each,
            )
            for number, each in enumerate(fields)
        ]
        outcomes[0].reports[1]["longrepr"] = outcomes[2].reports[1]["longrepr"] = None
        _, report, _ = ranks.merge(*outcomes)
        return [f"{title}: {text}" for title, text in report.sections]

    own = ["out (rank 1): of 1", "Hypothesis (rank 1): the same"]
    others = ["out (rank 0): of 0", "out (rank 2): of 2"]
    assert found("blamed") == own
    assert found("all") == [*own, *others]
    assert found("none") == []
    assert found("blamed", "passed")[::2][:1] == ["out (rank 0): of 0"]
    assert len(found("blamed", "passed")) == 4


def test_output_in_an_xml_report_has_the_rank_in_its_text(ranks: Ranks) -> None:
    ranks.item.config.options["xmlpath"] = "a.xml"
    failed = ranks.rank(0, "failed", "E  no", call_fields={"sections": [("out", "text")]})
    assert ranks.merge(failed)[1].sections == [("out (rank 0)", "text")]
    ranks.item.config.getini = lambda name: "all"
    assert ranks.merge(failed)[1].sections == [("out (rank 0)", "rank 0:\ntext")]


def test_ranks_that_disagree_on_a_skip_fail(ranks: Ranks) -> None:
    lines = ranks.failure(ranks.rank(0), ranks.rank(1, "skipped", "why"))
    assert lines[:2] == ["rank 1 of 2 skipped (why) and others did not: ranks disagree", "rank 0: passed"]
    both = ranks.merge(ranks.rank(0, "skipped", "why"), ranks.rank(1, "skipped", "why"))
    assert [report.outcome for report in both] == ["passed", "skipped", "passed"]
    of_all = ranks.rank(0, "skipped", "why", call_fields={SKIPS_ALL: True})
    assert [report.outcome for report in ranks.merge(of_all, ranks.rank(1))] == [
        "passed",
        "skipped",
        "passed",
    ]
    failed = ranks.failure(ranks.rank(0, "failed", "E  no"), ranks.rank(1, "skipped", "why"))
    assert failed[:2] == ["rank 0 of 2 failed", "rank 1: skipped (why)"]


def test_an_expected_failure_of_one_rank_is_that_of_all(ranks: Ranks) -> None:
    expected = ranks.rank(0, "skipped", None, call_fields={"wasxfail": "why"})
    lost = ranks.rank(1, "failed", f"E   RuntimeError: {LOST}")
    reports = ranks.merge(expected, lost)
    assert [report.outcome for report in reports] == ["passed", "skipped", "passed"]
    assert reports[1].wasxfail == "why"
    strict = ranks.rank(1, "failed", "[XPASS(strict)] why")
    assert [report.outcome for report in ranks.merge(expected, strict)] == ["passed", "skipped", "passed"]
    lines = ranks.failure(expected, ranks.rank(1, "failed", "E  other"))
    assert lines[:2] == ["rank 1 of 2 failed", "rank 0: failed as expected"]


def test_a_rank_without_a_report_of_a_phase_fails(ranks: Ranks) -> None:
    setup, call, teardown = (made(when, "passed", None) for when in ("setup", "call", "teardown"))
    title = "sent no report of the {} phase; does a plugin run items itself?"
    for phase, reports in (("call", [setup, teardown]), ("setup", [call, teardown])):
        lines = ranks.failure(ranks.rank(0), ranks.of(1, reports))
        assert lines[0] == f"rank 1 of 2 {title.format(phase)}"
    ranks.item.config.options["setuponly"] = True
    without = [ranks.of(number, [setup, teardown]) for number in (0, 1)]
    assert [report.when for report in ranks.merge(*without)] == ["setup", "teardown"]


def test_what_ranks_left_in_flight_fails_the_test(ranks: Ranks) -> None:
    lines = ranks.failure(ranks.rank(0), ranks.rank(1, left_in_flight="all_reduce #3 in flight"))
    assert lines[:2] == ["rank 1 of 2 left all_reduce #3 in flight", "rank 0: passed"]


def test_a_mismatch_that_no_rank_noticed_fails_the_test(ranks: Ranks) -> None:
    blame = Diagnosis("ranks called other things", frozenset({1}), False)
    lines = ranks.failure(ranks.rank(0), ranks.rank(1), diagnosis=blame)
    assert lines[:2] == [
        "ranks called other things",
        "rank 1 of 2 took part in a collective that ranks called differently",
    ]


def test_a_group_that_ended_early_is_the_reason_of_a_lost_connection(ranks: Ranks) -> None:
    lost = ranks.rank(1, "failed", f"E   RuntimeError: connectFullMesh {LOST}")
    assert ranks.failure(ranks.rank(0), lost)[0] == (
        "rank 0 ended a process group to which rank 1 was still connecting: ranks need a barrier between "
        "making a group and destroying it"
    )
    assert ranks.failure(ranks.rank(0), ranks.rank(1, "failed", f"E   RuntimeError: {LOST}"))[0] == (
        "rank 1 of 2 failed"
    )


def test_a_preparation_is_named_before_its_failure(ranks: Ranks) -> None:
    preparation: Any = SimpleNamespace(name="prepare", __str__=None)
    lines = ranks.failure(ranks.rank(0, "failed", "E  no"), ranks.rank(1), preparation=preparation)
    assert lines[0] == f"in the {preparation}, on 2 ranks before the test:"


def test_a_rank_is_named_with_how_it_left_the_test() -> None:
    class XFailed(str):
        reprcrash = SimpleNamespace(message="_pytest.outcomes.XFailed: not here")

    def word(*reports: pytest.TestReport, **fields: Any) -> str:
        return RankReports(0, {str(report.when): report for report in reports}, **fields).word()

    passed = made("setup", "passed", None)
    marked = made("call", "skipped", None, wasxfail="of a mark")
    called = made("call", "skipped", None, wasxfail="not here")
    called.longrepr = XFailed()
    assert word(passed) == "passed"
    assert word(passed, marked) == "failed as expected"
    assert word(passed, called) == "xfailed (not here)"
    assert word(passed, made("call", "skipped", "why")) == "skipped (why)"
    assert (
        word(passed, made("call", "failed", "E  no"), made("teardown", "failed", "E  no")) == "failed in call"
    )
    assert word(excused="as the test expects") == "as the test expects"


def test_ranks_that_disagree_on_a_call_of_xfail_fail_unless_a_mark_expects_it(ranks: Ranks) -> None:
    def left() -> RankOutcome:
        outcome = ranks.rank(1, "skipped", None, call_fields={"wasxfail": "not here"})
        crash = {"path": "b.py", "lineno": 9, "message": "_pytest.outcomes.XFailed: not here"}
        traceback = {"reprentries": [], "extraline": None, "style": "long"}
        chain = [(traceback, crash, None)]
        shown = {"reprcrash": crash, "reprtraceback": traceback, "sections": [], "chain": chain}
        outcome.reports[1]["longrepr"] = shown
        return outcome

    lines = ranks.failure(ranks.rank(0), left())
    assert lines[:2] == [
        "rank 1 of 2 xfailed (not here) and others did not: ranks disagree",
        "rank 0: passed",
    ]
    ranks.item.get_closest_marker = lambda name: name == "xfail" or None
    assert [report.outcome for report in ranks.merge(ranks.rank(0), left())] == [
        "passed",
        "skipped",
        "passed",
    ]


def test_victims_alone_are_causes_but_for_those_that_have_heard_of_it_by_a_vote(ranks: Ranks) -> None:
    heard = ranks.rank(0, "failed", "E   X: this example failed on another rank: x")
    lost = ranks.rank(1, "failed", f"E   RuntimeError: {LOST}")
    lines = ranks.failure(heard, lost)
    assert lines[:2] == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert ranks.failure(heard)[0] == "rank 0 of 1 failed"


def test_problems_of_set_up_and_call_stand_together_without_victims_in_the_tear_down(ranks: Ranks) -> None:
    early = [made("setup", "failed", "E   ValueError: no", stop=3.0), made("teardown", "passed", None)]
    lost = made("teardown", "failed", f"E   RuntimeError: {LOST}")
    late = [made("setup", "passed", None), made("call", "failed", "E   KeyError: no", stop=4.0), lost]
    reports = ranks.merge(ranks.of(0, early), ranks.of(1, late))
    outcomes = [(report.when, report.outcome) for report in reports]
    assert outcomes == [("setup", "failed"), ("teardown", "passed")]
    assert reports[0].longreprtext.splitlines()[:2] == [
        "rank 0 of 2 failed first",
        "rank 1: failed, see below",
    ]


def test_a_disagreement_is_at_the_line_of_the_skip(ranks: Ranks) -> None:
    reports = ranks.merge(ranks.rank(0), ranks.rank(1, "skipped", "why"))
    crash: Any = reports[1].longrepr.reprcrash  # type: ignore[union-attr]
    assert (crash.path, crash.lineno, crash.message) == ("a.py", 4, "rank 1: ranks disagree")
