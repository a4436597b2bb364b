"""Which gradients a backward will still bring to the full parameters of a unit. On ranks."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from harness.engine.functional import outside_transforms

T = TypeVar("T")


class Awaited:
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
