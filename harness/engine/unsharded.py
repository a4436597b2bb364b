"""The full parameters of one group in one dtype: one buffer, and a leaf tensor per parameter that lies in it.

The leaves live as long as the group, so that what autograd saved in forward is valid in backward; only the
memory under them comes and goes. To read a leaf whose memory is gone crashes the process, as with torch's own
engines; with LOCKSTEP_ENGINE_DEBUG=1 it reads NaN. Runs on ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from harness.engine.config import Dtypes
from harness.engine.layout import Layout

P = ParamSpec("P")
R = TypeVar("R")


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` run as if no vmap, jvp or grad of torch.func were going on.

    Inside one, views of shards and of full parameters would be wrapped tensors without memory.
    """

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return plain


T = TypeVar("T")


class PendingGradients:
    """Count the gradients that each backward under way will still bring to watched leaves.

    ``inputs_done``: whether gradients came out at the unit's arguments; nothing reads its parameters then.
    """

    def __init__(self) -> None:
        self.inputs_done = False
        self._reading: set[object] = set()
        self._nodes: dict[Tensor, Node] = {}
        self._left: dict[int, int] = {}

    @outside_transforms
    def watch(self, leaf: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook`` with each gradient that comes to ``leaf`` from now on, if it can have one."""
        if leaf.requires_grad and leaf not in self._nodes:
            self._nodes[leaf] = get_gradient_edge(leaf).node
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self, call: object) -> None:
        """Note that the backward of this forward call begins."""
        self._reading.add(call)
        self.inputs_done = False

    def end(self, call: object) -> None:
        """Note that gradients came out at the arguments of this forward call."""
        # They may be the outputs of an earlier call of the same unit, whose backward has begun by then.
        self._reading.discard(call)
        self.inputs_done = not self._reading

    def note(self, backward: int) -> bool:
        """Count one gradient that ``backward`` brought, and tell whether it was the last."""
        # As `register_multi_grad_hook` counts; but that one holds all gradients until the last has come,
        # which makes autograd copy each of them.
        self._left[backward] = self.left(backward) - 1
        return self._left[backward] == 0

    def left(self, backward: int) -> int:
        """Return how many leaves ``backward``, which is running, will still give a gradient to."""
        if backward not in self._left:
            return sum(map(torch._C._will_engine_execute_node, self._nodes.values()))
        return self._left[backward]

    def forget(self) -> None:
        """Forget the backwards that were under way."""
        self._left.clear()
        self._reading.clear()


def weakly(method: Callable[[T], None], subject: T) -> Callable[[Tensor], None]:
    """Return a hook that calls ``method(subject)`` without a hold on either.

    A leaf's hook, the unit and autograd's node of the leaf would hold each other for ever, as no garbage
    collector sees through the node.
    """
    reference, weak_subject = WeakMethod(method), ref(subject)

    def call(_: Tensor) -> None:
        alive, there = reference(), weak_subject()
        if alive and there is not None:
            alive(there)

    return call


@dataclass(eq=False)
class UnshardedParams:
    """A 1-D ``buffer`` of the layout's padded size and ``leaves``, one per parameter in its own shape.

    ``dtypes``: of the forwards that compute with them, and of their backwards, which ``awaited`` counts for.
    ``borrowed``: the buffer is the group's own storage (nothing is sharded or cast) and is never freed.
    ``poison``: instead of giving memory back, fill it with NaN, so that a late reader is noticed.
    """

    # Not shown: a traceback shows what functions were given, and may find the memory gone.
    buffer: Tensor = field(repr=False)
    leaves: tuple[Tensor, ...] = field(repr=False)
    dtypes: Dtypes
    borrowed: bool
    poison: bool
    awaited: PendingGradients = field(default_factory=PendingGradients)
    _in_use: bool = field(default=False, init=False)

    @property
    def nbytes(self) -> int:
        """What is allocated; where memory is never given back, what modules or a backward still need."""
        stays = self.borrowed or self.poison
        return 0 if stays and not self._in_use else self.buffer.untyped_storage().nbytes()

    def allocate(self) -> None:
        self._in_use = True
        storage = self.buffer.untyped_storage()
        if not self.borrowed and storage.nbytes() == 0:
            storage.resize_(self.buffer.numel() * self.buffer.itemsize)

    def free(self) -> None:
        self._in_use = False
        if self.borrowed:
            return
        if self.poison:
            fill_with_nan(self.buffer)
        else:
            self.buffer.untyped_storage().resize_(0)


def lay_out(buffer: Tensor, layout: Layout, trainable: Iterable[bool] | None) -> tuple[Tensor, ...]:
    """Return leaves that lie in ``buffer``, whose memory must be allocated: one for each parameter.

    They are plain tensors, but with ``trainable`` parameters, which that says of each.
    """
    # Tensors made in inference mode could never be saved for a later backward.
    with torch.inference_mode(False), torch.no_grad():
        leaves = tuple(
            # `.data` gives each leaf a version counter of its own: filling the buffer for backward must not
            # look like an in-place change of what autograd saved in forward.
            buffer[start : start + numel].view(shape).data
            for start, numel, shape in zip(layout.starts, layout.numels, layout.shapes, strict=True)
        )
    if trainable is None:
        return leaves
    return tuple(nn.Parameter(leaf, wanted) for leaf, wanted in zip(leaves, trainable, strict=True))


def fill_with_nan(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.data.fill_(float("nan"))
