"""`faults.expect` on one rank: what is caught at its end, and waits for ranks that have gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lockstep.exceptions import PeerFailed
from lockstep.features.injection import expectation as module
from lockstep.features.injection import lost_peers as waits
from lockstep.features.injection.expectation import Expectation, is_lost, patient_waits
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE, EndOfBlock, Expects, Happened, LeavesByError
from lockstep.features.injection.work import Watched
from lockstep.protocol import Agreed, Part, Vote
from suites.selftest.project import wait_for

CASE = "faults.expect('SIGKILL')"
LOST = RuntimeError("gloo: Connection closed by peer\nmore")
DIED = Happened(2, "rank 2 of 3 died: SIGKILL", 5.0)
FAILED = Happened(0, "rank 0 of 3 failed: SIGKILL of its own", 5.0)
DEAD = Vote(CASE, "died")
RAN = Vote(CASE, "ran through")


class Expecting:
    """An expectation of rank 0 of 3; the others vote what is given."""

    def __init__(self, others: Sequence[Vote] = (RAN, DEAD), happened: Sequence[Happened] = (DIED,)) -> None:
        self.done: list[object] = []
        self.votes: list[Vote] = []
        self.others, self.happened = others, happened
        wire = SimpleNamespace(
            send=lambda part: self.done.append(("send", part)),
            post=lambda part: self.done.append(("post", part)),
        )
        rank: Any = SimpleNamespace(wire=wire, meet=self._meet, abort=lambda: self.done.append("aborts"))
        faults: Any = SimpleNamespace(rank=0, size=1, misses=lambda: ["one missed", "two missed"])
        self.context = Expectation(rank, faults, LostPeers(), "SIGKILL", 3.0)

    def _meet(self, vote: Vote) -> Agreed:
        self.votes.append(vote)
        return Agreed((vote, *self.others), {FEATURE: tuple(self.happened)})

    def run(self, error: BaseException | None = None) -> Expectation:
        with self.context as entered:
            assert entered is self.context
            if error is not None:
                raise error
        return self.context


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """The layers that are installed."""
    installed: list[tuple[Any, bool]] = []

    @contextlib.contextmanager
    def layer(layer: Any, is_innermost: bool) -> Iterator[None]:
        installed.append((layer, is_innermost))
        yield
        installed.pop()

    monkeypatch.setattr(module, "INTERCEPTION", SimpleNamespace(layer=layer))
    return installed


def test_a_rank_that_sees_nothing_of_the_fault_goes_on(layers: list[object]) -> None:
    expecting = Expecting()
    made = expecting.context
    assert (made.error, made.seconds, made.cause) == (None, None, "")
    with made:
        assert len(layers) == 1
        assert expecting.done == [("send", Part(FEATURE, Expects("SIGKILL", 3.0)))]
    assert layers == []
    assert (made.error, made.seconds, made.cause) == (None, None, DIED.text)
    (vote,) = expecting.votes
    assert isinstance(vote.more, EndOfBlock)
    assert vote.more.at > 1e9
    assert vote == Vote(CASE, "ran through", "one missed; two missed", vote.more, inside=True)
    assert len(expecting.done) == 1


def test_the_error_of_a_lost_collective_is_caught() -> None:
    expecting = Expecting()
    made = expecting.run(LOST)
    assert made.error is LOST
    assert made.cause == DIED.text
    assert made.seconds is not None
    assert made.seconds > 1e9  # since 1970
    assert expecting.done[1:] == ["aborts", ("post", Part(FEATURE, LeavesByError()))]
    (vote,) = expecting.votes
    assert (vote.outcome, vote.reason) == ("lost others", "RuntimeError: gloo: Connection closed by peer")
    late = Expecting(happened=[Happened(2, "died: SIGKILL", 1e12)])
    assert late.run(LOST).seconds == 0.0
    assert Expecting().run(RuntimeError("gloo: Broken pipe")).error is not None


def test_the_error_that_was_expected_of_this_rank_is_caught() -> None:
    own = ValueError()
    expecting = Expecting([RAN, RAN], [FAILED])
    assert expecting.run(own).error is own
    assert (expecting.votes[0].outcome, expecting.votes[0].reason) == ("failed", "ValueError: ")


def test_another_error_of_this_rank_is_raised() -> None:
    with pytest.raises(ValueError, match="own"):
        Expecting().run(ValueError("own"))
    other = Happened(0, "rank 0 of 3 failed: ValueError: own", 4.0)
    with pytest.raises(ValueError, match="own"):
        Expecting(happened=[other, DIED]).run(ValueError("own"))


def test_what_ends_the_run_is_raised_at_once() -> None:
    expecting = Expecting()
    with pytest.raises(KeyboardInterrupt):
        expecting.run(KeyboardInterrupt())
    assert (len(expecting.done), expecting.votes) == (1, [])


@pytest.mark.parametrize("error", [AssertionError("no"), pytest.skip.Exception("no")])
def test_a_claim_of_this_rank_fails_once_the_others_know(error: BaseException) -> None:
    expecting = Expecting()
    with pytest.raises(type(error), match="no"):
        expecting.run(error)
    assert [vote.outcome for vote in expecting.votes] == ["claimed"]
    assert expecting.done[1] == "aborts"


@pytest.mark.parametrize("vote", [Vote(CASE, "claimed"), Vote(CASE, "failed"), Vote("a=1", "failed")])
def test_a_rank_follows_those_that_fail_for_another_reason(vote: Vote) -> None:
    with pytest.raises(PeerFailed, match=r"^this case failed on another rank: rank 1$"):
        Expecting([vote, DEAD]).run()
    with pytest.raises(PeerFailed, match=r"rank 1, 2$"):
        Expecting([vote, vote], [Happened(3, "SIGKILL", 1.0)]).run()


@pytest.mark.parametrize("vote", [Vote("a=1", "passed"), Vote("", "met")])
def test_all_ranks_come_to_the_end(vote: Vote) -> None:
    with pytest.raises(RuntimeError, match=r"all ranks have to enter it, and come to its end$"):
        Expecting([vote, DEAD]).run()
    Expecting([Vote("", "ended"), Vote("", "died")]).run()


def test_a_failure_that_was_expected_of_another_rank_is_not_followed() -> None:
    happened = [Happened(1, "rank 1 of 3 failed: SIGKILL", 1.0)]
    assert Expecting([Vote(CASE, "failed"), RAN], happened).run().cause == happened[0].text


def test_the_first_thing_that_was_expected_is_the_cause() -> None:
    first = Happened(1, "other", 1.0)
    later = Happened(1, "SIGKILL too", 1.0)
    assert Expecting(happened=[first, DIED, later]).run().cause == DIED.text


def test_what_never_struck_is_said_where_nothing_happened() -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        Expecting([RAN, Vote(CASE, "ran through", "three missed")], []).run()
    assert str(failed.value).splitlines() == [
        f"{CASE}: nothing happened to any rank",
        *("one missed; two missed", "three missed"),
    ]
    with pytest.raises(pytest.fail.Exception, match=r"instead: rank 1 lost others: gloo; rank 2 ended the"):
        Expecting([Vote(CASE, "lost others", "gloo"), Vote("", "ended")], []).run()
    with pytest.raises(pytest.fail.Exception) as failed:
        Expecting([Vote("", "ended"), Vote("", "ended", "x")], [Happened(1, "rank 1 left", 0.0)]).run()
    assert str(failed.value).splitlines()[0] == (
        f"{CASE}: this happened instead: rank 1 left; rank 2 ended the test"
    )


@pytest.mark.parametrize(
    ("error", "of_peer"),
    [
        (RuntimeError("[gloo/transport] Connection reset by peer"), True),
        (RuntimeError("gloo timed out"), True),
        (RuntimeError("gloo\nTimeout of 3 s"), True),
        (RuntimeError("monitoredBarrier: rank 1"), True),
        (RuntimeError("CollectiveTimeout"), True),
        (dist.DistBackendError("NCCL aborted"), True),
        (RuntimeError("timed out"), False),
        (RuntimeError("mismatch"), False),
        (OSError("gloo: Broken pipe"), False),
    ],
)
def test_an_error_of_a_lost_collective_is_known(error: Exception, of_peer: bool) -> None:
    assert is_lost(error) is of_peer


# Waits


class Group:
    """A process group in which ranks 0 and 2 are."""

    group_name = "7"


def call_of(op: str = "all_reduce", group: Any = None) -> Any:
    about = SimpleNamespace(op=op)
    return SimpleNamespace(
        about=about, group=group, written=[torch.ones(1)], read=[], result=["r"], title=lambda n: f"{op} #{n}"
    )


def test_waits_of_gloo_are_patient(monkeypatch: pytest.MonkeyPatch, layers: list[tuple[Any, bool]]) -> None:
    config = ["cpu:gloo,cuda:nccl"]
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config[0])
    group, stranger = Group(), Group()
    rank: Any = SimpleNamespace(group=SimpleNamespace(members=lambda: [(group, (0, 2))]))
    lost: Any = SimpleNamespace(await_end=Mock())
    work = Mock(spec=dist.Work)
    ran: list[object] = []

    def run(written: object, read: object) -> Any:
        ran.append((written, read))
        return work

    with patient_waits(rank, lost):
        ((layer, is_innermost),) = layers
        assert is_innermost
        call = call_of(group=group)
        watched = layer(call, run)
        assert isinstance(watched, Watched)
        assert ran == [(call.written, call.read)]
        watched.wait()
        lost.await_end.assert_called_once_with(work, {0, 2}, "all_reduce #1")
        assert layer(call_of(group=stranger), run) is work
        assert layer(call, lambda *_: None) is None
        for op in ("send", "recv", "recv_any_source", "monitored_barrier"):
            assert layer(call_of(op, group), run) is work
        barrier = call_of("barrier", group)
        barrier.written = []
        layer(barrier, run).wait()
        assert lost.await_end.call_args.args[2] == "barrier #8"
        config[0] = "cpu:shm"
        assert layer(call, run) is work
        config[0] = "cpu:gloo"
        mixed = call_of(group=group)
        mixed.read = [torch.ones(1, device="meta")]
        assert layer(mixed, run) is work
    assert layers == []


class Work(dist.Work):
    """A collective that is over when its future is."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def get_future(self) -> Any:
        return self.future


def awaiting(peers: LostPeers, work: dist.Work, members: set[int]) -> tuple[threading.Thread, list[str]]:
    """Wait on a thread for a collective; return it, and what came of the wait."""
    ended: list[str] = []

    def wait() -> None:
        try:
            peers.await_end(work, members, "all_reduce #1")
            ended.append("over")
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, ended


def waiters_of(peers: LostPeers) -> object:
    changed: Any = peers._changed
    return changed._waiters


def test_a_wait_ends_with_its_collective() -> None:
    work, peers = Work(), LostPeers()
    thread, ended = awaiting(peers, work, {0, 1})
    wait_for(lambda: waiters_of(peers), "the wait")
    work.future.set_result(None)
    thread.join(10)
    assert ended == ["over"]


def test_a_wait_for_a_rank_that_has_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "GIVES_UP_AFTER", 0.01)
    peers = LostPeers()
    thread, ended = awaiting(peers, Work(), {0, 1, 2})
    wait_for(lambda: waiters_of(peers), "the wait")
    peers.note(1)
    thread.join(10)
    assert ended == [
        "gloo: Connection closed by peer: all_reduce #1 did not end within 0.01 s of the loss of rank 1"
    ]
    peers.note(0)
    thread, ended = awaiting(peers, Work(), {2, 1, 0})
    thread.join(60)
    assert ended[0].endswith("of the loss of rank 0, 1")
    assert is_lost(RuntimeError(ended[0]))


def test_a_wait_without_the_rank_that_has_gone_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    left: list[float | None] = []
    peers, work = LostPeers(), Work()

    def wait(seconds: float | None) -> None:
        left.append(seconds)
        work.future.set_result(None)

    monkeypatch.setattr(peers._changed, "wait", wait)
    peers.note(3)
    peers.await_end(work, {0, 1}, "x")
    peers.note(1)
    now[0] = 102.0
    peers.note(1)
    work = Work()
    peers.await_end(work, {0, 1}, "x")
    assert left == [None, 5.0]  # it has begun after the loss
    peers.clear()
    work = Work()
    peers.await_end(work, {0, 1}, "x")
    assert left[2:] == [None]


def test_the_first_loss_counts_from_when_the_wait_had_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(waits.time, "monotonic", lambda: now[0])
    peers, work, left = LostPeers(), Work(), list[float | None]()

    def wait(seconds: float | None) -> None:
        left.append(seconds)
        now[0] += 2.0
        peers.note(len(left))
        if len(left) == 3:
            work.future.set_result(None)

    monkeypatch.setattr(peers._changed, "wait", wait)
    peers.await_end(work, {1, 2, 3}, "x")
    assert left == [None, 5.0, 3.0]


def test_a_collective_without_a_future_is_waited_for_on_a_thread() -> None:
    class Plain(dist.Work):
        goes_on = threading.Event()
        error: Exception | None = None

        def get_future(self) -> Any:
            raise RuntimeError("Work::getFuture not implemented")

        def wait(self, *_: object) -> bool:
            self.goes_on.wait(60)
            if self.error:
                raise self.error
            return True

    for error in (None, ValueError("its own wait raises it")):
        work = Plain()
        work.error = error
        work.goes_on.clear()
        future = waits._future_of(work)
        assert not future.done()
        (thread,) = (each for each in threading.enumerate() if each.name == "waits-in-gloo")
        assert thread.daemon
        work.goes_on.set()
        assert future.wait() is None
        thread.join(60)
