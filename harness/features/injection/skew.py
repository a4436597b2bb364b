"""A layer that delays collectives by a schedule, and shows what comes too early. Inside a rank."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.exceptions import CollectiveRace
from lockstep.features.injection.calls import INTERCEPTION, Call, Run, caller
from lockstep.features.injection.schedule import Schedule
from lockstep.features.injection.torch_internals import delayed_callbacks, without_modes
from lockstep.features.injection.work import Watched
from lockstep.recorders.collectives import NOT_COLLECTIVES
from lockstep.recorders.in_flight import InFlight
from lockstep.recorders.tensors import flat_bytes, short
from lockstep.recorders.torch_internals import TorchDispatchMode, untraced

__tracebackhide__ = True  # under pytest a failure points to the call


class Skew(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Delays this rank by a schedule; an asynchronous collective runs on copies until it is waited for.

    Until then its outputs are poisoned, and no operation of the thread that entered this may read them, or
    write what the collective reads. Its input is compared then with what was sent.

    Raises:
        CollectiveRace: in the operation that comes too early, or in the wait.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._schedule, self._rank = schedule, rank
        self._numbers, self._callbacks = itertools.count(1), itertools.count(1)
        self._in_flight = InFlight(lambda *_: None, self._raced)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler with the first operation, which takes 0.4 s

    @contextmanager
    def on(self) -> Iterator[None]:
        """Disturb what runs inside."""
        with ExitStack() as stack:
            stack.callback(_forget_uncompiled)
            stack.callback(INTERCEPTION.forget)
            stack.enter_context(delayed_callbacks(lambda: self._delay(next(self._callbacks), "callback")))
            stack.enter_context(INTERCEPTION.layer(self._run))
            stack.enter_context(self)
            yield

    def _delay(self, number: int, point: str) -> None:
        if seconds := self._schedule.delay(self._rank, number, point):
            time.sleep(seconds)

    def _run(self, call: Call, run: Run) -> dist.Work:
        number = next(self._numbers)
        self._delay(number, "before")
        if not call.is_async or call.is_batched:
            work = run(call.written, call.read)
            return Watched(work, call.result, waited=lambda: self._delay(number, "waited"))
        title, line = call.title(number), caller()
        with without_modes():
            flight = Flight(call, f"{title}, begun at {line}")
        work = run(flight.written, flight.read)

        def over() -> None:
            self._in_flight.forget(watched)
            with without_modes():
                flight.land()

        watched = Watched(work, call.result, over, lambda: self._delay(number, "waited"))
        self._in_flight.watch(watched, call.read, call.written, title, line)
        self._delay(number, "after")
        return watched

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A wrapper subclass (DTensor) goes first, and comes back here with plain tensors.
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if self._in_flight.is_any() and func.overloadpacket.__name__ not in NOT_COLLECTIVES:
            self._in_flight.check(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _raced(self, title: str, line: str, verb: str, func: Any) -> None:
        __tracebackhide__ = False  # else the innermost frame would be torch's
        early = f"was not waited for before `{func.overloadpacket}` {verb} at {caller()}"
        raise CollectiveRace(f"{title}, begun at {line}, {early}")


def _forget_uncompiled() -> None:
    """Let torch compile what it has met under a schedule, which it has marked as not to be compiled."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


class Flight:
    """The tensors of an asynchronous collective: its own are poisoned or compared, copies travel.

    Attributes:
        written: what the collective fills.
        read: what it sends.

    Args:
        title: the collective and where it was begun, for the text of an error.
    """

    def __init__(self, call: Call, title: str) -> None:
        self._title = title
        self._outputs = call.written
        self._inputs = call.read
        self.read = [_copy(each) for each in call.read]
        self.written = [
            _copy(each) if call.in_place else torch.empty_like(each) if _is_plain(each) else each
            for each in call.written
        ]
        self._places = [_address(each) for each in (*call.written, *call.read)]
        self._poison = [self._poisoned(*pair) for pair in zip(self._outputs, self.written, strict=True)]
        # In place, as FSDP gathers, a part of the output is sent.
        self._unchecked = [bool(call.written) and _overlaps(each, call.written) for each in call.read]

    def _poisoned(self, output: Tensor, copy: Tensor) -> Tensor | None:
        if copy is output:
            return None
        poison(output.data)
        return output.data.clone()

    def land(self) -> None:
        """Check that nothing has touched the tensors, and put the result in its place."""
        outputs, inputs = self._outputs, self._inputs
        for number, (tensor, place) in enumerate(zip((*outputs, *inputs), self._places, strict=True)):
            if _address(tensor) != place or not _has_memory(tensor):
                what = "output" if number < len(outputs) else "input"
                self._fail(f"the memory of its {what} was freed", tensor)
        for tensor, sent, unchecked in zip(inputs, self.read, self._unchecked, strict=True):
            if sent is not tensor and not unchecked and not _is_same(tensor, sent):
                self._fail("its input was overwritten", tensor)
        for tensor, result, before in zip(outputs, self.written, self._poison, strict=True):
            if before is not None:
                if not _is_same(tensor, before):
                    self._fail("its output was written to", tensor)
                tensor.data.copy_(result)  # as a backend writes: autograd does not count it

    def _fail(self, what: str, tensor: Tensor) -> None:
        about = f"{short(tensor.dtype)}{list(tensor.shape)}"
        raise CollectiveRace(f"{self._title}: {what} ({about}) before it was waited for, at {caller()}")


def poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with the largest value of its dtype."""
    if tensor.is_floating_point() or tensor.is_complex():
        with suppress(RuntimeError, NotImplementedError):
            tensor.fill_(float("nan"))
            return
        tensor.view(torch.uint8).fill_(255)  # of float8, which has few operators: a NaN there
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the collective can use a copy; others it refuses, or knows what to do with."""
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.is_contiguous()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.data.clone() if _is_plain(tensor) else tensor


def _address(tensor: Tensor) -> int:
    """Return where a tensor's memory begins; 0 of a sparse one, which has no single memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _has_memory(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return True
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    return not tensor.is_contiguous() or tensor.untyped_storage().nbytes() >= needed


def _overlaps(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    start, end = _address(tensor), _address(tensor) + tensor.numel() * tensor.itemsize
    return any(
        start < _address(other) + other.numel() * other.itemsize and _address(other) < end for other in others
    )


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors have the same bits."""
    return torch.equal(flat_bytes(tensor), flat_bytes(other))
