"""Unit tests of the merge of ranks' reports into one: causes, victims, times, output, properties."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import OF_RANKS, SKIPS_ALL, TRIAL, BuildLock, Finished, RankStatus
from lockstep.reporting.merge import as_option, merge
from lockstep.reporting.rank_reports import RankReports
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

LOST = "gloo: Connection closed by peer"


def made(when: str, outcome: Any, text: Any, **fields: Any) -> pytest.TestReport:
    """Return a report of a phase; a failure has `text` as its representation."""
    longrepr = ("a.py", 4, f"Skipped: {text}") if outcome == "skipped" and text else text
    times = {"start": 1.0, "stop": 2.0, "duration": 1.0} | fields
    return pytest.TestReport("a.py::test", ("a.py", 6, "test"), {}, outcome, longrepr, when, **times)  # type: ignore[arg-type]


@dataclass
class Ranks:
    """The ranks of an item, and their merged reports."""

    item: Any

    def rank(self, number: int, call: str = "passed", text: Any = None, **fields: Any) -> RankOutcome:
        """Return a rank that set up, called with this outcome, and tore down."""
        call_fields = fields.pop("call_fields", {})
        reports = [made("setup", "passed", None), made("call", call, text, **call_fields)]
        return self.of(number, [*reports, made("teardown", "passed", None)], **fields)

    def of(self, number: int, reports: list[pytest.TestReport], **fields: Any) -> RankOutcome:
        hook = self.item.config.hook
        sent = [
            hook.pytest_report_to_serializable(config=self.item.config, report=report) for report in reports
        ]
        given = {"fate": Finished(True, 0, 0), **fields}
        return RankOutcome(number, sent, **given)

    def merge(self, *ranks: RankOutcome, timed_out: bool = False, **fields: Any) -> list[pytest.TestReport]:
        return merge(ItemOutcome(ranks, 60.0, timed_out, 7.5, **fields), self.item, lambda: "pytest a.py", 3)

    def failure(self, *ranks: RankOutcome, **fields: Any) -> list[str]:
        """Return the lines of the report that failed."""
        (failed,) = (report for report in self.merge(*ranks, **fields) if report.failed)
        return [line for line in failed.longreprtext.splitlines() if line]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    item = SimpleNamespace(
        nodeid="a.py::test",
        location=("a.py", 6, "test"),
        keywords={"test": 1},
        config=request.config,
        fixturenames=("run_subtests",),
        stash=pytest.Stash(),
        get_closest_marker=lambda name: None,
    )
    hook = SimpleNamespace(
        pytest_report_to_serializable=request.config.hook.pytest_report_to_serializable,
        pytest_report_from_serializable=request.config.hook.pytest_report_from_serializable,
        pytest_ranks_remarks=lambda context: [["a remark"]],
        pytest_ranks_sections=lambda context, cause, report: [("a section", f"text of {cause.rank}")],
    )
    options = {"rank_output": "blamed", "subtest": []}
    item.config = SimpleNamespace(
        hook=hook,
        getoption=lambda name, default=None: options.get(name, default),
        getini=lambda name: "no",
        invocation_params=SimpleNamespace(dir="/base"),
        options=options,
    )
    return Ranks(item)


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


def died(ranks: Ranks, number: int, phases_over: int = 1, **fields: Any) -> RankOutcome:
    given = {"exitcode": -9, "output": "", "at": 1.5, **fields}
    reports = [made("setup", "passed", None, sections=[("out", "before")])] if phases_over else []
    return ranks.of(number, reports, fate=Died(phases_over=phases_over, **given))


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


def stuck(ranks: Ranks, number: int, phases: int = 1, **fields: Any) -> RankOutcome:
    status = {"stacks": f"stacks of {number}", "where": f"b.py:{number + 1} in f", **fields.pop("status", {})}
    reports = [made("setup", "passed", None)][:phases]
    fate = Stuck(RankStatus(**status), 1.0 + number, phases_over=phases, **fields)  # type: ignore[arg-type]
    return ranks.of(number, reports, fate=fate)


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


# Subtests


Subtest = tuple[str, pytest.TestReport]


def of_subtest(name: str, outcome: Any = "passed", text: Any = None, **fields: Any) -> Subtest:
    return name, made("call", outcome, text, **fields)


def with_subtests(ranks: Ranks, number: int, *subtests: Subtest, **fields: Any) -> RankOutcome:
    """Return a rank that set up, ran these subtests, and passed."""
    phases = [made(when, "passed", None) for when in ("setup", "call", "teardown")]
    outcome = ranks.of(number, [phases[0], *(report for _, report in subtests), *phases[1:]], **fields)
    for (name, _), data in zip(subtests, outcome.reports[1:], strict=False):
        kind = {"$report_type": "SubtestReport", "_report_type": "SubTestReport"}
        data |= {**kind, "_subtest.context": {"msg": name, "kwargs": {"text": "'x'"}}}
    return outcome


def subtests_of(reports: list[pytest.TestReport]) -> list[Any]:
    return [report for report in reports if type(report) is not pytest.TestReport]


def test_a_subtest_is_merged_and_its_test_fails_with_it(ranks: Ranks) -> None:
    bad = of_subtest("n=1, m=2", "failed", "E   ValueError: no")
    outcomes = with_subtests(ranks, 0, of_subtest("n=1, m=2")), with_subtests(ranks, 1, bad)
    reports = ranks.merge(*outcomes)
    assert [(report.when, report.outcome) for report in reports] == [
        ("setup", "passed"),
        ("call", "failed"),
        ("call", "failed"),
        ("teardown", "passed"),
    ]
    (subtest,) = subtests_of(reports)
    assert getattr(subtest, OF_RANKS) is True
    assert subtest.context.kwargs == {"text": "'x'"}
    lines = subtest.longreprtext.splitlines()
    assert lines[:2] == ["rank 1 of 2 failed", "rank 0: passed"]
    assert dict(subtest.user_properties)["rerun"] == "pytest a.py --subtest n=1,m=2"
    assert reports[2].longrepr == "contains 1 failed subtest"
    both = with_subtests(ranks, 0, bad, of_subtest("x", "failed", "E  no")), with_subtests(ranks, 1, bad)
    assert ranks.merge(*both)[3].longrepr == "contains 2 failed subtests"
    ranks.item.fixturenames = ()
    ranks.item.config.options["subtest"] = ["n=1"]
    (subtest,) = subtests_of(ranks.merge(*outcomes))
    assert dict(subtest.user_properties)["rerun"] == "pytest a.py"


def test_subtests_of_one_name_are_apart_by_their_order(ranks: Ranks) -> None:
    first = [of_subtest("a", "failed", "E   ValueError: one"), of_subtest("a")]
    second = [of_subtest("a"), of_subtest("a", "failed", "E   ValueError: two")]
    merged = subtests_of(ranks.merge(with_subtests(ranks, 0, *first), with_subtests(ranks, 1, *second)))
    assert [report.longreprtext.splitlines()[0] for report in merged] == [
        "rank 0 of 2 failed",
        "rank 1 of 2 failed",
    ]


def test_ranks_that_disagree_on_a_subtest_fail_it(ranks: Ranks) -> None:
    def heads(*subtests: list[Subtest]) -> list[str]:
        outcomes = [with_subtests(ranks, number, *each) for number, each in enumerate(subtests)]
        (subtest,) = subtests_of(ranks.merge(*outcomes))
        return subtest.longreprtext.splitlines() if subtest.failed else [subtest.outcome]

    passed, skipped = [of_subtest("a")], [of_subtest("a", "skipped", "why")]
    assert heads(passed, skipped, passed)[:3] == [
        "rank 1 of 3 skipped it and others did not: ranks disagree",
        "rank 0: passed",
        "rank 2: passed",
    ]
    assert heads(skipped, [], skipped)[:3] == [
        "rank 1 of 3 did not reach it and others did: ranks disagree",
        "rank 0: skipped",
        "rank 2: skipped",
    ]
    assert heads(skipped, skipped) == ["skipped"]
    failed = [of_subtest("a", "failed", "E   ValueError: no")]
    assert heads(passed, failed, skipped)[:3] == ["rank 1 of 3 failed", "rank 0: passed", "rank 2: skipped"]


def test_an_expected_failure_of_a_subtest_is_that_of_all_ranks(ranks: Ranks) -> None:
    expected = of_subtest("a", "skipped", None, wasxfail="why")
    victim = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    (merged,) = subtests_of(ranks.merge(with_subtests(ranks, 0, expected), with_subtests(ranks, 1, victim)))
    assert (merged.outcome, merged.wasxfail) == ("skipped", "why")
    other = of_subtest("a", "failed", "E   ValueError: no")
    (merged,) = subtests_of(ranks.merge(with_subtests(ranks, 0, expected), with_subtests(ranks, 1, other)))
    assert merged.longreprtext.splitlines()[0] == "rank 1 of 2 failed"


def test_a_death_in_a_subtest_is_a_cause_of_its_failure(ranks: Ranks) -> None:
    lost = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    fate = Died(exitcode=-9, output="", at=1.5, phases_over=1)
    dead = with_subtests(ranks, 1, fate=fate)
    after = with_subtests(ranks, 1, of_subtest("a"), fate=fate)
    for each in (dead, after):
        del each.reports[-2:]
    heads = [
        subtests_of(ranks.merge(with_subtests(ranks, 0, lost), each))[0].longreprtext.splitlines()[0]
        for each in (dead, after)
    ]
    assert heads == ["rank 1 of 2 died: SIGKILL", "rank 0 of 2 failed"]


def test_a_diagnosis_is_of_its_subtest_or_of_the_last_trial(ranks: Ranks) -> None:
    names = ("a", f"{TRIAL}1", f"{TRIAL}2")
    blame = {name: Diagnosis(f"in {name}", frozenset({1}), True) for name in names}
    lost = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    victims = [with_subtests(ranks, number, lost) for number in (0, 1)]
    (merged,) = subtests_of(ranks.merge(*victims, diagnoses=blame))
    assert merged.longreprtext.splitlines()[0] == "in a"
    assert ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnoses=blame)[0] == f"in {TRIAL}2"
    given = Diagnosis("in the test", frozenset({1}), True)
    lines = ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnosis=given, diagnoses=blame)
    assert lines[0] == "in the test"
    of_cases = {"a": blame["a"]}
    assert ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnoses=of_cases)[0].startswith("rank 0 of 2 ")


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


def test_what_is_shown_of_ranks_without_a_report_has_its_word(ranks: Ranks) -> None:
    def head(**fields: Any) -> str:
        dead = (died(ranks, number, **fields) for number in (0, 1))
        return ranks.failure(*dead)[0]

    assert head() == "all 2 ranks died: SIGKILL"
    assert head(output="x") == "all 2 ranks died: SIGKILL, with the same last output; this is rank 0's"
