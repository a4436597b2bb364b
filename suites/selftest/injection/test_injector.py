"""Faults on one rank, without ranks: which collective they meet, what happens there, and what is reported."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.exceptions import InjectedFault
from lockstep.features.injection import injector
from lockstep.features.injection.calls import Call
from lockstep.features.injection.faults import Fault
from lockstep.features.injection.injector import Armed, Faults, InjectedFaults, check, faults_of
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE, FaultHit, NewExample
from lockstep.features.injection.work import Watched
from lockstep.protocol import Part
from lockstep.recorders.collectives import Collective


def call_of(op: str = "all_reduce", group: str = "0", dtype: torch.dtype = torch.float32) -> Call:
    tensor = torch.ones(3).to(dtype)
    about = Collective(op, (dtype,), ((3,),), 12, 2, 0, False, "", group)
    of: Any = SimpleNamespace(group_name=group)
    return Call(about, of, [tensor], [], True, True, [tensor], False)


class Injected:
    """The faults of rank 1 of 3, what was sent, and the layers that were installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[tuple[str, object]] = []
        self.layers: list[object] = []
        self.forgotten = 0
        wire = SimpleNamespace(
            send=lambda part: self.sent.append(("send", part)),
            post=lambda part: self.sent.append(("post", part)),
        )
        self.rank = SimpleNamespace(wire=wire, dead=set[int](), left_behind=set[int]())
        self.world = SimpleNamespace(rank=1, size=3)
        self.faults = Faults(self.rank, self.world, LostPeers())  # type: ignore[arg-type]
        monkeypatch.setattr(injector, "INTERCEPTION", SimpleNamespace(layer=self._layer, forget=self._forget))
        monkeypatch.setattr(injector, "caller", lambda: "test_x.py:3")

    @contextlib.contextmanager
    def _layer(self, layer: object) -> Iterator[None]:
        self.layers.append(layer)
        yield
        self.layers.remove(layer)

    def _forget(self) -> None:
        self.forgotten += 1

    def run(self, call: Call | None = None, ran: list[object] | None = None) -> Any:
        def run(written: Any, read: Any) -> Any:
            if ran is not None:
                ran.append((written, read))

        return self.faults._run(call or call_of(), run)

    @property
    def hits(self) -> list[str]:
        return [part.data.text for how, part in self.sent if isinstance(part, Part) and how == "send"]


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Injected:
    return Injected(monkeypatch)


METHODS: list[tuple[Callable[[Faults], Any], Fault]] = [
    (lambda faults: faults.delay(0.5, rank=1), Fault("delay", 1, seconds=0.5)),
    (lambda faults: faults.fail(KeyError, after="barrier"), Fault("fail", after="barrier", error=KeyError)),
    (lambda faults: faults.kill(nth=2), Fault("kill", nth=2)),
    (lambda faults: faults.stop(), Fault("stop")),
    (lambda faults: faults.hang(), Fault("hang")),
    (lambda faults: faults.corrupt(2.0, op="reduce"), Fault("corrupt", op="reduce", value=2.0)),
    (lambda faults: faults.drop(dtype=torch.int8), Fault("drop", dtype=torch.int8)),
]


@pytest.mark.parametrize(("inject", "fault"), METHODS)
def test_each_method_injects_its_fault(
    injected: Injected, inject: Callable[[Faults], Any], fault: Fault
) -> None:
    injection = inject(injected.faults)
    assert [armed.fault for armed in injected.faults._armed] == [fault]
    assert [armed.required for armed in injected.faults._armed] == [True]
    assert not injection.has_struck


def test_collectives_are_seen_as_long_as_a_fault_of_this_rank_waits(injected: Injected) -> None:
    faults = injected.faults
    faults.inject(Fault("kill", 0), Fault("kill", 2))
    assert (injected.layers, faults._armed) == ([], [])
    with faults.inject(Fault("delay", 1, seconds=0.1), Fault("kill", 0), required=False):
        assert injected.layers == [faults._run]
        (before,) = faults._armed
        assert not before.required
        with faults.inject(Fault("delay", seconds=0.1), required=False):
            assert (len(injected.layers), len(faults._armed)) == (1, 2)
        with pytest.raises(KeyError), faults.inject(Fault("delay", seconds=0.1)):
            raise KeyError
        assert faults._armed == [before]
        assert len(injected.layers) == 1
    assert injected.layers == []
    faults.inject(Fault("kill", 1))
    assert len(injected.layers) == 1
    assert injected.forgotten == 0
    faults.end()
    assert (injected.layers, faults._armed, injected.forgotten) == ([], [], 1)


@pytest.mark.parametrize(("size", "ranks"), [(1, "the world has rank 0"), (3, "the world has ranks 0 to 2")])
def test_a_rank_that_the_world_lacks_is_refused(injected: Injected, size: int, ranks: str) -> None:
    injected.world.size = size
    with pytest.raises(ValueError, match=rf"^faults.kill\(rank={size}, nth=1\): {ranks}$"):
        injected.faults.inject(Fault("delay", 0, seconds=1.0), Fault("kill", size))
    assert injected.layers == []
    injected.faults.inject(Fault("kill", size - 1))


def test_the_collective_that_is_counted_is_met(injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(injector.time, "sleep", slept.append)
    injection = injected.faults.delay(0.25, nth=2, before="all_reduce")
    ran: list[object] = []
    call = call_of()
    injected.run(call, ran)
    injected.run(call_of("barrier"), ran)
    assert (slept, injection.has_struck, injected.hits) == ([], False, [])
    injected.run(call, ran)
    injected.run(call, ran)
    assert (slept, injection.has_struck) == ([0.25], True)
    assert len(ran) == 4
    assert ran[0] == (call.written, call.read)
    assert injected.hits == ["rank 1 waits 250 ms before all_reduce #2 (float32[3], 2 ranks) at test_x.py:3"]
    ((_, part),) = injected.sent
    assert isinstance(part, Part)
    assert part.feature == FEATURE
    assert isinstance(part.data, FaultHit)
    assert abs(part.data.at - time.time()) < 60


def test_a_place_without_python_code_is_left_out(injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector, "caller", lambda: injector.NO_CODE)
    monkeypatch.setattr(Call, "phase", lambda self: " in backward")
    injected.faults.drop()
    injected.run()
    assert injected.hits == ["rank 1 leaves out all_reduce #1 (float32[3], 2 ranks) in backward"]


def test_a_failure_comes_before_or_after_the_collective(injected: Injected) -> None:
    ran: list[object] = []
    with injected.faults.fail(before="any"), pytest.raises(InjectedFault) as failed:
        injected.run(ran=ran)
    assert str(failed.value) == "injected before all_reduce #1 (float32[3], 2 ranks)"
    assert ran == []
    with injected.faults.fail(KeyError, after="any"):
        work = injected.run(ran=ran)
        assert len(ran) == 1
        with pytest.raises(KeyError, match="injected after all_reduce #1"):
            work.wait()
    own = OSError("own")
    with injected.faults.fail(own), pytest.raises(OSError, match="own") as raised:
        injected.run()
    assert raised.value is own
    with injected.faults.fail(after="monitored_barrier"), pytest.raises(InjectedFault):
        injected.run(call_of("monitored_barrier"), ran)
    assert len(ran) == 2


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_signal_goes_to_this_process(
    injected: Injected, monkeypatch: pytest.MonkeyPatch, kind: Any, number: int
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(injector.os, "kill", lambda *args: sent.append(args))
    injected.faults.inject(Fault(kind))
    injected.run()
    assert sent == [(os.getpid(), number)]


def test_a_rank_hangs_at_its_collective(injected: Injected, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs: list[str] = []
    monkeypatch.setattr(injector, "injected_hang", lambda: hangs.append("hangs"))
    injected.faults.hang()
    injected.run()
    assert hangs == ["hangs"]


def test_an_injected_hang_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([True, True])
    monkeypatch.setattr(injector.threading, "Lock", lambda: SimpleNamespace(acquire=lambda: next(ends)))
    with pytest.raises(StopIteration):
        injector.injected_hang()


def test_the_handle_of_a_collective_that_runs_on_stays(injected: Injected) -> None:
    injected.faults.inject(Fault("delay", seconds=1e-6), Fault("drop", nth=3))
    for _ in range(2):
        assert injected.faults._run(call_of(), lambda *_: "work") == "work"  # type: ignore[arg-type,return-value]


def test_an_output_is_corrupted_once_it_is_there(injected: Injected) -> None:
    injected.faults.corrupt(7.0)
    call = call_of()
    work = injected.run(call)
    assert isinstance(work, Watched)
    assert call.written[0].tolist() == [1.0, 1.0, 1.0]
    assert injected.hits == []
    work.wait()
    assert call.written[0].tolist() == [7.0, 1.0, 1.0]
    assert injected.hits == ["rank 1 gets 7 from all_reduce #1 (float32[3], 2 ranks) at test_x.py:3"]


def test_a_collective_that_is_left_out_has_a_handle(injected: Injected) -> None:
    injected.faults.drop()
    ran: list[object] = []
    call = call_of()
    work = injected.run(call, ran)
    assert ran == []
    assert isinstance(work, Watched)
    assert work.wait()
    assert work.result() == call.result
    injected.run(call, ran)
    assert len(ran) == 1
    with injected.faults.drop():
        assert injected.run(call_of("monitored_barrier"), ran) is None
    assert len(ran) == 1


MATCHES: list[tuple[Fault, Call, bool]] = [
    (Fault("drop"), call_of(), True),
    (Fault("drop", op="any"), call_of(), True),
    (Fault("drop", op="all_reduce"), call_of("all_reduce_coalesced"), True),
    (Fault("drop", op="all_reduce_coalesced"), call_of("all_reduce_coalesced"), True),
    (Fault("drop", op="all_reduce_coalesced"), call_of(), False),
    (Fault("drop", op="reduce"), call_of(), False),
    (Fault("drop", dtype=torch.float32), call_of(), True),
    (Fault("drop", dtype=torch.float64), call_of(), False),
    (Fault("drop", where=lambda each: each.nbytes == 12), call_of(), True),
    (Fault("drop", where=lambda each: each.index == 1), call_of(), False),
]


@pytest.mark.parametrize(("fault", "call", "is_met"), MATCHES)
def test_a_fault_meets_what_it_names(fault: Fault, call: Call, is_met: bool) -> None:
    assert Armed(fault, True).counts(call) is is_met


def test_only_an_output_with_elements_is_corrupted() -> None:
    about, empty = call_of().about, torch.empty(0)
    for written, is_met in (([], False), ([empty], False), ([empty, torch.ones(1)], True)):
        call = Call(about, call_of().group, written, [], True, True, [], False)
        assert Fault("corrupt").matches(call, about) is is_met
        assert Fault("drop").matches(call, about)


def test_a_dtype_is_that_of_what_is_sent() -> None:
    def call(read: list[Tensor]) -> Call:
        return Call(call_of().about, call_of().group, [torch.ones(1)], read, False, True, [], False)

    fault = Fault("drop", dtype=torch.int8)
    sent = torch.ones(1, dtype=torch.int8)
    assert fault.matches(call([sent]), call_of().about)
    assert not fault.matches(call([]), call_of().about)
    assert not Fault("drop", dtype=torch.float32).matches(call([sent]), call_of().about)


def test_the_predicate_of_a_fault_counts_collectives_since_it_was_injected() -> None:
    indices: list[int] = []
    armed = Armed(Fault("drop", where=lambda each: bool(indices.append(each.index))), True)
    for _ in range(3):
        assert not armed.counts(call_of())
    assert indices == [0, 1, 2]


def test_a_fault_that_never_struck_lists_what_ran() -> None:
    armed = Armed(Fault("drop", 1, op="barrier", nth=3), True)
    head = 'faults.drop(rank=1, op="barrier", nth=3) never struck: '
    assert armed.miss(1) == f"{head}no collective has matched; since it was injected, rank 1 ran none"
    armed.counts(call_of("barrier"))
    ran = "since it was injected, rank 1 ran barrier #1 (float32[3], 2 ranks)"
    assert armed.miss(1) == f"{head}1 collective has matched; {ran}"
    armed.counts(call_of("barrier"))
    for _ in range(6):
        armed.counts(call_of())
    assert armed.miss(1).startswith(f"{head}2 collectives have matched; {ran}, barrier #2 (")
    armed.counts(call_of())
    assert "matched; since it was injected, rank 1 ran 1 before, barrier #2 (" in armed.miss(1)
    assert armed.miss(1).endswith(", all_reduce #9 (float32[3], 2 ranks)")
    armed.counts(call_of("barrier"))
    why = "its collective was begun, and its handle never waited for; since"
    assert armed.miss(1).startswith(head + why)
    armed.has_struck = True
    assert armed.miss(1) == ""


def test_only_faults_that_have_to_strike_fail_a_test() -> None:
    one, other, free = (Armed(Fault("drop", nth=nth), nth < 3) for nth in (1, 2, 3))
    with pytest.raises(pytest.fail.Exception) as failed:
        check([one, other, free], 4)
    lines = str(failed.value).splitlines()
    assert [line.partition(" never struck")[0] for line in lines] == [
        "faults.drop(nth=1)",
        "faults.drop(nth=2)",
    ]
    assert lines[0].endswith("rank 4 ran none")
    assert failed.value.pytrace is False
    check([free], 4)


def test_a_test_fails_for_a_fault_that_never_struck(injected: Injected) -> None:
    injected.faults.inject(Fault("drop", nth=2), required=False)
    injected.faults.check()
    injected.faults.drop(nth=3)
    assert [text.partition(" never")[0] for text in injected.faults.misses()] == [
        *("faults.drop(nth=2)", "faults.drop(nth=3)")
    ]
    with pytest.raises(pytest.fail.Exception, match=r"^faults.drop\(nth=3\) never .*rank 1 ran none$"):
        injected.faults.check()
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 ran none$"), injected.faults.drop():
        pass


def test_an_example_has_faults_of_its_own(injected: Injected) -> None:
    faults = injected.faults
    outer = faults.drop(nth=9)
    with faults.example():
        assert not injected.sent
        faults.drop()
        injected.run()
    assert [each.fault.nth for each in faults._armed] == [9]
    with faults.example():
        assert injected.sent[1:] == [("post", Part(FEATURE, NewExample()))]
    never = pytest.raises(pytest.fail.Exception, match=r"^faults.drop\(nth=1\) never struck")
    with never as failed, faults.example():
        faults.drop()
    assert failed.value.pytrace is True
    assert len(injected.sent) == 2
    example: Any = faults.example()
    example.__enter__()
    faults.inject(Fault("drop"), required=False)
    injected.rank.dead.add(0)
    with pytest.raises(pytest.fail.Exception, match=r"^rank 0 died, as the test expects"):
        example.__exit__(None, None, None)
    assert [each.fault.nth for each in faults._armed] == [9]
    assert not outer.has_struck


def test_several_faults_have_struck_when_all_of_this_rank_have(injected: Injected) -> None:
    injection = injected.faults.inject(Fault("drop", 1), Fault("drop", 1, nth=2), Fault("kill", 0))
    injected.run()
    assert not injection.has_struck
    injected.run()
    assert injection.has_struck


class Manager(dict[str, Any]):
    get_plugin = dict.get

    def register(self, plugin: object, name: str) -> None:
        self[name] = plugin


def session_of(injected: Injected, backend: str = "gloo") -> Any:
    called: list[tuple[str, str]] = []
    rank: Any = injected.rank
    rank.status = SimpleNamespace(name_call=lambda *args: called.append(args), called=called)
    injected.world.backend = backend  # type: ignore[attr-defined]
    return SimpleNamespace(rank=rank, world=injected.world)


def test_all_tests_of_a_session_have_the_same_faults(injected: Injected) -> None:
    session, manager = session_of(injected), Manager()
    config: Any = SimpleNamespace(pluginmanager=manager)
    faults = faults_of(session, config)
    assert faults is faults_of(session, config)
    assert manager["harness-faults"].faults is faults
    assert session.rank.status.called == [("injected_hang", "an injected hang")]
    with pytest.raises(pytest.fail.Exception, match=r"nothing to disturb in a fake world$") as failed:
        faults_of(session_of(injected, "fake"), config)
    assert failed.value.pytrace is False


def test_faults_end_with_their_test_and_its_tear_down(injected: Injected) -> None:
    plugin = InjectedFaults(session_of(injected))
    plugin.faults.drop()
    with pytest.raises(pytest.fail.Exception, match="never struck"):
        plugin.pytest_ranks_called()
    hook = plugin.pytest_runtest_teardown()
    next(hook)
    assert (plugin.faults._armed, injected.layers) == ([], [])
    plugin.faults.drop()
    with pytest.raises(StopIteration) as stopped:
        hook.send("over")
    assert stopped.value.value == "over"
    assert (plugin.faults._armed, injected.layers, injected.forgotten) == ([], [], 2)


def test_a_rank_hears_of_lost_ones_until_it_has_a_new_world(injected: Injected) -> None:
    plugin = InjectedFaults(session_of(injected))
    plugin.pytest_ranks_part(Part("other", 0))
    assert [*plugin._lost_peers._lost] == []
    plugin.pytest_ranks_part(Part(FEATURE, 2))
    assert [*plugin._lost_peers._lost] == [2]
    plugin.pytest_ranks_regrouped()
    assert [*plugin._lost_peers._lost] == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("",), "faults.expect(''): the text is a part of a report's words, such as "),
        ((" \n",), "faults.expect(' \\n'): the text is a part of a report's words, such as "),
        ((3,), "faults.expect(3): the text is a part of a report's words, such as "),
        (("x", 0), "faults.expect(within=0): within is a number of seconds above 0, at most 1000000"),
        (("x", None), "faults.expect(within=None): within is a number of seconds above 0, at most 1000000"),
    ],
)
def test_an_expectation_has_words_and_time(injected: Injected, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^faults.expect") as refused:
        injected.faults.expect(*given)
    assert str(refused.value).startswith(message)
    made = injected.faults.expect("x")
    assert (made._text, made._within, made._faults) == ("x", 5.0, injected.faults)
