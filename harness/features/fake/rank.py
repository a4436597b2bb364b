"""Ranks of fake worlds, where collectives return NaN, which no test can take for results. Inside a rank.

torch's fake group leaves in most outputs what this rank has sent. Here they are filled with NaN (integers:
with the extreme of their dtype), and the storages of outputs, and of what is computed from them, are known:
to read a value of one into Python is an error. Left alone is what is true without peers: groups of one rank,
what a rank broadcasts or scatters itself, its own place in what it gathers.

Training code goes on: `READERS` may read. What it compares between ranks, in integers and in pickled objects,
is not filled, so every peer seems to say what this rank says.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.exceptions import FakeValueError
from lockstep.features.fake import FEATURE, FakeRank
from lockstep.features.fake.torch_internals import done_work, storage_key, weak_storage
from lockstep.protocol import RunItem
from lockstep.rank.process import Rank
from lockstep.rank.state import RankState
from lockstep.recorders.collectives import spelled
from lockstep.recorders.torch_internals import TorchDispatchMode, group_of
from lockstep.tracebacks import is_installed

__tracebackhide__ = True

# Modules between a caller and the operation: they act for the one that calls them.
PLUMBING = (
    __name__,
    "lockstep.recorders",
    "torch._compile",
    "torch._dynamo.eval_frame",
    "torch._ops",
    "torch._tensor",
    "torch._jit_internal",
    "torch.functional",
    "torch.overrides",
    "torch.utils._contextlib",
    "torch.utils._device",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch.distributed._functional_collectives",
    "torch.distributed.c10d_logger",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._collective_utils",
    "torch.distributed.tensor._dispatch",
    "torch.distributed.tensor._redistribute",
    "torch.distributed.tensor.placement_types",
)
READERS = (
    "lockstep.engine",
    "torch._tensor_str",  # a failure's report shows tensors
    "torch.amp",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
)
"""Training code that decides by values: it sees the NaN, and no test does."""

_FUNCTIONAL = ("_c10d_functional", "_dtensor")
_WITHOUT_OUTPUT = ("send", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd")
_FROM_ROOT = ("broadcast", "broadcast_", "scatter_")
# Into one tensor, in which each rank has a place.
_GATHERS = (
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_into_tensor_out",
)
# Operators that return what Python sees of values: numbers and booleans, or a shape.
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_"})
# Of their input these use shape and dtype alone.
_WITHOUT_VALUES = frozenset(
    f"{how}_{what}"
    for how, whats in (
        ("new", ("empty", "empty_strided", "zeros", "ones", "full")),
        ("empty zeros ones full rand randn randint", ("like",)),
    )
    for how in how.split()
    for what in whats
)


class FakeWorlds:
    """Makes the one process of a fake world the rank that an order names, for its item."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def pytest_ranks_begin(self, order: RunItem) -> None:
        """Join the group of that rank, and be it for the fixture `world`."""
        fake: FakeRank = order.parts[FEATURE]
        before = RankState.capture()
        world = self._rank.world
        self._rank.group.stand_for(fake.rank, fake.size)
        world.rank, world.size = world.local_rank, world.local_size = fake.rank, fake.size
        self._rank.adopt_state(before)

    @pytest.hookimpl(wrapper=True, trylast=True)  # sees operations before the modes of other features
    def pytest_ranks_run_item(self, order: RunItem) -> Generator[None, object, object]:
        """Keep a test from taking for a result what its collectives return."""
        with FakeValues(order.parts[FEATURE], self._rank.spec.session.cwd):
            return (yield)


class FakeValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Fills the outputs of collectives, and refuses to read what comes from them, while it is entered.

    Args:
        fake: the rank that this process stands for.
        base: directory that the user's files are named from.
    """

    def __init__(self, fake: FakeRank, base: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._base = base
        self._sources: dict[int, tuple[Any, str]] = {}
        """A storage by its address, without which another one may have it, and the origin of its values."""
        self._sweep_at = 1024
        self._methods: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        # These read memory without the dispatcher.
        for name in ("tolist", "numpy"):
            self._methods[name] = getattr(Tensor, name)
            setattr(Tensor, name, self._checked(self._methods[name]))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for name, method in self._methods.items():
            setattr(Tensor, name, method)
        self._sources.clear()

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self._refuse((tensor,))
            return method(tensor, *args, **kwargs)

        return checked

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch 2.13 would put frames of its own under each call, where tracebacks end

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        # A wrapper subclass goes first, and comes back here with plain tensors.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" or func.namespace in _FUNCTIONAL:
            result = func(*args, **kwargs)
            if name not in _WITHOUT_OUTPUT and not self._fake.shows_values:
                self._received(func, name, args, kwargs, result)
            return (result[0], done_work(result[0])) if name == "allreduce_" else result
        if not self._sources:
            return func(*args, **kwargs)
        if not _READS.isdisjoint(func.tags):
            self._refuse(_masks(args[1]) if name == "index" else (*args, *kwargs.values()))
        source = None if name in _WITHOUT_VALUES else self._source(args[1:] if name in _OVERWRITES else args)
        source = source or self._source(tuple(kwargs.values()))
        result = func(*args, **kwargs)
        if source is not None:
            self._mark((*_tensors(result), *_written(func, args, kwargs)), source)
        elif name in _OVERWRITES and _is_whole(args[0]):
            self._sources.pop(storage_key(args[0]), None)
        return result

    def _received(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Fill what a collective has written, and note it."""
        names = (argument.name for argument in func._schema.arguments)
        given = dict(zip(names, args, strict=False)) | kwargs
        group = group_of(given.get("process_group", given.get("group_name")))
        root = given.get("root_rank", given.get("src"))
        if group.size() == 1 or (name in _FROM_ROOT and root == group.rank()):
            return
        caller, line = self._caller()
        fills = not _is_of(caller, READERS)
        source = f"{spelled(name)} at {line}"
        outputs = [value for key, value in given.items() if key.startswith("output") and "split" not in key]
        written = result if func.namespace in _FUNCTIONAL else outputs[0] if outputs else given.get("tensors")
        for output in _of_others(name, group, written):
            if fills or output.is_floating_point() or output.is_complex():
                _fill(output)
            self._mark((output,), source)

    def _mark(self, tensors: Iterable[Tensor], source: str) -> None:
        for tensor in tensors:
            key = storage_key(tensor)
            if key not in self._sources or self._sources[key][1] != source:
                self._sources[key] = weak_storage(tensor), source
        if len(self._sources) > self._sweep_at:
            self._sources = {at: kept for at, kept in self._sources.items() if not kept[0].expired()}
            self._sweep_at = max(1024, 2 * len(self._sources))

    def _source(self, values: Any) -> str | None:
        """Return where a value comes from, if it comes from a collective."""
        for tensor in _tensors(values):
            if found := self._sources.get(storage_key(tensor)):
                return found[1]
        return None

    def _refuse(self, tensors: Any) -> None:
        __tracebackhide__ = True
        source = self._source(tensors)
        if source is not None and not _is_of(self._caller()[0], READERS):
            raise FakeValueError(
                f"this value comes from {source}, which received nothing: the test runs as rank "
                f"{self._fake.rank} of {self._fake.size} in a fake world, where no other rank exists. Claim "
                "shapes, bytes or counts instead, or run on real ranks; "
                "ranks(..., backend='fake', made_up_values=True) shows what torch's fake group makes up"
            )

    def _caller(self) -> tuple[str, str]:
        """Return the module that acts, and the user's line."""
        frame: FrameType | None = sys._getframe(1)
        module = ""
        while frame is not None:
            code, name = frame.f_code, str(frame.f_globals.get("__name__"))
            # A mode of the test's own stands between training code and its operations, too.
            if code.co_name not in ("__torch_dispatch__", "__torch_function__"):
                module = module or ("" if _is_of(name, PLUMBING) else name)
                if not is_installed(code.co_filename):
                    return module, f"{os.path.relpath(code.co_filename, self._base)}:{frame.f_lineno}"
            frame = frame.f_back
        return module, "an unknown place"


def _of_others(name: str, group: dist.ProcessGroup, written: Any) -> Iterator[Tensor]:
    """Yield what a collective has written in the name of other ranks."""
    rank, size = group.rank(), group.size()
    if name in ("allgather_", "gather_"):  # into a list that has a tensor of each rank
        for tensors in written:
            yield from (tensor for place, tensor in enumerate(tensors) if place != rank)
        return
    for tensor in _tensors(written):
        length = tensor.shape[0] // size if tensor.dim() else 0
        if name in _GATHERS and length * size == len(tensor):
            yield tensor[: rank * length]
            yield tensor[(rank + 1) * length :]
        else:
            yield tensor


def _fill(tensor: Tensor) -> None:
    dtype = tensor.dtype
    value: float = float("nan")
    if dtype == torch.bool:
        value = True
    elif not (dtype.is_floating_point or dtype.is_complex):
        value = torch.iinfo(dtype).min or torch.iinfo(dtype).max
    tensor.data.fill_(value)  # autograd must not see it, as it does not see a backend write


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, in nested lists too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _masks(indices: Any) -> list[Tensor]:
    """Return the indices that choose by their values how much there is."""
    return [index for index in _tensors(indices) if index.dtype in (torch.bool, torch.uint8)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that an operation writes to; some return nothing."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else kwargs.get(argument.name))


def _is_whole(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
