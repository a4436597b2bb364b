"""The examples of a property test, which all ranks run and end together."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from hypothesis import core
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData, DataObserver
from hypothesis.internal.scrutineer import Tracer

from lockstep.exceptions import PeerFailed
from lockstep.features.properties import examples
from lockstep.features.properties.crashed import RankCrashed
from lockstep.features.properties.desync import OutOfStep
from lockstep.features.properties.examples import ABORT_AFTER, MAX_HUNG, Examples
from lockstep.features.properties.messages import (
    CrashedExample,
    ExampleResult,
    RunningExample,
    Search,
    read_running_example,
)
from lockstep.protocol import TRIAL, VICTIM_OF_A_TRIAL, Vote
from lockstep.recorders import ExecutionLog
from suites.selftest.properties.stand_ins import (
    ORIGIN,
    Peers,
    begin_attempt,
    fail,
    raising,
    same_vote,
    with_result,
)


def _other_failed(vote: Vote) -> Vote:
    if not vote.case.startswith(TRIAL):
        return vote
    changes = {"origin": ORIGIN, "lost_connection": False, "seconds": MAX_HUNG * 2, "targets": {"loss": 2.0}}
    return with_result(vote, "failed", **changes)


def test_an_example_that_passes_on_all_ranks_is_one_step_of_the_search(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return with_result(vote, "passed", seconds=40.0, targets={"loss": 2.0})

    peers, engine = Peers(tmp_path, answer, rank=1), Mock(spec=DataObserver)
    for _ in range(2):
        assert peers.run(lambda data: data.draw_integer(0, 9), 4, engine=engine) == 4
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1", f"{TRIAL}2"]
    assert peers.rank.begin_case.mock_calls == [call(f"{TRIAL}{each}", f"{TRIAL}{each}") for each in (1, 2)]
    assert [each.number for each in peers.in_vote if each is not None] == [1, 2]
    assert read_running_example(peers.path) is None
    assert (peers.waits, peers.examples.clock.monotonic()) == ([None, None], 40.0)
    assert peers.data.target_observations == {"loss": 2.0}
    assert engine.draw_integer.call_count == 2
    assert not peers.examples.must_stop()
    assert peers.rank.repair.mock_calls == []


def test_an_example_that_all_ranks_reject_is_rejected(tmp_path: Path) -> None:
    peers = Peers(tmp_path, same_vote)
    with pytest.raises(UnsatisfiedAssumption, match="odd"):
        peers.run(raising(UnsatisfiedAssumption("odd")))
    assert peers.waits == [None]


@pytest.mark.parametrize(
    ("place", "act"), [(TRIAL, print), ("the draws", print), ("the end", fail), ("what", fail), ("", fail)]
)
def test_frames_of_the_search_are_left_out_of_tracebacks(
    tmp_path: Path, place: str, act: Callable[[ConjectureData], None]
) -> None:
    def answer(vote: Vote) -> Vote:
        if place and vote.case.startswith(place):
            return replace(vote, case="another place")
        return with_result(vote, "passed", choices=b"another") if vote.case == f"{TRIAL}1" else vote

    peers = Peers(tmp_path, answer)
    peers.rank.hook.pytest_ranks_example.return_value = None
    body = peers.examples.wrap_body(act)
    with pytest.raises(OutOfStep if place else ValueError) as raised:
        peers.run(body)
    ours = [entry for entry in raised.traceback if Path(entry.path).parent.name == "properties"]
    ours = [entry for entry in ours if Path(entry.path).parent != Path(__file__).parent]
    assert ours
    assert [entry.name for entry in ours if not entry.ishidden(raised)] == []


def test_a_failure_on_this_rank_frees_the_others_and_is_raised(tmp_path: Path) -> None:
    peers = Peers(tmp_path, lambda vote: with_result(vote, "passed") if vote.outcome == "failed" else vote)
    with pytest.raises(ValueError, match="wrong") as failure:
        peers.run(fail)
    assert peers.waits == [ABORT_AFTER, None]
    assert peers.votes[1].case == f"the end of {TRIAL}1"
    assert peers.votes[1].renews_deadline
    assert peers.rank.repair.mock_calls == []
    assert vars(failure.value)["_lockstep_origin"].exc_type.__name__ == "ValueError"
    assert read_running_example(peers.path) is None


def test_a_failure_on_another_rank_fails_the_example_here_at_its_line(tmp_path: Path) -> None:
    peers, engine = Peers(tmp_path, _other_failed), Mock(spec=DataObserver)
    with pytest.raises(PeerFailed) as failure:
        peers.run(lambda data: data.draw_integer(0, 9), 4, engine=engine)
    assert str(failure.value) == f"{VICTIM_OF_A_TRIAL}rank 1"
    origin = vars(failure.value)["_lockstep_origin"]
    assert (origin.exc_type.__name__, origin.filename, origin.lineno) == ("ValueError", "elsewhere.py", 3)
    assert engine.draw_integer.call_count == 1
    assert peers.data.target_observations == {"loss": 2.0}
    with pytest.raises(PeerFailed):
        peers.run(raising(UnsatisfiedAssumption("odd")))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_connection_broke_is_not_the_culprit(tmp_path: Path, rank: int) -> None:
    peers = Peers(tmp_path, _other_failed, rank=rank)
    with pytest.raises(RuntimeError, match="gloo") as failure:
        peers.run(raising(RuntimeError("[gloo] Connection closed by peer")))
    assert vars(failure.value)["_lockstep_origin"].filename == "elsewhere.py"
    assert not peers.examples.must_stop()


@pytest.mark.parametrize(("rank", "kept"), [(0, (5,)), (1, (4,))])
def test_all_ranks_take_the_draws_of_the_first_that_failed(
    tmp_path: Path, rank: int, kept: tuple[int, ...]
) -> None:
    (tmp_path / "other").mkdir()
    other = begin_attempt(tmp_path / "other", 5)
    other.data.draw_integer(0, 9)

    def answer(vote: Vote) -> Vote:
        if vote.case == f"{TRIAL}1":
            return with_result(vote, "passed" if rank else "failed", choices=b"another", origin=ORIGIN)
        return replace(vote, more=other.keep()) if vote.case.startswith("what") else vote

    peers, engine = Peers(tmp_path, answer, rank=rank), Mock(spec=DataObserver)

    def act(data: ConjectureData) -> None:
        data.draw_integer(0, 9)
        if rank:
            fail(data)

    with pytest.raises(ValueError if rank else PeerFailed, match="wrong" if rank else "rank 1"):
        peers.run(act, 4, engine=engine)
    assert engine.draw_integer.call_args.args == kept
    handed = [vote.more is not None for vote in peers.votes if vote.case == f"what {TRIAL}1 has drawn"]
    assert handed == [bool(rank)]


@pytest.mark.parametrize(("here", "there"), [(True, True), (False, True), (True, False), (False, None)])
def test_a_group_that_a_failure_has_broken_is_made_again(
    tmp_path: Path, here: bool, there: bool | None
) -> None:
    def answer(vote: Vote) -> Vote:
        if vote.case != f"the end of {TRIAL}1":
            return vote
        _, collectives, groups = vote.more
        state = (False, collectives + 1, groups) if there is None else (there, collectives, groups)
        return replace(vote, more=state)

    peers = Peers(tmp_path, answer)
    peers.rank.group.is_aborted = here
    repairs: list[str] = []

    def repair() -> None:
        repairs.append("made again")

    def later() -> int:
        return 1

    peers.rank.repair = repair
    # As the explain phase does, which lists lines that only failing examples run.
    with Tracer(should_trace=True) as tracer:
        with pytest.raises(ValueError, match="wrong"):
            peers.run(fail)
        later()
    assert repairs == ["made again"]
    seen = {line for _, (file, line) in tracer.branches if file == __file__}
    assert later.__code__.co_firstlineno + 1 in seen
    assert repair.__code__.co_firstlineno + 1 not in seen


def test_a_search_counts_the_time_of_examples_in_which_others_only_waited(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        if not vote.case.startswith(TRIAL):
            return vote
        return with_result(vote, "passed", origin=None, lost_connection=False, seconds=MAX_HUNG + 1)

    peers = Peers(tmp_path, answer, rank=1)
    with pytest.raises(RuntimeError):
        peers.run(raising(RuntimeError("[gloo] Connection closed by peer")))
    assert peers.examples.must_stop()


def test_each_test_counts_its_examples_and_its_time_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = Peers(tmp_path, same_vote)
    assert not Examples(peers.rank, records=False).is_active
    moments = iter([5.0, 7.0, 20.0, 23.0])
    monkeypatch.setattr(examples, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    drawn = []
    for _ in range(2):
        peers.examples.begin_item(Search(entropy=5))
        drawn.append(core.threadlocal._hypothesis_global_random.getrandbits(64))
        peers.run(print)
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1"] * 2
    assert [ExampleResult.unpack(vote.more).seconds for vote in peers.votes] == [2.0, 3.0]
    assert drawn == [random.Random(5).getrandbits(64)] * 2


def test_a_search_ends_once_examples_in_which_no_rank_went_on_took_too_long(tmp_path: Path) -> None:
    seconds = iter([15.0, MAX_HUNG, MAX_HUNG + 1])

    def answer(vote: Vote) -> Vote:
        if not vote.case.startswith(TRIAL):
            return vote
        return with_result(vote, "failed", seconds=next(seconds))

    peers = Peers(tmp_path, answer, rank=1)
    stopped = []
    for _ in range(3):
        with pytest.raises(RuntimeError):
            peers.run(raising(RuntimeError("[gloo] Connection closed by peer")))
        stopped.append(peers.examples.must_stop())
    assert stopped == [False, False, True]
    peers.examples.begin_item(Search())
    assert not peers.examples.must_stop()
    assert peers.examples.clock.now == 0.0


@pytest.mark.parametrize(("continues", "has_met", "stops"), [(0, 1, True), (1, 1, False), (0, 0, False)])
def test_a_search_that_is_not_to_continue_ends_with_its_last_crash(
    tmp_path: Path, continues: int, has_met: int, stops: bool
) -> None:
    peers = Peers(tmp_path, same_vote)
    peers.examples.seed = 7
    peers.examples.begin_item(Search(continues=bool(continues)))
    assert (peers.examples.is_active, peers.examples.seed) == (True, None)
    peers.examples.crash_guard.has_met_last = bool(has_met)
    assert peers.examples.must_stop() is stops


def test_ranks_begin_a_property_with_facts_in_any_order(tmp_path: Path) -> None:
    peers = Peers(tmp_path, same_vote)
    for facts in ({"test": "x", "seed": "5"}, {"seed": "5", "test": "x"}):
        peers.examples.begin_run("f", facts)
        for _ in range(2):
            peers.run(lambda data: data.draw_integer(0, 9), 4)
    begun = [vote for vote in peers.votes if vote.case == "the property f"]
    assert [vote.outcome for vote in begun] == ["exchanged", "exchanged"]
    assert begun[0].more == begun[1].more
    peers.examples.begin_run("f", {"test": "x", "seed": "6"})
    assert peers.votes[-1].more != begun[0].more
    assert [(each.run, each.number) for each in peers.in_vote if each is not None] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


def test_a_body_runs_in_the_context_of_other_features(tmp_path: Path) -> None:
    peers = Peers(tmp_path, same_vote)
    entered: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    for found in (None, context()):
        peers.rank.hook.pytest_ranks_example.return_value = found
        body = peers.examples.wrap_body(lambda *given, **named: entered.append("body") or (given, named))
        assert body(1, two=2) == ((1,), {"two": 2})
    assert entered == ["body", "in", "body", "out"]


def test_examples_are_recorded_where_a_rank_records(tmp_path: Path) -> None:
    peers = Peers(tmp_path, same_vote)
    assert isinstance(peers.examples.recorded(), contextlib.nullcontext)
    peers.rank.spec.session.cwd = str(tmp_path)
    assert isinstance(Examples(peers.rank, records=True).recorded(), ExecutionLog)


def test_the_crash_of_a_rank_in_step_is_not_run_again(tmp_path: Path) -> None:
    peers = Peers(tmp_path, same_vote)
    peers.examples.begin_item(Search(crashed=(CrashedExample(RunningExample(0, 1, b"", True), "how"),)))
    body = peers.examples.crash_guard.wrap_body(lambda: "never")
    with pytest.raises(RankCrashed):
        peers.run(lambda _: body())
    assert peers.votes[0].outcome == "failed"
