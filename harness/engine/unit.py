"""The callbacks of one unit: around its forward, around its backward, at the end of backward. Runs on ranks.

A unit is a module with at most one group. Units that share a root share a `RootState`, which knows whether a
forward or a backward is going on. One step of a unit that shards everything:

    _before_forward   unshard, prefetch the next unit's group; modules see unsharded parameters
    _after_forward    reshard; hook the outputs
    _before_backward  unshard, prefetch the group of the unit before
    _on_gradient      with the last gradient: reshard, finish the reduction in flight, start this group's
    finish            at the end of backward: reduce and reshard what is left

After an exception `_abort_forward`, `abort_backward` and `start` lead back to between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from lockstep.engine.api import MixedPrecision
from lockstep.engine.casting import Buffers, cast_floating, map_tensors, tensors
from lockstep.engine.config import UnitConfig
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.root import Kept, RootState
from lockstep.engine.torch_internals import current_backward, untraced, untraced_itself
from lockstep.engine.unsharded import Precision, UnshardedParams

T = TypeVar("T")


@dataclass
class UnitOptions:
    """Options of a unit that the user may change between steps.

    Attributes:
        sync: Backward reduces gradients.
        reshard_after_forward: None means below the root only.
        reshard_after_backward: Without, the next forward finds unsharded parameters.
        unshard_in_backward: Without, nothing that backward computes reads the parameters.
        reshard_to: How many neighbouring ranks hold the parameters between them from forward to backward,
            where they are resharded; None means all.
        forward_prefetch: The groups to prefetch in this unit's forward, instead of what is guessed.
        backward_prefetch: Likewise for its backward.
    """

    sync: bool = True
    reshard_after_forward: bool | None = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reshard_to: int | None = None
    forward_prefetch: Sequence[ParamGroup] = ()
    backward_prefetch: Sequence[ParamGroup] = ()


class Unit:
    """Drive the group of one module; None if the module has no parameters of its own.

    Attributes:
        num_modules: How many modules share the group: it is resharded when all have had their forwards.
    """

    root_state: RootState

    def __init__(
        self, group: ParamGroup | None, buffers: Buffers, config: UnitConfig, precision: Precision
    ) -> None:
        self.group = group
        self.buffers = buffers
        self.config = config
        self.precision = precision
        self.options = UnitOptions(reshard_after_forward=config.strategy.reshards_after_forward)
        self.num_modules = 1
        self._ran: set[nn.Module] = set()
        self._kept_in_forward = False
        self._recomputed = False
        self._outer_dtype: torch.dtype | None = None
        self._watched: list[RemovableHandle] = []
        if group:
            group.gradients.arrivals.watch(WeakMethod(self._enter_backward))
        RootState([self])

    @untraced_itself
    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what `forward` of `module`, the unit's or one of them, makes of the arguments."""
        root, call = self.root_state, object()
        recomputed = root.enter_forward()
        try:
            args, kwargs = self._before_forward(args, kwargs, call, recomputed)
            output = self._after_forward(forward(*args, **kwargs), module, call, recomputed)
        except BaseException:
            self._abort_forward(recomputed)
            root.leave_forward(failed=True)
            raise
        root.leave_forward(failed=False)
        return output

    def start(self) -> None:
        """Begin a step from a clean state, with buffers in the dtype and place of computation."""
        self._unwatch_recomputation()
        self._ran.clear()
        self._kept_in_forward = False
        if group := self.group:
            group.reset()
            if group.begin_forward(keeps=not self._reshards) and group.full:
                if torch.is_grad_enabled():
                    group.full.watch(_weakly(self._on_gradient, group.full))
                self.root_state.kept.append((group, group.full))
        self.prepare_buffers()

    def prepare_buffers(self) -> None:
        """Cast buffers to the current dtype and move them to where the unit computes."""
        if self.buffers.refs:
            self.buffers.prepare(self.precision.now.buffer_dtype, self.config.device)

    def apply(self, fn: Callable[[Tensor], Tensor], apply_to_rest: Callable[[], object]) -> None:
        """Convert the group with `fn`, a cast or a move, while its parameters are not in the modules.

        `apply_to_rest` does so with what the modules have then.
        """
        if self.group:
            self.group.hide()
        try:
            apply_to_rest()
        finally:
            if self.group:
                self.group.convert(fn)
        self.buffers.convert(fn)

    def describe(self) -> str:
        """Return one line on how the unit shards: strategy, state, local and full numel, dtypes."""
        if self.group is None:
            return f"{self.config.strategy.name}, no parameters of its own"
        group, layout, dtypes = self.group, self.group.shard.layout, self.group.dtypes
        return (
            f"{self.config.strategy.name}, {group.state.name}, "
            f"numel={layout.shard_numel}/{layout.padded_numel}, dtype={group.shard.flat.dtype}, "
            f"compute={dtypes.compute}, reduce={dtypes.reduce}{', offloaded' if self.config.offload else ''}"
        )

    def abort_backward(self) -> None:
        """Show shards after an exception; unsharded parameters stay, as in `_abort_forward`."""
        self._unwatch_recomputation()
        if self.group:
            self.group.retain()
            self.group.drop_gradients()
            self.group.gradients.drop_accumulated()

    def finish(self) -> None:
        """End a backward: reduce what no callback has reduced, and reshard."""
        self._unwatch_recomputation()
        group = self.group
        if not group:
            return
        for full in group.variants.values():
            full.forget_pending()
            if any(leaf.grad is not None for leaf in full.leaves):
                self.root_state.reduce(group, full, self.options.sync)
        if group.gradients.arrivals.waiting or (self.options.sync and group.gradients.unreduced):
            self.root_state.reduce(group, group.variant(group.dtypes), self.options.sync)
        self._reshard_after_backward(group, group.full)
        group.show_shards()

    def end_forward(self, failed: bool) -> None:
        """Show shards again; reshard what no backward needs, and what was prefetched for nothing."""
        group = self.group
        if not group:
            return
        if failed:
            group.gradients.drop_accumulated()
        else:
            group.drop_prefetched()
            if self._ran:  # not all modules of the group came
                self._reshard_after_forward(group, hooked=False)
            if self._kept_in_forward:
                group.reshard()
        group.show_shards()
        if group.shard.retrained:
            group.gradients.arrivals.watch(WeakMethod(self._enter_backward))
            group.shard.retrained = False

    @untraced
    def _before_forward(self, args: Any, kwargs: Any, call: object, recomputed: bool) -> tuple[Any, Any]:
        """Unshard, and return the arguments cast and moved where this unit has to."""
        args, kwargs = self._cast_inputs((args, kwargs), self.precision.now)
        self.prepare_buffers()  # again: a mode may have changed since the step began
        self._recomputed = recomputed
        if self.group:
            dtypes = self.group.dtypes
            # This unit's all-gather is in the queue before that of the next.
            self.group.prefetch(dtypes)
            if not recomputed:
                self.root_state.prefetcher.in_forward(self.group, self.options.forward_prefetch)
            self.group.unshard(dtypes)
            if torch.is_grad_enabled():
                args, kwargs = self._watch(self.group, (args, kwargs), call)
        return args, kwargs

    @untraced
    def _after_forward(self, output: Any, module: nn.Module, call: object, recomputed: bool) -> Any:
        """Make sure that backward unshards again; reshard or retain if `module` is the last of the unit."""
        graded: list[Tensor] = []
        if torch.is_grad_enabled():
            output, graded = _differentiable(output)
        group, root = self.group, self.root_state
        kept = () if recomputed else root.kept_by_outermost()
        if graded and (group or kept or root.root is self):
            full = group.full if group else None
            hook = partial(self._before_backward, full, call, kept)
            register_multi_grad_hook(graded, hook, mode="any")
            if group and not recomputed and self.options.unshard_in_backward:
                root.prefetcher.after_forward(group)
        self._ran.add(module)
        # What is recomputed in backward is needed there next.
        if group and len(self._ran) >= self.num_modules and not recomputed:
            self._reshard_after_forward(group, hooked=bool(graded))
            self._ran.clear()
        dtype = self._outer_dtype or self.config.output_dtype
        return cast_floating(dtype, output) if dtype else output

    @untraced
    def _abort_forward(self, recomputed: bool) -> None:
        """Show shards after an exception; but checkpointing ends recomputations with one, and goes on.

        Unsharded parameters stay until the next forward: frames of the traceback hold them, and a printer of
        these, as pytest is, would read memory that is gone.
        """
        if self.group and not recomputed:
            self.group.retain()

    def _cast_inputs(self, arguments: Any, mixed: MixedPrecision) -> Any:
        is_root = self.root_state.root is self
        if is_root and (device := self.config.device):
            arguments = map_tensors(lambda t: t.to(device), arguments)
        self._outer_dtype = None
        if self._stands_out():
            self._outer_dtype = next((t.dtype for t in tensors(arguments) if t.is_floating_point()), None)
            own = self.group.dtypes.compute if self.group else torch.float32
            return cast_floating(own, arguments)
        wanted = mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs
        return cast_floating(mixed.param_dtype, arguments) if wanted and mixed.param_dtype else arguments

    def _stands_out(self) -> bool:
        """Return whether the unit has full precision among units without: by its config, or alone in eval."""
        if self.config.keeps_precision or not self.config.full_precision_in_eval:
            return self.config.keeps_precision
        root_is_suspended = self.root_state.root.precision.is_suspended
        return self.precision.is_suspended and not root_is_suspended and self.group is not None

    def _reshard_after_forward(self, group: ParamGroup, hooked: bool) -> None:
        """Reshard, or retain what a backward will use: if it wants to, or if no hook can unshard again.

        What is kept the root's forward goes on to see, and a backward of that has to find it again.
        """
        root, full = self.root_state, group.full
        trained = full is not None and any(leaf.requires_grad for leaf in full.leaves)
        if full and not self._reshards and (torch.is_grad_enabled() or trained or not root.with_backward):
            # Without autograd here none may follow, or reentrant checkpointing recomputes, and unshards.
            self._kept_in_forward = not torch.is_grad_enabled()
            root.kept.append((group, full))
            group.retain(shown=True)
        elif trained and torch.is_grad_enabled() and not hooked:
            group.retain()
        elif hooked and self.options.reshard_to:
            group.reshard_to(self.root_state.neighbours(group, self.options.reshard_to))
        else:
            group.reshard()

    @property
    def _reshards(self) -> bool:
        """Whether forward ends with a reshard."""
        reshards = self.options.reshard_after_forward
        return self.root_state.root is not self if reshards is None else reshards

    def _watch(self, group: ParamGroup, arguments: Any, call: object) -> Any:
        """Return `arguments`; hook leaves, and arguments where frozen parameters are read until then."""
        full = group.full
        assert full
        full.watch(_weakly(self._on_gradient, full))
        if group.shard.all_trainable:
            return arguments
        arguments, inputs = _differentiable(arguments)
        if inputs:
            hook = partial(self._on_inputs_done, group, full, call)
            register_multi_grad_hook(inputs, hook, mode="all")
        return arguments

    @untraced
    def _before_backward(self, full: UnshardedParams | None, call: object, kept: Kept, _: object) -> None:
        """Unshard what the graph of a forward with `full` reads, and bring back what that had `kept`."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "backward with create_graph=True is not built: second derivatives would read parameters "
                "that are freed by then."
            )
        self._enter_backward()
        for other, its_full in reversed(kept):
            other.bring_back(its_full)
        group = self.group
        if group and full:
            if full not in group.variants.values():
                raise RuntimeError(
                    f"{self.config.name}: the module was converted or moved between forward and "
                    "backward; do it between steps."
                )
            full.begin_backward(call)
            needed = self.options.unshard_in_backward
            if needed:
                group.prefetch(full.dtypes)
            self.root_state.prefetcher.before_gradients(group, self.options.backward_prefetch)
            if needed:
                group.unshard(full.dtypes)

    @untraced
    def _on_gradient(self, full: UnshardedParams) -> None:
        """Reduce when the last leaf of `full` that this backward reaches has its gradient."""
        self._enter_backward()
        backward = current_backward()
        if full.count_gradient(backward) and self.group:
            done = full.inputs_done or self._is_done(full, backward)
            if done:
                # Before the reduction takes memory: else unsharded parameters, their gradients and the two
                # buffers of the reduction would be there at once, at the peak of the step.
                self._reshard_after_backward(self.group, full)
                self._watch_recomputation(self.group)
            self.root_state.reduce(self.group, full, self.options.sync)
            if done:
                self.root_state.prefetcher.after_gradients()

    def _watch_recomputation(self, group: ParamGroup) -> None:
        """Unshard again if this backward runs a module of `group`, now that it has all gradients of it.

        It does so in a checkpointed segment inside of this unit, after what used the parameters last.
        """
        places = [place for param in group.shard.params for place in param.refs]
        for module in {place.module for place in places}:
            self._watched.append(module.register_forward_pre_hook(self._before_recomputed))

    def _unwatch_recomputation(self) -> None:
        while self._watched:
            self._watched.pop().remove()

    @untraced
    def _before_recomputed(self, module: nn.Module, _: object) -> None:
        group = self.group
        if group and group.full and self.root_state.in_backward and group.shard.is_shown_by(module):
            group.unshard(group.full.dtypes)  # to the end of the backward, which may read it as late

    def _is_done(self, full: UnshardedParams, backward: int) -> bool:
        """Return whether nothing reads unsharded parameters any more, now that `backward` gave all gradients.

        A parameter without one may be read still: a frozen one, or one that a reentrant checkpoint hides from
        this backward until it runs a nested one. After a nested backward the next may come, unless all of the
        unit was recomputed for it: then it will be again, and unshards.
        """
        everywhere = all(leaf.grad is not None for leaf in full.leaves)
        return everywhere and (backward == self.root_state.backward or self._recomputed)

    @untraced
    def _on_inputs_done(self, group: ParamGroup, full: UnshardedParams, call: object, _: object) -> None:
        full.end_inputs(call)
        # What forward kept another module may read, also between two calls of this one.
        if full.inputs_done and full.pending(current_backward()) == 0 and self._reshards:
            self._reshard_after_backward(group, full)

    @untraced
    def _enter_backward(self) -> None:
        if self.root_state.backward == -1:
            self.root_state.enter_backward()

    def _reshard_after_backward(self, group: ParamGroup, full: UnshardedParams | None) -> None:
        """Give up `full`, or retain it if the user wants that; `group` may have done so for other dtypes."""
        if group.full is full and self.options.reshard_after_backward:
            group.reshard()
        elif group.full is full:
            group.retain()
            group.pin()


def _differentiable(values: Any) -> tuple[Any, list[Tensor]]:
    """Return `values` and those tensors in it that need gradients, with views in place of leaves.

    The same leaves come at every step, and would collect hooks.
    """
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor = tensor.view_as(tensor) if tensor.is_leaf else tensor
            found.append(tensor)
        return tensor

    return (find(values) if isinstance(values, Tensor) else map_tensors(find, values)), found


def _weakly(method: Callable[[T], None], subject: T) -> Callable[[Tensor], None]:
    """Return a hook that calls `method(subject)` without a reference to either.

    A leaf's hook, the unit and autograd's node of the leaf would hold each other for ever, as no garbage
    collector sees through the node.
    """
    return partial(_call_weakly, WeakMethod(method), ref(subject))


@untraced
def _call_weakly(method: WeakMethod[Callable[[T], None]], subject: ref[T], _: Tensor) -> None:
    alive, there = method(), subject()
    if alive and there is not None:
        alive(there)
