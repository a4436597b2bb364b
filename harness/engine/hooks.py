"""When groups act: around a unit's forward, before and after its backward, at the end of backward. On ranks.

A unit is a module with at most one group. Units that share a root form a tree, which knows whether a forward
or a backward is going on. One step of a unit that shards everything:

    before_forward    gather, start the next unit's gather; modules see full parameters
    after_forward     free; hook the outputs
    _before_backward  gather, start the gather of the unit before
    _on_gradient      with the last gradient: free, settle the reduction under way, start this group's
    finish            at the end of backward: reduce and free what is left

After an exception `abort_forward`, `abort_backward` and `start` lead back to between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook

from harness.engine.axes import neighbours
from harness.engine.containers import cast_floating, map_tensors, tensors
from harness.engine.functional import outside_transforms
from harness.engine.group import ShardGroup
from harness.engine.parameters import Slot
from harness.engine.policy import BackwardPrefetch, GroupState, MixedPrecision, ShardingStrategy
from harness.engine.pool import BufferPool
from harness.engine.prefetch import Prefetcher
from harness.engine.switches import Switches


@dataclass(frozen=True)
class UnitSettings:
    """``device``: where arguments of the root and buffers are moved to; None leaves them where they are.

    ``keeps_precision``: the unit stands with full precision amid units without: its floating-point arguments
    are cast up and its results back to what came in. ``output_dtype``: of floating-point results; None leaves
    them as they are.
    """

    strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    device: torch.device | None
    keeps_precision: bool
    forward_prefetch: bool = False
    backward_prefetch: BackwardPrefetch | None = None
    output_dtype: torch.dtype | None = None


class Tree:
    """What the units below one root share."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        asked = self.root.settings
        self.prefetcher = Prefetcher(asked.forward_prefetch, asked.backward_prefetch)
        self._pool = BufferPool()
        self._neighbours: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._reducing: ShardGroup | None = None
        self._forwards = 0
        self.backward = -1
        """The outermost backward that goes through the tree, as `_backward_id` numbers it; -1 for none."""

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of any unit is going on."""
        return self._forwards > 0 or self.in_backward

    @property
    def in_backward(self) -> bool:
        # A device's thread may let go of a backward that raised a little late.
        return self.backward != -1 and _backward_id() != -1

    def enter_forward(self) -> None:
        if self._forwards == 0 and not self.in_backward:
            # Kept parameters may be stale, and a step that raised may have left things behind.
            self.backward = -1
            for unit in self.units:
                unit.start()
            self.prefetcher.begin_forward()
        self._forwards += 1

    def leave_forward(self, failed: bool) -> None:
        """After a failure nothing more is awaited: who knows whether the other ranks came as far."""
        self._forwards -= 1
        if self._forwards == 0 and not self.in_backward:
            for unit in self.units:
                unit.end_forward(failed)

    def neighbours(self, group: ShardGroup, count: int) -> dist.ProcessGroup:
        """Return the process group of the ``count`` ranks that split the parameters of ``group``."""
        ranks = neighbours(group.settings.axes, count)
        if ranks not in self._neighbours:
            # Only the members make it: other replicas may not be here now.
            self._neighbours[ranks] = dist.new_group(ranks, use_local_synchronization=True)
        return self._neighbours[ranks]

    def collect(self, group: ShardGroup, sync: bool) -> None:
        """Take the gradients that ``group`` has; with ``sync`` start to average them.

        One group is on its way at a time, while the gradients of the next are computed.
        """
        if not sync:
            group.gradients.collect_unsynced(group.leaves)
            return
        self._settle()
        group.gradients.collect(group.leaves, self._pool)
        self._reducing = group

    def enter_backward(self) -> None:
        """Make sure that the end of this backward is seen, once, in the outermost backward."""
        if self.backward == -1:
            self.backward = _backward_id()
            self._drop_reduction()
            self.prefetcher.begin_backward()
            end = partial(self._end_backward)
            # Autograd alone holds it, and lets go of it without a call after an exception.
            finalize(end, self._abort_backward, self.backward).atexit = False
            Variable._execution_engine.queue_callback(end)

    def _end_backward(self) -> None:
        self.backward = -1
        for unit in self.units:
            unit.finish()
        self._settle()
        self._pool.clear()

    def _abort_backward(self, backward: int) -> None:
        """Go back to between steps if ``backward`` has not ended well; as after a forward, await nothing."""
        if self.backward == backward:
            self.backward = -1
            for unit in self.units:
                unit.abort_backward()

    def _drop_reduction(self) -> None:
        """Forget what a backward that raised had begun to reduce."""
        if self._reducing:
            self._reducing.gradients.drop_started()
            self._reducing = None

    def _settle(self) -> None:
        if self._reducing:
            self._reducing.gradients.settle()
            self._reducing = None


class Unit:
    """Drive the group of one module; None if the module has no parameters of its own."""

    def __init__(self, group: ShardGroup | None, buffers: Mapping[str, Slot], settings: UnitSettings) -> None:
        self.group = group
        self.settings = settings
        self.switches = Switches(frees_after_forward=settings.strategy.frees_after_forward)
        self.num_modules = 1
        """How many modules share the group: it is given up when all have had their forwards."""
        self._ran: set[object] = set()
        self.tree = Tree([self])
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        self.buffers = dict(buffers)
        self._watched: tuple[Tensor, ...] = ()
        self._nodes: dict[Tensor, Node] = {}
        self._awaited: dict[int, int] = {}
        self._inputs_done = False
        self._recomputed = False
        self._outer_dtype: torch.dtype | None = None

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``forward``, of the unit's module or one of them, makes of the arguments."""
        tree = self.tree
        tree.enter_forward()
        try:
            args, kwargs = self.before_forward(args, kwargs)
            output = self.after_forward(forward(*args, **kwargs), of=forward)
        except BaseException:
            self.abort_forward()
            tree.leave_forward(failed=True)
            raise
        tree.leave_forward(failed=False)
        return output

    def start(self) -> None:
        """Begin a step from a clean state, with buffers in the dtype and place of computation."""
        self._awaited.clear()
        self._ran.clear()
        if self.group:
            self.group.discard()
        for name, slot in self.buffers.items():
            self._cast_buffer(name, slot)

    def join(self, tree: Tree) -> None:
        """Belong to ``tree`` from now on."""
        self.tree = tree

    def apply(self, fn: Callable[[Tensor], Tensor], apply_to_rest: Callable[[], object]) -> None:
        """Convert the group with ``fn``, a cast or a move, while its parameters are out of the modules.

        ``apply_to_rest`` does so with what the modules have then.
        """
        if self.group:
            self.group.hide()
        try:
            apply_to_rest()
        finally:
            if self.group:
                self.group.convert(fn)
        # Follow a cast of the module with the dtypes in which buffers are saved.
        self.buffer_dtypes = {n: fn(torch.empty(0, dtype=d)).dtype for n, d in self.buffer_dtypes.items()}

    def before_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather, and return the arguments cast and moved where this unit has to."""
        args, kwargs = self._prepare((args, kwargs))
        self._recomputed = self.tree.in_backward
        if self.group:
            self.group.prefetch()
            if not self._recomputed:
                self.tree.prefetcher.in_forward(self.group, self.switches.forward_prefetch)
            self.group.gather()
            if torch.is_grad_enabled():
                self._watch_leaves(self.group)
                args, kwargs = self._watch_inputs(self.group, (args, kwargs))
        return args, kwargs

    def after_forward(self, output: Any, of: object) -> Any:
        """See to it that backward finds full parameters; free or keep them if ``of`` is the last module."""
        graded = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        if graded and (self.group or self.tree.root is self):
            leaves = self.group.leaves if self.group else ()
            register_multi_grad_hook(graded, lambda _: self._before_backward(leaves), mode="any")
            if self.group and not self.tree.in_backward:
                self.tree.prefetcher.after_forward(self.group)
        self._ran.add(of)
        complete = len(self._ran) >= self.num_modules
        # What is recomputed in backward is needed there next.
        if self.group and complete and not self.tree.in_backward:
            self._give_up(self.group, hooked=bool(graded))
            self._ran.clear()
        dtype = self._outer_dtype or self.settings.output_dtype
        return cast_floating(dtype, output) if dtype else output

    def abort_forward(self) -> None:
        """Give up after an exception; but checkpointing ends recomputations with one, and goes on.

        Full parameters stay until the next forward: frames of the traceback hold them, and whoever prints
        these (pytest does) would read memory that is gone.
        """
        if self.group and not self.tree.in_backward:
            self.group.keep()

    def abort_backward(self) -> None:
        """Show shards after an exception; full parameters stay, as in `abort_forward`."""
        self._awaited.clear()
        if self.group:
            self.group.keep()
            self.group.drop_gradients()
            self.group.gradients.drop_unsynced()

    def finish(self) -> None:
        """Leave nothing of a backward that has ended: reduce what nobody waited for, and free."""
        self._awaited.clear()
        if not self.group:
            return
        left_over = any(leaf.grad is not None for leaf in self.group.leaves)
        if left_over or (self.switches.sync and self.group.gradients.unreduced):
            self.tree.collect(self.group, self.switches.sync)
        self._give_up_after_backward(self.group)

    def end_forward(self, failed: bool) -> None:
        """Free what was gathered ahead for a forward that then did not come."""
        if self.group and failed:
            self.group.gradients.drop_unsynced()
        elif self.group and self.group.state is GroupState.PREFETCHED and not self.group.lasts:
            self.group.free()
        elif self.group and self._ran:  # not all modules of the group came
            self.group.keep()

    def _prepare(self, arguments: Any) -> Any:
        mixed, is_root = self.settings.mixed_precision, self.tree.root is self
        if is_root and (device := self.settings.device):
            arguments = map_tensors(lambda t: t.to(device), arguments)
        if self.settings.keeps_precision:
            self._outer_dtype = next((t.dtype for t in tensors(arguments) if t.is_floating_point()), None)
            own = self.group.shard.compute_dtype if self.group else torch.float32
            return cast_floating(own, arguments)
        wanted = mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs
        return cast_floating(mixed.param_dtype, arguments) if wanted and mixed.param_dtype else arguments

    def _cast_buffer(self, name: str, slot: Slot) -> None:
        buffer = slot.module._buffers.get(slot.name)
        dtype = self.settings.mixed_precision.buffer_dtype
        if buffer is None:
            return
        if dtype and buffer.is_floating_point() and buffer.dtype != dtype:
            self.buffer_dtypes[name] = buffer.dtype
            buffer = buffer.to(dtype)
        slot.module._buffers[slot.name] = buffer.to(self.settings.device or buffer.device)

    def _give_up(self, group: ShardGroup, hooked: bool) -> None:
        """After forward: keep what a backward will use, if it could not be told to gather it again."""
        needs_backward = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in group.leaves)
        frees = self.switches.frees_after_forward
        frees = self.tree.root is not self if frees is None else frees
        if (hooked and not frees) or (needs_backward and not hooked):
            group.keep()
        elif hooked and self.switches.split_among:
            group.split(self.tree.neighbours(group, self.switches.split_among))
        else:
            group.free()

    @outside_transforms
    def _watch_leaves(self, group: ShardGroup) -> None:
        if self._watched is not group.leaves:
            self._watched, self._nodes = group.leaves, {}
        for leaf in group.leaves:
            if leaf.requires_grad and leaf not in self._nodes:
                self._nodes[leaf] = get_gradient_edge(leaf).node
                leaf.register_post_accumulate_grad_hook(_weakly(self._on_gradient))  # type: ignore[no-untyped-call]

    def _watch_inputs(self, group: ShardGroup, arguments: Any) -> Any:
        """Return ``arguments``; watch gradients pass through them, until when frozen parameters are read."""
        if group.all_trainable:
            return arguments
        # A leaf may be passed in at every step, and would gather a hook each time.
        arguments = map_tensors(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t, arguments)
        inputs = [t for t in tensors(arguments) if t.requires_grad]
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._on_inputs_done(), mode="all")
        return arguments

    def _before_backward(self, leaves: tuple[Tensor, ...]) -> None:
        """Gather what the graph of a forward with ``leaves`` reads."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "backward with create_graph=True is not built: second derivatives would read parameters "
                "that are freed by then."
            )
        self.tree.enter_backward()
        self._inputs_done = False
        if self.group:
            if self.group.leaves is not leaves:
                raise RuntimeError(
                    f"{self.group.settings.unit}: the module was converted or moved between forward and "
                    "backward; do it between steps."
                )
            self.group.prefetch()
            self.tree.prefetcher.before_gradients(self.group, self.switches.backward_prefetch)
            self.group.gather()

    def _on_gradient(self, _: Tensor) -> None:
        """Reduce when the last leaf that this backward reaches has its gradient."""
        # As `register_multi_grad_hook` counts; but that one holds all gradients until the last has come,
        # which makes autograd copy each of them.
        self.tree.enter_backward()
        backward = _backward_id()
        self._awaited[backward] = self._num_awaited(backward) - 1
        if self._awaited[backward] == 0 and self.group:
            done = self._inputs_done or self._is_done(self.group, backward)
            if done:
                self._give_up_after_backward(self.group)  # before memory for the reduction is taken
            self.tree.collect(self.group, self.switches.sync)
            if done:
                self.tree.prefetcher.after_gradients()

    def _is_done(self, group: ShardGroup, backward: int) -> bool:
        """Tell whether nothing will read the full parameters again, now that ``backward`` gave all gradients.

        A parameter without one may be read still: a frozen one, or one that a reentrant checkpoint hides from
        this backward until it runs a nested one. After a nested backward the next may come, unless all of the
        unit was recomputed for it: then it will be again, and gathers.
        """
        everywhere = all(leaf.grad is not None for leaf in group.leaves)
        return everywhere and (backward == self.tree.backward or self._recomputed)

    def _on_inputs_done(self) -> None:
        self._inputs_done = True
        if self._num_awaited(_backward_id()) == 0 and self.group:
            self._give_up_after_backward(self.group)

    def _give_up_after_backward(self, group: ShardGroup) -> None:
        if self.switches.frees_after_backward:
            group.free()
        else:
            group.keep(lastingly=True)

    def _num_awaited(self, backward: int) -> int:
        """Return how many leaves ``backward`` will still give a gradient to."""
        if backward not in self._awaited:
            return sum(map(torch._C._will_engine_execute_node, self._nodes.values()))
        return self._awaited[backward]


def _weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Return ``method`` without a hold on its object: a leaf's hook, the unit and autograd's node of the leaf
    would hold each other for ever, as no garbage collector sees through the node."""
    reference = WeakMethod(method)

    def call(tensor: Tensor) -> None:
        if alive := reference():
            alive(tensor)

    return call


def _backward_id() -> int:
    """Return the number of the backward that this thread is in, -1 outside. Nested ones differ."""
    return torch._C._current_graph_task_id()
