"""Diagnoses of mismatches and deadlocks, from the status of each rank."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import MEETING, Issued, RankStatus, State
from lockstep.world.diagnosis import Diagnosis, diagnose, find_mismatch, in_flight, name_of, named, place_of
from lockstep.world.standstill import Standstill

PLACE = "test_a.py:7 in test_a"


def issued(op: str, number: int, shape: tuple[int, ...] = (3,), **changes: Any) -> Issued:
    usual = {"group": DEFAULT_GROUP, "ranks": (), "dtypes": ("float",), "shapes": (shape,), "in_flight": True}
    return Issued(op=op, number=number, **(usual | changes))


def doing(*collectives: Issued, state: State = "runs", where: str = PLACE, **rest: Any) -> RankStatus:
    return RankStatus("", where, issued=collectives, state=state, **rest)


def diagnosis_of(*ranks: RankStatus) -> Diagnosis:
    found = diagnose(dict(enumerate(ranks)), len(ranks))
    assert found is not None
    return found


def test_ranks_that_compute_or_have_all_joined_have_no_diagnosis() -> None:
    joined = doing(issued("all_reduce", 1))
    assert diagnose({0: doing(), 1: doing(state="idle")}, 2) is None
    assert diagnose({0: joined, 1: joined}, 2) is None


def test_the_fewer_ranks_are_to_blame_for_a_mismatch() -> None:
    most, other = doing(issued("all_reduce", 3)), doing(issued("all_gather", 3, (5,)))
    found = diagnosis_of(most, other, most)
    assert found.sentence == (
        "mismatch: rank 1 is in all_gather #3 (float [5]) while ranks 0, 2 are in all_reduce #3 (float [3])"
    )
    assert found.blame == {1}
    assert found.is_hopeless


def test_ranks_are_named_in_order_of_their_numbers() -> None:
    one, other = doing(issued("all_reduce", 1)), doing(issued("barrier", 1, ()))
    assert diagnose({1: other, 0: one}, 2) == diagnose({0: one, 1: other}, 2)


def test_no_rank_is_to_blame_where_the_ranks_are_split_evenly() -> None:
    assert diagnosis_of(doing(issued("all_reduce", 1)), doing(issued("barrier", 1, ()))).blame == frozenset()


def test_a_mismatch_is_found_after_one_rank_has_gone_on() -> None:
    left = doing(issued("all_reduce", 1, (3,), in_flight=False), issued("barrier", 2, ()))
    found = diagnosis_of(left, doing(issued("all_reduce", 1, (4,))))
    assert found.sentence == (
        "mismatch: rank 0 was in all_reduce #1 (float [3]) while rank 1 is in all_reduce #1 (float [4])"
    )


def test_the_first_of_several_mismatches_is_reported() -> None:
    one = doing(issued("all_reduce", 1), issued("all_reduce", 2))
    other = doing(issued("barrier", 1), issued("barrier", 2))
    assert "#1" in diagnosis_of(one, other).sentence
    assert "#2" not in diagnosis_of(one, other).sentence


@pytest.mark.parametrize(
    ("op", "changes", "differs"),
    [
        ("all_reduce", {"shapes": ((4,),)}, True),
        ("all_reduce", {"shapes": ((3, 1),)}, False),  # as many elements
        ("all_reduce", {"dtypes": ("half",)}, True),
        ("all_gather", {"shapes": ((4,),)}, True),
        ("all_to_all", {"shapes": ((4,),)}, False),  # splits may differ
        ("all_to_all", {"dtypes": ("half",)}, True),
        ("gather", {"shapes": (), "dtypes": ()}, False),
        ("scatter", {"shapes": (), "dtypes": ()}, False),  # only the source hands something in
    ],
)
def test_operations_differ_in_which_arguments_must_be_equal(
    op: str, changes: dict[str, Any], differs: bool
) -> None:
    ranks = {0: doing(issued(op, 1)), 1: doing(issued(op, 1, **{"shape": (3,), **changes}))}
    found = find_mismatch(ranks, 2)
    assert (found is not None) is differs


def test_a_mismatch_of_the_past_is_reported_on_request_only() -> None:
    ranks = {
        rank: doing(issued("broadcast", 1, (3 + rank,), in_flight=False), state="idle") for rank in range(2)
    }
    assert find_mismatch(ranks, 2) is None
    found = find_mismatch(ranks, 2, include_ended=True)
    assert found is not None
    assert found.sentence == (
        "mismatch: rank 0 called broadcast #1 (float [3]) while rank 1 called broadcast #1 (float [4])"
    )


@pytest.mark.parametrize(
    ("absent", "place", "is_hopeless"),
    [
        (doing(state="idle"), "never reached: it has ended the test", True),
        (doing(state="votes", case="n=2"), "never reached: it has ended the subtest [n=2]", True),
        (
            doing(state="votes", call="world.rebuild"),
            "never reached: it waits for others in world.rebuild",
            True,
        ),
        (doing(state="stopped"), "did not reach: it is stopped", True),
        (doing(state="silent", where="a.py:1"), "did not reach: it is not responding, at a.py:1", False),
        (doing(call="recv"), "never reached: it is in recv at test_a.py:7 in test_a", False),
        (doing(), "never reached: it is at test_a.py:7 in test_a", False),
    ],
)
def test_a_rank_that_others_wait_for_is_named_with_its_place(
    absent: RankStatus, place: str, is_hopeless: bool
) -> None:
    waiting = doing(issued("all_reduce", 1, in_flight=False), issued("all_reduce", 2))
    absent = doing(
        issued("all_reduce", 1, in_flight=False),
        state=absent.state,
        where=absent.where,
        case=absent.case,
        call=absent.call,
    )
    found = diagnosis_of(waiting, absent, waiting)
    assert found.sentence == f"ranks 0, 2 wait in all_reduce #2 (float [3]), which rank 1 {place}"
    assert found.blame == {1}
    assert found.is_hopeless is is_hopeless


def test_a_rank_that_waits_for_others_outside_of_a_case_is_named_with_the_call() -> None:
    voter = doing(state="votes", call="world.rebuild")
    where = "in world.rebuild"
    assert place_of(voter) == f"the wait for other ranks {where}"
    expected = f"rank 0 waits {where} for rank 1: rank 1 is at {PLACE}"
    assert diagnosis_of(voter, doing()).sentence == expected


def test_a_rank_that_makes_progress_may_still_join() -> None:
    assert diagnose({0: doing(issued("all_reduce", 1)), 2: doing(issued("all_reduce", 1))}, 3) is None


def test_two_groups_in_opposite_order_are_a_deadlock() -> None:
    first, second = (issued("all_reduce", 1, group=name, ranks=(0, 1)) for name in ("1", "2"))
    found = diagnosis_of(doing(first), doing(second))
    assert found.sentence == (
        "deadlock: rank 0 waits in all_reduce #1 (float [3]) of group 1 (ranks 0, 1) for rank 1; "
        "rank 1 waits in all_reduce #1 (float [3]) of group 2 (ranks 0, 1) for rank 0"
    )
    assert found.is_hopeless


def test_ranks_that_wait_for_a_timeout_are_not_hopeless() -> None:
    short, long = (
        issued("all_reduce", 1, group=name, timeout=seconds) for name, seconds in (("1", 2), ("2", 600))
    )
    assert not diagnosis_of(doing(short), doing(long)).is_hopeless
    assert diagnosis_of(doing(long), doing(state="idle")).is_hopeless


def test_a_timeout_beyond_the_deadline_of_the_test_is_hopeless() -> None:
    statuses = {0: doing(issued("all_reduce", 1, timeout=120)), 1: doing(state="idle")}
    found = [diagnose(statuses, 2, deadline) for deadline in (60, 300)]
    assert [each is not None and each.is_hopeless for each in found] == [True, False]


def test_only_members_of_a_group_are_missed() -> None:
    pair = doing(issued("all_reduce", 1, group="1", ranks=(0, 2)))
    assert diagnose({0: pair, 1: doing(state="idle"), 2: pair}, 3) is None
    assert "rank 2 never reached" in diagnosis_of(pair, doing(), doing()).sentence


def test_a_stopped_rank_is_reported_even_if_no_rank_waits() -> None:
    found = diagnosis_of(doing(state="idle"), doing(state="stopped"))
    assert (found.sentence, found.blame, found.is_hopeless) == ("rank 1 is stopped", {1}, True)


RECEIVE = "to receive float32 [3] from rank 0 (recv at test_a.py:7)"


def with_waits(waits: dict[int, str], *ranks: RankStatus) -> Diagnosis | None:
    return diagnose(dict(enumerate(ranks)), len(ranks), waits=waits)


def test_a_rank_that_waits_for_what_none_has_begun_keeps_the_others() -> None:
    found = with_waits({1: RECEIVE}, doing(issued("all_reduce", 1)), doing(call="recv"))
    sentence = f"rank 0 waits in all_reduce #1 (float [3]), which rank 1 never reached: it waits {RECEIVE}"
    assert found == Diagnosis(sentence, frozenset({1}), is_hopeless=True)


def test_ranks_that_all_wait_for_what_none_has_begun_are_a_deadlock() -> None:
    sentence = f"deadlock: rank 0 waits to send; rank 1 waits {RECEIVE}"
    found = with_waits({1: RECEIVE, 0: "to send"}, doing(), doing())
    assert found == Diagnosis(sentence, frozenset(), is_hopeless=True)
    assert with_waits({1: RECEIVE}, doing(), doing()) is None  # the other may still send


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([doing(state="idle")] * 2, "ranks 0, 2 have ended the test"),
        (
            [doing(state="idle"), doing(state="votes", case="n=2")],
            "rank 0 has ended the test; rank 2 is in the wait for other ranks after [n=2]",
        ),
    ],
)
def test_a_wait_for_ranks_that_have_gone_on_is_hopeless(others: list[RankStatus], text: str) -> None:
    found = with_waits({1: RECEIVE}, others[0], doing(call="recv"), others[1])
    assert found == Diagnosis(f"rank 1 waits {RECEIVE}, and {text}", frozenset({0, 2}), is_hopeless=True)


def test_roots_may_differ_where_all_ranks_wait_in_one_broadcast() -> None:
    ranks = [doing(issued("broadcast", 1)), doing(issued("broadcast", 1))]
    sentence = "all ranks wait in broadcast #1 (float [3]): do all name the same source or destination?"
    assert diagnosis_of(*ranks).sentence == sentence
    assert not diagnosis_of(*ranks).is_hopeless  # it may be large
    later = doing(issued("broadcast", 1, in_flight=False), issued("reduce", 2))
    assert "all ranks wait in reduce #2 " in diagnosis_of(later, later).sentence


def test_numbers_count_from_the_beginning_of_the_test() -> None:
    knows = doing(issued("all_reduce", 42), before={DEFAULT_GROUP: 40})
    forgot = doing(issued("barrier", 42, ()))
    assert diagnosis_of(knows, forgot).sentence == (
        "mismatch: rank 0 is in all_reduce #2 (float [3]) while rank 1 is in barrier #2 (float [])"
    )
    own = in_flight(knows)
    assert own is not None
    assert own.number == 2


def test_descriptions_omit_absent_tensors_and_name_other_groups() -> None:
    assert name_of(issued("barrier", 1, dtypes=(), shapes=())) == "barrier #1"
    assert name_of(issued("barrier", 1, group="mesh_dp", dtypes=())) == "barrier #1 of group mesh_dp"


def test_a_meeting_is_named_by_its_call() -> None:
    assert name_of(issued("init_process_group", 1, group=MEETING)) == "init_process_group"
    assert name_of(issued("init_process_group", 2, group=MEETING)) == "init_process_group #2"


def test_a_place_has_the_call_and_the_case() -> None:
    assert place_of(doing()) == PLACE
    assert place_of(doing(case="n=1", call="recv")) == f"recv at {PLACE} [n=1]"
    ended = issued("barrier", 1, (), in_flight=False)
    assert place_of(doing(ended, issued("all_reduce", 2))) == f"all_reduce #2 (float [3]) at {PLACE}"
    assert place_of(doing(state="votes", case="n=1")) == "the wait for other ranks after [n=1]"
    assert place_of(doing(state="votes", call="world.rebuild")) == "the wait for other ranks in world.rebuild"


def test_parties_of_a_mismatch_are_in_the_tense_of_their_state() -> None:
    def past(op: str) -> RankStatus:
        return doing(issued(op, 1, (), in_flight=False))

    ranks = [doing(issued("barrier", 1, ())), past("barrier"), past("all_reduce")]
    assert diagnosis_of(*ranks).sentence.startswith("mismatch: rank 2 was in all_reduce #1 (float []) while ")
    assert diagnosis_of(*ranks).sentence.endswith("ranks 0, 1 are in barrier #1 (float [])")
    over = doing(issued("gather", 1, (), in_flight=False), state="idle")
    assert (
        "ranks 0, 3 were in gather #1"
        in diagnosis_of(past("gather"), ranks[0], ranks[0], over, ranks[0]).sentence
    )
    assert "rank 1 called gather #1" in diagnosis_of(ranks[0], over, ranks[0]).sentence


def test_of_many_parties_a_few_are_named() -> None:
    many = [doing(issued(op, 1, ())) for op in ("a", "b", "c", "d", "e", "e")]
    assert diagnosis_of(*many).sentence.endswith(
        "rank 3 is in d #1 (float []), and 2 ranks more did otherwise"
    )
    assert "otherwise" not in diagnosis_of(*many[:4]).sentence


def test_of_many_runs_of_ranks_the_first_are_named() -> None:
    assert named(range(0, 12, 2)) == "ranks 0, 2, 4, 6, 8, 10"
    assert named(range(0, 14, 2)) == "ranks 0, 2, 4, 6, 8, 2 more"
    assert named([4, 3, 9, 8, 7]) == "ranks 3, 4, 7-9"


def test_the_rank_that_no_other_rank_keeps_waiting_explains_the_wait() -> None:
    first = issued("all_reduce", 1, group="1", ranks=(0, 1))
    second = issued("all_reduce", 1, group="2", ranks=(1, 2))
    found = diagnosis_of(doing(first), doing(second), doing(where="b.py:1 in f"))
    assert found.sentence == (
        "rank 1 waits in all_reduce #1 (float [3]) of group 2 (ranks 1, 2), "
        "which rank 2 never reached: it is at b.py:1 in f"
    )


def test_a_wait_for_a_vote_is_not_hopeless() -> None:
    votes = doing(state="votes", case="n=1")
    found = diagnosis_of(votes, doing(), votes)
    assert found.sentence == f"ranks 0, 2 wait at the end of [n=1] for rank 1: rank 1 is at {PLACE}"
    assert (found.blame, found.is_hopeless) == ({1}, False)


def test_roots_are_suspected_where_all_wait_in_what_has_one() -> None:
    rooted = doing(issued("barrier", 1, (), in_flight=False), issued("broadcast", 2))
    assert diagnosis_of(rooted, rooted).sentence.startswith("all ranks wait in broadcast #2 (float [3]): do ")
    assert diagnose({0: rooted, 1: rooted}, 3) is None
    unrooted = doing(issued("all_reduce", 2))
    assert diagnose({0: unrooted, 1: unrooted}, 2) is None
    gone_on = doing(issued("broadcast", 2, in_flight=False))
    assert diagnose({0: rooted, 1: gone_on}, 2) is None


def test_ranks_that_wait_for_each_other_and_for_a_third_are_a_deadlock() -> None:
    first, second = (issued("all_reduce", 1, group=name, ranks=(0, 1, 2)) for name in ("1", "2"))
    found = diagnosis_of(doing(first), doing(second), doing())
    waits = "waits in all_reduce #1 (float [3]) of group"
    assert found.sentence == (
        f"deadlock: rank 0 {waits} 1 (ranks 0-2) for ranks 1, 2; rank 1 {waits} 2 (ranks 0-2) for ranks 0, 2"
    )


def test_a_deadlock_of_many_ranks_names_a_few_and_a_count() -> None:
    def of(rank: int, group: str) -> RankStatus:
        return doing(issued("all_reduce", 1, group=group, ranks=tuple(range(16))))

    found = diagnosis_of(*(of(rank, "1" if rank % 2 else "2") for rank in range(16)))
    waits = "wait in all_reduce #1 (float [3]) of group"
    even, odd = "ranks 0, 2, 4, 6, 8, 3 more", "ranks 1, 3, 5, 7, 9, 3 more"
    assert found.sentence == (
        f"deadlock: {even} {waits} 2 (ranks 0-15) for {odd}; {odd} {waits} 1 (ranks 0-15) for {even}"
    )
    pairs = [doing(issued("barrier", 1, group=str(rank), ranks=(rank, 15 - rank))) for rank in range(16)]
    assert diagnosis_of(*pairs).sentence.count("waits") == 4
    assert diagnosis_of(*pairs).sentence.endswith("; and so on, 12 more collectives")


def test_many_ranks_that_never_came_are_a_few_and_a_count() -> None:
    found = diagnosis_of(doing(issued("barrier", 1)), *(doing(state="idle") for _ in range(15)))
    assert found.sentence.count("it has ended the test") == 4
    assert found.sentence.endswith("; and so on, 11 more ranks")
    assert found.blame == set(range(1, 16))


def test_two_groups_that_share_a_name_are_not_compared() -> None:
    first = [doing(issued("all_reduce", 1, group="1", ranks=(0, 1))) for _ in range(2)]
    other = [doing(issued("barrier", 1, group="1", ranks=(2, 3), in_flight=False)) for _ in range(2)]
    assert find_mismatch(dict(enumerate([*first, *other])), 4) is None
    wrong = doing(issued("barrier", 1, group="1", ranks=(0, 1)))
    found = find_mismatch(dict(enumerate([wrong, first[1], *other])), 4)
    assert found is not None
    assert found.sentence == (
        "mismatch: rank 0 is in barrier #1 (float [3]) of group 1 (ranks 0, 1) "
        "while rank 1 is in all_reduce #1 (float [3]) of group 1 (ranks 0, 1)"
    )


def test_groups_that_share_a_name_are_counted_each_from_its_own_beginning() -> None:
    first = doing(issued("barrier", 3, group="1", ranks=(0, 1)), before={"1": 2})
    other = doing(issued("barrier", 8, group="1", ranks=(2, 3)), before={"1": 7})
    found = diagnosis_of(first, doing(state="idle"), other, doing(state="idle"))
    assert found.sentence.startswith("rank 0 waits in barrier #1 ")
    assert found.blame == {1, 3}


def test_a_suspicion_is_confirmed_when_it_comes_twice_in_a_row() -> None:
    one = diagnosis_of(doing(issued("all_reduce", 1)), doing(issued("barrier", 1, ())))
    other = diagnosis_of(doing(issued("all_gather", 1)), doing(issued("barrier", 1, ())))
    standstill = Standstill()
    found = [standstill.confirm(each) for each in (one, other, other, None, other, None, None)]
    assert found == [False, False, True, False, False, False, False]
    standstill.confirm(one)
    standstill.forget_suspicion()
    assert not standstill.confirm(one)


def test_a_case_is_ended_alone_once_and_anything_else_with_the_item() -> None:
    found = diagnosis_of(doing(issued("all_reduce", 1)), doing(issued("barrier", 1, ())))
    standstill = Standstill()
    assert standstill.abort("n=1", found)
    assert (standstill.cases, standstill.aborted, standstill.diagnosis) == ({"n=1": found}, "n=1", None)
    assert not standstill.abort("n=1", found)
    assert standstill.diagnosis == found
    of_item = Standstill()
    assert not of_item.abort("", found)
    assert (of_item.cases, of_item.diagnosis) == ({}, found)


def test_failed_cases_of_ranks_that_called_other_collectives_are_mismatches() -> None:
    standstill = Standstill()
    known = diagnosis_of(doing(issued("all_gather", 1)), doing(issued("barrier", 1, ())))
    standstill.abort("n=1", known)
    for case in ("n=1", "n=2"):
        standstill.note_failure(case, 0, doing(issued("all_reduce", 1, in_flight=False)))
        standstill.note_failure(case, 1, doing(issued("barrier", 1, (), in_flight=False)))
    for rank in (0, 1):
        standstill.note_failure("n=3", rank, doing(issued("all_reduce", 2, in_flight=False)))
    standstill.compare_failed_cases(2)
    assert standstill.cases.keys() == {"n=1", "n=2"}
    assert standstill.cases["n=1"] == known
    assert standstill.cases["n=2"].sentence == (
        "mismatch: rank 0 was in all_reduce #1 (float [3]) while rank 1 was in barrier #1 (float [])"
    )
