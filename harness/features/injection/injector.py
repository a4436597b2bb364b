"""The fixture `faults`: what happens to a rank at its collectives, by order of the test. Inside a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import pytest
import torch
import torch.distributed as dist

from lockstep.backends import meets
from lockstep.bounds import SECONDS, are_seconds, shown
from lockstep.features.injection.calls import INTERCEPTION, NO_CODE, Call, Run, caller
from lockstep.features.injection.expectation import WITHIN, Expectation
from lockstep.features.injection.faults import OF_OPERATION, Fault, Kind, corrupt
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE, FaultHit, NewExample
from lockstep.features.injection.torch_internals import without_modes
from lockstep.features.injection.work import Watched
from lockstep.protocol import Part
from lockstep.recorders.collectives import Collective

if TYPE_CHECKING:
    from lockstep.rank.process import Rank
    from lockstep.rank.session import RankSession
    from lockstep.rank.world_fixture import RankWorld

__tracebackhide__ = True  # under pytest a failure points to the call

MOST_SHOWN = 8
"""Collectives that are listed where a fault never struck."""


class Match(TypedDict, total=False):
    """Of which rank, and of which of its collectives; `Fault` says what each means."""

    rank: int | None
    nth: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype | None
    where: Callable[[Collective], bool] | None


class Moment(Match, total=False):
    before: str | None
    after: str | None


class Operation(Match, total=False):
    op: str | None


class Faults:
    """Faults at collectives of this rank, and what is expected of them.

    Each method injects one, from the call on until the test's end, or as a context until the context's end.
    All ranks call it; a fault strikes on the rank that it names alone, once. One that never struck fails the
    test on that rank.
    """

    def __init__(self, rank: Rank, world: RankWorld, lost_peers: LostPeers) -> None:
        self._rank, self._world, self._lost_peers = rank, world, lost_peers
        self._armed: list[Armed] = []
        self._lock = threading.Lock()
        self._layer = ExitStack()
        self._has_struck = False

    def delay(self, seconds: float = 0.0, **match: Unpack[Moment]) -> Injection:
        """Let a rank wait before or after a collective."""
        return self.inject(_fault("delay", seconds=seconds, **match))

    def fail(
        self, error: BaseException | type[BaseException] | None = None, **match: Unpack[Moment]
    ) -> Injection:
        """Raise an exception, by default `InjectedFault`, in the caller of a collective."""
        return self.inject(_fault("fail", error=error, **match))

    def kill(self, **match: Unpack[Moment]) -> Injection:
        """End the process of a rank by SIGKILL."""
        return self.inject(_fault("kill", **match))

    def stop(self, **match: Unpack[Moment]) -> Injection:
        """Stop the process of a rank by SIGSTOP."""
        return self.inject(_fault("stop", **match))

    def hang(self, **match: Unpack[Moment]) -> Injection:
        """Let a rank wait for ever, in Python code that says so."""
        return self.inject(_fault("hang", **match))

    def corrupt(self, value: float | None = None, **match: Unpack[Operation]) -> Injection:
        """Change the first element of a collective's output: flip a bit of it, or set it to `value`."""
        return self.inject(_fault("corrupt", value=value, **match))

    def drop(self, **match: Unpack[Operation]) -> Injection:
        """Let a rank leave a collective out: its caller goes on as if it had run."""
        return self.inject(_fault("drop", **match))

    def inject(self, *faults: Fault, required: bool = True) -> Injection:
        """Inject faults that are values, those of a search for example.

        Args:
            required: whether one that never strikes fails the test.

        Raises:
            TypeError: one of them is no `Fault`.
            ValueError: a fault is of a rank that the world does not have, or that has died.
            RuntimeError: a rank is to stand still after another one has died, and before `rebuild`.
        """
        _require_faults(faults)
        for fault in faults:
            if fault.rank is not None and fault.rank >= self._world.size:
                last = self._world.size - 1
                raise ValueError(
                    f"{fault!r}: the world has {'rank 0' if last == 0 else f'ranks 0 to {last}'}"
                )
            if fault.rank in self._rank.dead:
                left = [rank for rank in range(self._world.size) if rank not in self._rank.dead]
                raise ValueError(
                    f"{fault!r}: rank {fault.rank} has died; rank= is a number of the fixture `world`, of "
                    f"which these are left: {', '.join(map(str, left))}"
                )
            if self._rank.dead - self._rank.left_behind and fault.kind in ("stop", "hang"):
                raise RuntimeError(
                    f"{fault!r}: a rank has died, and no standstill is found before the others have called "
                    "world.rebuild()"
                )
        own = [Armed(each, required) for each in faults if each.rank in (None, self._world.rank)]
        if own and not self._armed:
            self._layer.enter_context(INTERCEPTION.layer(self._run))
        self._armed = [*self._armed, *own]
        return Injection(self, own)

    def expect(self, text: str, within: float = WITHIN) -> Expectation:
        """Expect a fault, and go on after it.

        Args:
            text: a part of the words that a report has for it: "rank 1 of 2 died: SIGKILL", "it is stopped",
                "rank 0 of 2 failed: ValueError".
            within: seconds, since the latest fault, for which ranks have to stand still before one that hangs
                is ended, which frees the others. One that is stopped is ended as soon as no rank can get on.

        Raises:
            ValueError: there is no text, or no time.
        """
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"faults.expect({text!r}): the text is a part of a report's words, such as "
                '"rank 1 of 2 died: SIGKILL" or "rank 0 of 2 failed: ValueError"'
            )
        if not are_seconds(within):
            raise ValueError(f"faults.expect(within={shown(within)}): within is {SECONDS}")
        return Expectation(self._rank, self, self._lost_peers, text, within)

    def disarm(self, armed: Sequence[Armed]) -> None:
        self._armed = [each for each in self._armed if each not in armed]
        if not self._armed:
            self._layer.close()

    def end(self) -> None:
        self.disarm(self._armed)
        INTERCEPTION.forget()

    @contextmanager
    def example(self) -> Iterator[None]:
        """Let an example of a property test have its own faults, which end with it."""
        before = self._armed
        if self._has_struck:
            self._has_struck = False
            self._rank.wire.post(Part(FEATURE, NewExample()))
        try:
            self._require_all_ranks()
            yield
            check(self._since(before), self._world.rank, pytrace=True)  # with the example
            self._require_all_ranks()
        finally:
            self.disarm(self._since(before))

    def _require_all_ranks(self) -> None:
        if dead := ", ".join(map(str, sorted(self._rank.dead))):
            pytest.fail(
                f"rank {dead} died, as the test expects, and the next example needs all ranks: expect a "
                "death in a test without @given, which parametrize may run at each collective"
            )

    def _since(self, before: Sequence[Armed]) -> list[Armed]:
        return [each for each in self._armed if each not in before]

    @property
    def rank(self) -> int:
        return self._world.rank

    def misses(self) -> list[str]:
        """Say of each fault that has not struck this rank why it has not."""
        return [text for each in self._armed if (text := each.miss(self.rank))]

    def check(self) -> None:
        """Fail the test for faults that were to strike until its end, and never did."""
        check(self._armed, self._world.rank)

    def _run(self, call: Call, run: Run) -> dist.Work | None:
        with self._lock:  # threads may call collectives at once
            due = [each for each in self._armed if each.counts(call)]
        after = [each for each in due if each.fault.is_after]
        for each in due:
            if not each.fault.is_after:
                self._strike(each, call)
        if any(each.fault.kind == "drop" for each in due):
            work = None
        else:
            work = run(call.written, call.read)
            if not after:
                return work

        def over() -> None:
            for each in after:
                self._strike(each, call)

        if call.about.op == "monitored_barrier":  # it has no handle
            over()
            return None
        return Watched(work, call.result, over)

    def _strike(self, armed: Armed, call: Call) -> None:
        fault = armed.fault
        armed.has_struck = self._has_struck = True
        title, line = call.title(fault.nth), caller()
        place = call.phase() + ("" if line == NO_CODE else f" at {line}")
        text = f"rank {self._world.rank} {fault.what()} {title}{place}"
        self._rank.wire.send(Part(FEATURE, FaultHit(text, time.time())))
        match fault.kind:
            case "delay":
                time.sleep(fault.seconds)
            case "fail":
                raise fault.exception(title)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                injected_hang()
            case "corrupt":
                with without_modes():
                    corrupt(call.written, fault.value)
            case "drop":
                pass  # `_run` does


def _fault(kind: Kind, **given: Any) -> Fault:
    """Return the fault that a method of this name injects.

    Raises:
        TypeError: it has no such argument; the message names the method and the arguments that it takes.
        ValueError: the arguments do not fit.
    """
    if unknown := [name for name in given if name not in {field.name for field in fields(Fault)}]:
        own = {"delay": ["seconds"], "fail": ["error"], "corrupt": ["value"]}.get(kind, [])
        match = (Operation if kind in OF_OPERATION else Moment).__annotations__
        raise TypeError(
            f"faults.{kind}({unknown[0]}={given[unknown[0]]!r:.60}): there is no argument {unknown[0]}; "
            f"faults.{kind} takes {', '.join([*own, *match])}"
        )
    return Fault(kind, **given)


def _require_faults(given: Sequence[object]) -> None:
    if wrong := [each for each in given if not isinstance(each, Fault)]:
        several = "; write faults.inject(*schedule)" if isinstance(wrong[0], list | tuple) else ""
        raise TypeError(
            f'faults.inject({wrong[0]!r:.60}): it takes values such as Fault("kill", rank=1, '
            f'before="all_reduce"){several}'
        )


def injected_hang() -> None:
    """Wait for ever. A status names a rank's place by this function's name."""
    lock = threading.Lock()
    while True:
        lock.acquire()  # a signal's handler may raise here


class InjectedFaults:
    """A plugin of a rank's session that has come to use the fixture: checks what tests inject, and ends it.

    Attributes:
        faults: the value of the fixture.
    """

    def __init__(self, session: RankSession) -> None:
        self._lost_peers = LostPeers()
        self.faults = Faults(session.rank, session.world, self._lost_peers)
        session.rank.status.name_call(injected_hang.__name__, "an injected hang")

    def pytest_ranks_part(self, part: Part) -> None:
        if part.feature == FEATURE:
            self._lost_peers.note(part.data)

    def pytest_ranks_regrouped(self) -> None:
        self._lost_peers.clear()

    def pytest_ranks_called(self) -> None:
        self.faults.check()

    def pytest_ranks_example(self) -> AbstractContextManager[None]:
        return self.faults.example()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self.faults.end()
        result = yield
        self.faults.end()  # those of fixtures that inject them in their tear-down
        return result


def faults_of(session: RankSession, config: pytest.Config) -> Faults:
    """Return the value of the fixture `faults`, the same for all tests of a session."""
    if not meets(session.world.backend):
        pytest.fail("the fixture `faults` has nothing to disturb in a fake world", pytrace=False)
    if (plugin := config.pluginmanager.get_plugin("harness-faults")) is None:
        plugin = InjectedFaults(session)
        config.pluginmanager.register(plugin, "harness-faults")
    faults: Faults = plugin.faults
    return faults


class Armed:
    """A fault that waits for its collective.

    Attributes:
        has_struck: whether it has met it.
    """

    def __init__(self, fault: Fault, required: bool) -> None:
        self.fault, self.required = fault, required
        self.has_struck = False
        self._matched = self._seen = 0
        self._latest: deque[str] = deque(maxlen=MOST_SHOWN)

    def counts(self, call: Call) -> bool:
        """Count a collective; return whether it is the one."""
        about = replace(call.about, index=self._seen)
        self._seen += 1
        self._latest.append(call.title(self._seen))
        if not self.fault.matches(call, about):
            return False
        self._matched += 1
        return self._matched == self.fault.nth

    def miss(self, rank: int) -> str:
        """Return why the fault never struck on this rank, "" if it did."""
        if self.has_struck:
            return ""
        if self._matched >= self.fault.nth:
            why = "its collective was begun, and its handle never waited for"
        else:
            number = {0: "no collective has", 1: "1 collective has"}
            why = f"{number.get(self._matched, f'{self._matched} collectives have')} matched"
        before = self._seen - len(self._latest)
        more = f"{before} before, " if before else ""
        ran = f"ran {more}{', '.join(self._latest)}" if self._seen else "ran none"
        return f"{self.fault!r} never struck: {why}; since it was injected, rank {rank} {ran}"


def check(armed: Sequence[Armed], rank: int, pytrace: bool = False) -> None:
    """Fail the test if one of these faults never struck."""
    if misses := [text for each in armed if each.required and (text := each.miss(rank))]:
        pytest.fail("\n".join(misses), pytrace)


class Injection:
    """Faults that were injected: as a context, until its end."""

    def __init__(self, faults: Faults, armed: Sequence[Armed]) -> None:
        self._faults, self._armed = faults, armed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._faults.disarm(self._armed)
        if error is None:
            check(self._armed, self._faults.rank)

    @property
    def has_struck(self) -> bool:
        """Whether all of them that are of this rank have struck."""
        return all(each.has_struck for each in self._armed)
