"""A fault of one rank at one of its collectives, as a value. Inside a rank; imports torch."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.bounds import MOST_SECONDS, SEEDS, is_whole, shown
from lockstep.exceptions import InjectedFault
from lockstep.features.injection.calls import Call
from lockstep.recorders.collectives import OPS, Collective
from lockstep.recorders.tensors import short

__tracebackhide__ = True  # under pytest a failure points to the call

Kind = Literal["delay", "fail", "kill", "stop", "hang", "corrupt", "drop"]
ANY = "any"
"""Stands for every operation in the place of one."""

OF_OPERATION = ("corrupt", "drop")
"""Kinds of which the collective itself is the target; of the others it is the moment before or after it."""
_COALESCED = "_coalesced"
_RECORDED_AS = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_gather_object": "all_gather",
    "gather_object": "gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
    "send_object_list": "send",
    "recv_object_list": "recv",
    "isend": "send",
    "irecv": "recv",
    "batch_isend_irecv": "send, or recv",
}
"""Functions of torch.distributed that run a collective of another name."""
_WITHOUT_OUTPUT = ("barrier", "monitored_barrier", "send")
_TYPES: tuple[tuple[str, Any, str], ...] = (
    *((name, str, "the name of an operation, such as 'all_reduce'") for name in ("before", "after", "op")),
    ("seconds", int | float, "a number of seconds"),
    ("group", dist.ProcessGroup, "a process group of torch.distributed"),
    ("dtype", torch.dtype, "a dtype, such as torch.float32"),
    ("where", Callable, "a function of a collective"),
    ("value", int | float, "a number"),
)


@dataclass(frozen=True, repr=False)
class Fault:
    """A disturbance of a rank at one of its collectives.

    `str()` is a line to read, `repr()` the call of the fixture `faults` that injects it.

    Attributes:
        kind: what happens: "delay" (it waits `seconds`), "fail" (its caller gets an exception), "kill"
            (SIGKILL), "stop" (SIGSTOP), "hang" (it never goes on), "corrupt" (one element of its output is
            changed), "drop" (it leaves the collective out).
        rank: on which rank; None on every one.
        before: before which operation, as a log of collectives spells it: "all_reduce". None is any.
        after: after which one: once the collective is over on this rank, of an asynchronous one when its
            wait returns.
        op: which operation is corrupted or dropped.
        nth: which one of those that match on the rank, from 1, since the fault was injected.
        seconds: of a delay.
        group: of which process group; None is any.
        dtype: of the tensors that it sends, or receives where it sends none; None is any.
        where: a predicate on the collective, with the attributes that a log shows; its index counts the
            collectives since the fault was injected, and its label is not known.
        value: of the element that is corrupted; None flips a bit of it.
        error: what "fail" raises, an exception or its class; None is `InjectedFault`.
    """

    kind: Kind
    rank: int | None = None
    before: str | None = None
    after: str | None = None
    op: str | None = None
    nth: int = 1
    seconds: float = 0.0
    group: dist.ProcessGroup | None = None
    dtype: torch.dtype | None = None
    where: Callable[[Collective], bool] | None = None
    value: float | None = None
    error: BaseException | type[BaseException] | None = None

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise ValueError(f"{self!r}: {problem}")

    def _problem(self) -> str:
        if self.kind not in get_args(Kind):
            return f"the kinds of faults are {', '.join(get_args(Kind))}"
        for name, wanted, what in _TYPES:
            value: Any = getattr(self, name)
            if value is None and name != "seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, wanted):
                return f"{name} is {what}"
        given = [name for name in ("before", "after", "op") if getattr(self, name) is not None]
        allowed = ("op",) if self.kind in OF_OPERATION else ("before", "after")
        if wrong := [name for name in given if name not in allowed]:
            return f"write {' or '.join(f'{name}=' for name in allowed)} in the place of {wrong[0]}="
        if len(given) > 1:
            return "either before= or after="
        if (op := self.operation) in _RECORDED_AS:
            return f"{op} is recorded as {_RECORDED_AS[op]}: write that"
        if op is not None and op not in OPS:
            near = difflib.get_close_matches(op, sorted(OPS), 3, 0.5)
            known = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(OPS))}"
            return f"torch.distributed has no collective {op!r}; {known}"
        if not is_whole(self.nth) or not 1 <= self.nth <= sys.maxsize:
            return "nth counts from 1"
        if self.kind == "corrupt" and op in _WITHOUT_OUTPUT:
            return f"{op} has no output"
        if self.rank is not None and (not is_whole(self.rank) or not 0 <= self.rank <= sys.maxsize):
            return "rank is the number of a rank, or None for every one"
        if (self.kind == "delay") != (self.seconds > 0) or not self.seconds <= MOST_SECONDS:
            return f"a delay has seconds above 0, at most {MOST_SECONDS}, and nothing else has"
        value = self.value
        if isinstance(value, int) and value not in SEEDS:
            return "value is a number of 64 bits at most"
        for name, kind in (("value", "corrupt"), ("error", "fail")):
            if getattr(self, name) is not None and self.kind != kind:
                return f"{name}= is for faults.{kind}"
        raised = self.error
        is_error = isinstance(raised, BaseException | None)
        if not is_error and not (isinstance(raised, type) and issubclass(raised, BaseException)):
            return "error is an exception or a class of one"
        return ""

    @property
    def operation(self) -> str | None:
        """The operation that is looked for; None is any."""
        named = self.before or self.after or self.op
        return None if named == ANY else named

    @property
    def is_after(self) -> bool:
        """Whether it happens once the collective is over."""
        return self.after is not None or self.kind == "corrupt"

    def matches(self, call: Call, about: Collective) -> bool:
        """Return whether a call is one of those that are counted.

        A coalesced form is found by its plain name, too: functional collectives use it for single tensors.
        """
        op = self.operation
        if op is not None and op not in (about.op, about.op.removesuffix(_COALESCED)):
            return False
        if self.kind == "corrupt" and not any(each.numel() for each in call.written):
            return False
        if self.group is not None and self.group.group_name != call.group.group_name:
            return False
        if self.dtype is not None and self.dtype not in {each.dtype for each in call.read or call.written}:
            return False
        return self.where is None or bool(self.where(about))

    def exception(self, title: str) -> BaseException:
        """Return what "fail" raises, for a collective that a report calls `title`."""
        match self.error:
            case None:
                return InjectedFault(f"injected {'after' if self.is_after else 'before'} {title}")
            case BaseException() as error:
                return error
            case kind:
                return kind(f"injected {'after' if self.is_after else 'before'} {title}")

    def what(self) -> str:
        """Say what happens, in words that follow the rank and come before the collective."""
        moment = "after" if self.is_after else "before"
        match self.kind:
            case "delay":
                seconds = self.seconds
                duration = f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
                return f"waits {duration} {moment}"
            case "fail":
                error = self.error or InjectedFault
                name = error.__name__ if isinstance(error, type) else type(error).__name__
                return f"raises {name} {moment}"
            case "kill":
                return f"is killed (SIGKILL) {moment}"
            case "stop":
                return f"is stopped (SIGSTOP) {moment}"
            case "hang":
                return f"hangs {moment}"
            case "corrupt":
                return f"gets {'a flipped bit' if self.value is None else f'{self.value:g}'} from"
            case "drop":
                return "leaves out"

    def __str__(self) -> str:
        who = "every rank" if self.rank is None else f"rank {self.rank}"
        where = [] if self.group is None else [f"of group {self.group.group_name}"]
        where += [] if self.dtype is None else [f"with {short(self.dtype)}"]
        where += [] if self.where is None else [f"where {_name(self.where)}"]
        return " ".join([who, self.what(), f"{self.operation or 'collective'} #{self.nth}", *where])

    def __repr__(self) -> str:
        texts = []
        for field in fields(self)[1:]:
            value: Any = getattr(self, field.name)
            if value is None or (value == field.default and field.name != "nth"):
                continue
            texts.append(f"{field.name}={_literal(value)}")
        return f"faults.{self.kind}({', '.join(texts)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis, whose reports show examples, would list all fields


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _literal(value: Any) -> str:
    match value:
        case str():
            return f'"{value}"'
        case float() if not math.isfinite(value):
            return f'float("{value}")'
        case dist.ProcessGroup():
            return f"<group {value.group_name}>"
        case _ if callable(value):
            return _name(value)
        case _:
            return shown(value)


def corrupt(tensors: list[Tensor], value: float | None) -> None:
    """Change the first element of the first tensor that has any: to a value, or by a flipped bit.

    The bit is the lowest one of a float's exponent, which doubles or halves it, or that of 1 of an integer.

    Raises:
        ValueError: the value is none of its dtype.
    """
    tensor = next(each for each in tensors if each.numel()).detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    element = tensor[(0,) * tensor.dim()]
    is_float = tensor.is_floating_point()
    if value is not None:
        if not is_float and not float(value).is_integer():
            raise ValueError(f"faults.corrupt(value={value}): the output is of {short(tensor.dtype)}")
        element.fill_(value)
        return
    mantissa = round(-math.log2(torch.finfo(tensor.dtype).eps)) if is_float else 0
    changed = element.clone().reshape(1).view(torch.uint8)
    changed[mantissa // 8] ^= 1 << mantissa % 8
    element.copy_(changed.view(tensor.dtype)[0])
