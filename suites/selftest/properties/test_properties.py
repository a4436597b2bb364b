"""Property tests on ranks: examples that pass, fail and shrink on all ranks together, and what ends that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "properties"
PLUGINS = ("hypothesispytest",)

LONE_FAULTS = ("test_lonely_draw", "test_unlike_bounds", "test_lonely_assume", "test_lonely_skip")


def _example(session: FaultSession, name: str) -> str:
    """Return the reported example, without the margin that pytest puts before it."""
    text = re.sub(r"^E? +", "", session[name].text, flags=re.MULTILINE)
    assert text.count("Failing") == 1
    return text.partition("Failing ")[2].partition("\n\n")[0]


def test_ranks_see_the_same_examples(session: FaultSession) -> None:
    assert session["test_same_examples"].outcomes == ["passed"]


def test_a_failure_on_one_rank_is_shrunk(session: FaultSession) -> None:
    verdict = session["test_one_rank"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert "number=100," in _example(session, "test_one_rank")
    assert "assert (1 == 0 or 100 < 100)" in verdict.text
    assert session.place("# on rank 1") in verdict.text
    assert "Explanation" not in verdict.text  # what follows a failure, the repair of the group, is none


def test_a_failure_is_reported_with_its_reproduce_failure(session: FaultSession) -> None:
    assert len(re.findall(r"@reproduce_failure\('[\d.]+', b'AEFk'\)", session["test_one_rank"].text)) == 1


def test_ranks_that_wait_for_the_failed_one_shrink_with_it(session: FaultSession) -> None:
    verdict = session["test_before_a_collective"]
    explained = re.search(r"only run by failing \w+ \w+:\nE +\S+/(.*)\nE +\n", verdict.text)
    assert explained is not None
    assert explained[1] == session.place("# run by failing examples alone")
    assert "number=100," in _example(session, "test_before_a_collective")
    assert verdict.head()[0] == "rank 1 of 2 failed"


def test_ranks_that_drew_more_take_the_draws_of_the_failed_one(session: FaultSession) -> None:
    text = session["test_unlike_progress"].text
    assert "Draw 1 (first): 10\n" in text
    assert "Draw 2" not in text


def test_a_failure_on_all_ranks_is_reported_once(session: FaultSession) -> None:
    verdict = session["test_all_ranks"]
    assert verdict.head()[0].startswith("all 2 ranks failed, with the same traceback")
    assert verdict.text.count("seen 100") == 1


def test_the_place_where_ranks_part_in_an_example_is_named(session: FaultSession) -> None:
    text = session["test_ranks_part"].text
    place = "step 0, forward: parameter `bias` as its module computes with it at test_faults.py:"
    assert f"Diverged: first divergence between ranks: {place}" in text
    assert "they never agreed" in text
    assert "number=10," in _example(session, "test_ranks_part")


def test_the_smallest_of_several_bugs_is_reported(session: FaultSession) -> None:
    example = _example(session, "test_unlike_bugs")
    assert ("first=5," in example) != ("second=5," in example)


def test_the_first_rank_to_fail_decides_which_bug_it_is(session: FaultSession) -> None:
    text = re.sub(r"(?m)^E? +", "", session["test_noise_of_the_other"].text)
    assert "number=100," in text
    assert "Flaky" not in text


def test_the_deadline_counts_for_each_example(session: FaultSession) -> None:
    assert session["test_long_in_all"].outcomes == ["passed"]


def test_a_draw_on_one_rank_is_named(session: FaultSession) -> None:
    text = session["test_lonely_draw"].text
    assert "rank 0 drew False (boolean) for Draw 2 (mine); rank 1 drew nothing more" in text
    assert "world.pick" in text


def test_a_draw_in_unlike_bounds_is_named(session: FaultSession) -> None:
    text = session["test_unlike_bounds"].text
    assert "rank 0 drew 0 (integer of 0 to 1) for Draw 1; rank 1 drew 0 (integer of 0 to 2)" in text


def test_an_assumption_of_one_rank_is_named(session: FaultSession) -> None:
    text = session["test_lonely_assume"].text
    assert "rank 0 passed it; rank 1 rejected it (failed to satisfy assume() in test_lonely_assume" in text


def test_a_skip_on_one_rank_is_named(session: FaultSession) -> None:
    assert "rank 0 passed it; rank 1 skipped it (not here)" in session["test_lonely_skip"].text


@pytest.mark.parametrize("name", LONE_FAULTS)
def test_a_disagreement_is_reported_by_all_ranks_at_once(session: FaultSession, name: str) -> None:
    assert session[name].head()[0].startswith("all 2 ranks failed, with the same traceback")


def test_a_skip_on_all_ranks_skips(session: FaultSession) -> None:
    assert session["test_skip"].outcomes == ["skipped"]


def test_a_deadline_that_one_rank_exceeds_is_exceeded_on_all(session: FaultSession) -> None:
    verdict = session["test_slow_rank"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert "DeadlineExceeded" in verdict.message
    assert "number=6," in _example(session, "test_slow_rank")


def test_an_explicit_example_fails_on_all_ranks(session: FaultSession) -> None:
    assert session["test_explicit"].head() == ["rank 1 of 2 failed", "rank 0: passed this example"]
    assert _example(session, "test_explicit").startswith("explicit example: test_explicit(")


def test_an_example_that_kills_a_rank_is_shrunk(session: FaultSession) -> None:
    assert session["test_death"].head()[0] == "rank 1 of 2 died: SIGKILL"
    assert "number=5," in _example(session, "test_death")


def test_an_example_that_kills_a_rank_between_draws_is_shrunk(session: FaultSession) -> None:
    assert session["test_death_between_draws"].head()[0] == "rank 1 of 2 exited with code 3"
    assert "Draw 1 (first): 5\n" in session["test_death_between_draws"].text


def test_an_example_that_hangs_is_shrunk_and_shown_with_its_line(session: FaultSession) -> None:
    verdict = session["test_hang"]
    place = session.place("# for ever")
    sentence, culprit, waiting = verdict.head()[:3]
    assert re.match(r"rank 0 waits at the end of \[example \d+\] for rank 1: rank 1 is at ", sentence)
    assert culprit.startswith(f"rank 1 of 2 timed out after 0.7 s, in {place}")
    assert waiting.startswith("rank 0: was in the wait for other ranks after [example ")
    assert "number=5," in _example(session, "test_hang")


def test_a_deadlocked_example_is_shrunk_in_the_same_world(session: FaultSession) -> None:
    verdict = session["test_deadlock"]
    assert re.match(r"rank 0 waits in barrier #\d+, which rank 1 never reached", verdict.head()[0])
    assert verdict.head()[1:] == ["rank 0 of 2 failed", "rank 1: passed this example"]
    assert "number=5," in _example(session, "test_deadlock")


def test_a_state_machine_runs_in_step(session: FaultSession) -> None:
    verdict = session["runTest"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert re.sub(r"(?m)^E? +", "", verdict.text).count("state.add(number=5)\n") == 1


def test_a_state_machine_that_kills_a_rank_is_shrunk(session: FaultSession) -> None:
    verdict = session["test_machine_that_dies"]
    assert verdict.head()[0] == "rank 1 of 2 exited with code 4"
    assert "state = Mortal()\nstate.step(number=2)\nstate.teardown()" in verdict.text


def test_a_second_property_of_a_test_runs_in_step(session: FaultSession) -> None:
    assert "number=3," in _example(session, "test_two_properties")
