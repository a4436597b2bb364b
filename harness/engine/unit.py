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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from harness.engine.api import BackwardPrefetch, ShardingStrategy
from harness.engine.casting import Buffers, cast_floating, map_tensors, tensors
from harness.engine.config import Precision
from harness.engine.param_group import ParamGroup
from harness.engine.root import RootState, backward_id
from harness.engine.unsharded import UnshardedParams, weakly

if TYPE_CHECKING:
    from harness.engine.param_group import ParamGroup


@dataclass
class UnitOptions:
    """``sync``: backward reduces gradients. ``frees_after_forward``: full parameters are given up after it;
    None means below the root only. ``frees_after_backward``: likewise; without, the next forward finds them.
    ``forward_prefetch``, ``backward_prefetch``: the groups to gather while this unit computes, instead of
    what is guessed. ``split_among``: how many neighbouring ranks hold full parameters between them from
    forward to backward, where these are given up; None is all.
    """

    sync: bool = True
    frees_after_forward: bool | None = True
    frees_after_backward: bool = True
    split_among: int | None = None
    forward_prefetch: Sequence[ParamGroup] = ()
    backward_prefetch: Sequence[ParamGroup] = ()


@dataclass(frozen=True)
class UnitSettings:
    """``device``: where arguments of the root and buffers are moved to; None leaves them where they are.

    ``keeps_precision``: the unit stands with full precision amid units without: its floating-point arguments
    are cast up and its results back to what came in. ``output_dtype``: of floating-point results; None leaves
    them as they are.
    """

    strategy: ShardingStrategy
    precision: Precision
    device: torch.device | None
    keeps_precision: bool
    forward_prefetch: bool = False
    backward_prefetch: BackwardPrefetch | None = None
    output_dtype: torch.dtype | None = None


class Unit:
    """Drive the group of one module; None if the module has no parameters of its own."""

    def __init__(self, group: ParamGroup | None, buffers: Buffers, settings: UnitSettings) -> None:
        self.group = group
        self.settings = settings
        self.options = UnitOptions(frees_after_forward=settings.strategy.frees_after_forward)
        self.num_modules = 1
        """How many modules share the group: it is given up when all have had their forwards."""
        self.root_state = RootState([self])
        self.buffers = buffers
        self._ran: set[nn.Module] = set()
        self._recomputed = False
        self._outer_dtype: torch.dtype | None = None

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``forward`` of ``module``, the unit's or one of them, makes of the arguments."""
        tree, call = self.root_state, object()
        tree.enter_forward()
        try:
            args, kwargs = self.before_forward(args, kwargs, call)
            output = self.after_forward(forward(*args, **kwargs), module, call)
        except BaseException:
            self.abort_forward()
            tree.leave_forward(failed=True)
            raise
        tree.leave_forward(failed=False)
        return output

    def start(self) -> None:
        """Begin a step from a clean state, with buffers in the dtype and place of computation."""
        self._forget_awaited()
        self._ran.clear()
        if self.group:
            self.group.discard()
        self.prepare_buffers()

    def prepare_buffers(self) -> None:
        """Let modules see buffers in the dtype of now and in the place of computation."""
        self.buffers.prepare(self.settings.precision.now.buffer_dtype, self.settings.device)

    def join(self, tree: RootState) -> None:
        """Belong to ``tree`` from now on."""
        self.root_state = tree

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
        self.buffers.convert(fn)

    def before_forward(self, args: Any, kwargs: Any, call: object) -> tuple[Any, Any]:
        """Gather, and return the arguments cast and moved where this unit has to."""
        args, kwargs = self._prepare((args, kwargs))
        self.prepare_buffers()  # again: a mode may have changed since the step began
        self._recomputed = self.root_state.in_backward
        if self.group:
            self.group.prefetch()
            if not self._recomputed:
                self.root_state.prefetcher.in_forward(self.group, self.options.forward_prefetch)
            self.group.gather()
            if torch.is_grad_enabled():
                args, kwargs = self._watch(self.group, (args, kwargs), call)
        return args, kwargs

    def after_forward(self, output: Any, module: nn.Module, call: object) -> Any:
        """See to it that backward finds full parameters; free or keep them if ``module`` is the last."""
        if torch.is_grad_enabled():
            output = _without_leaves(output)
        graded = [t for t in tensors(output) if t.requires_grad] if torch.is_grad_enabled() else []
        if graded and (self.group or self.root_state.root is self):
            full = self.group.full if self.group else None
            register_multi_grad_hook(graded, lambda _: self._before_backward(full, call), mode="any")
            if self.group and not self.root_state.in_backward:
                self.root_state.prefetcher.after_forward(self.group)
        self._ran.add(module)
        complete = len(self._ran) >= self.num_modules
        # What is recomputed in backward is needed there next.
        if self.group and complete and not self.root_state.in_backward:
            self._give_up(self.group, hooked=bool(graded))
            self._ran.clear()
        dtype = self._outer_dtype or self.settings.output_dtype
        return cast_floating(dtype, output) if dtype else output

    def abort_forward(self) -> None:
        """Give up after an exception; but checkpointing ends recomputations with one, and goes on.

        Full parameters stay until the next forward: frames of the traceback hold them, and whoever prints
        these (pytest does) would read memory that is gone.
        """
        if self.group and not self.root_state.in_backward:
            self.group.keep()

    def abort_backward(self) -> None:
        """Show shards after an exception; full parameters stay, as in `abort_forward`."""
        self._forget_awaited()
        if self.group:
            self.group.keep()
            self.group.drop_gradients()
            self.group.gradients.drop_unsynced()

    def finish(self) -> None:
        """Leave nothing of a backward that has ended: reduce what nobody waited for, and free."""
        self._forget_awaited()
        if not self.group:
            return
        for full in self.group.variants:
            if any(leaf.grad is not None for leaf in full.leaves):
                self.root_state.collect(self.group, full, self.options.sync)
        if self.options.sync and self.group.gradients.unreduced:
            self.root_state.collect(self.group, self.group.variant(self.group.shard.dtypes), sync=True)
        self._give_up_after_backward(self.group)

    def end_forward(self, failed: bool) -> None:
        """Free what was gathered ahead for a forward that then did not come."""
        if self.group and failed:
            self.group.gradients.drop_unsynced()
        elif self.group:
            self.group.drop_prefetched()
            if self._ran:  # not all modules of the group came
                self._give_up(self.group, hooked=False)

    def _prepare(self, arguments: Any) -> Any:
        mixed, is_root = self.settings.precision.now, self.root_state.root is self
        if is_root and (device := self.settings.device):
            arguments = map_tensors(lambda t: t.to(device), arguments)
        self._outer_dtype = None
        if self._stands_out():
            self._outer_dtype = next((t.dtype for t in tensors(arguments) if t.is_floating_point()), None)
            own = self.group.shard.dtypes.compute if self.group else torch.float32
            return cast_floating(own, arguments)
        wanted = mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs
        return cast_floating(mixed.param_dtype, arguments) if wanted and mixed.param_dtype else arguments

    def _stands_out(self) -> bool:
        """Tell whether the unit has full precision amid units without, as told or in eval of it alone."""
        own, outer = self.settings.precision, self.root_state.root.settings.precision
        in_eval_alone = own.is_suspended and not outer.is_suspended and self.group is not None
        return self.settings.keeps_precision or in_eval_alone

    def _give_up(self, group: ParamGroup, hooked: bool) -> None:
        """After forward: keep what a backward will use, if it could not be told to gather it again."""
        needs_backward = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in group.leaves)
        frees = self.options.frees_after_forward
        frees = self.root_state.root is not self if frees is None else frees
        if (hooked and not frees) or (needs_backward and not hooked):
            group.keep()
        elif hooked and self.options.split_among:
            group.split(self.root_state.neighbours(group, self.options.split_among))
        else:
            group.free()

    def _watch(self, group: ParamGroup, arguments: Any, call: object) -> Any:
        """Return ``arguments``; see to it that gradients of leaves are noticed, and what goes out through
        the arguments, until when frozen parameters are read."""
        full = group.full
        assert full
        on_gradient = weakly(self._on_gradient, full)
        for leaf in full.leaves:
            full.awaited.watch(leaf, on_gradient)
        if group.all_trainable:
            return arguments
        arguments = _without_leaves(arguments)
        inputs = [t for t in tensors(arguments) if t.requires_grad]
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._on_inputs_done(group, full, call), mode="all")
        return arguments

    def _before_backward(self, full: UnshardedParams | None, call: object) -> None:
        """Gather what the graph of a forward with ``full`` reads."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "backward with create_graph=True is not built: second derivatives would read parameters "
                "that are freed by then."
            )
        self.root_state.enter_backward()
        if self.group and full:
            if full not in self.group.variants:
                raise RuntimeError(
                    f"{self.group.settings.unit}: the module was converted or moved between forward and "
                    "backward; do it between steps."
                )
            full.awaited.begin(call)
            self.group.prefetch(full.dtypes)
            self.root_state.prefetcher.before_gradients(self.group, self.options.backward_prefetch)
            self.group.gather(full.dtypes)

    def _on_gradient(self, full: UnshardedParams) -> None:
        """Reduce when the last leaf of ``full`` that this backward reaches has its gradient."""
        self.root_state.enter_backward()
        backward = backward_id()
        if full.awaited.note(backward) and self.group:
            done = full.awaited.inputs_done or self._is_done(full, backward)
            if done:
                self._free(self.group, full)  # before memory for the reduction is taken
            self.root_state.collect(self.group, full, self.options.sync)
            if done:
                self.root_state.prefetcher.after_gradients()

    def _is_done(self, full: UnshardedParams, backward: int) -> bool:
        """Tell whether nothing will read the full parameters again, now that ``backward`` gave all gradients.

        A parameter without one may be read still: a frozen one, or one that a reentrant checkpoint hides from
        this backward until it runs a nested one. After a nested backward the next may come, unless all of the
        unit was recomputed for it: then it will be again, and gathers.
        """
        everywhere = all(leaf.grad is not None for leaf in full.leaves)
        return everywhere and (backward == self.root_state.backward or self._recomputed)

    def _on_inputs_done(self, group: ParamGroup, full: UnshardedParams, call: object) -> None:
        full.awaited.end(call)
        if full.awaited.inputs_done and full.awaited.left(backward_id()) == 0:
            self._free(group, full)

    def _free(self, group: ParamGroup, full: UnshardedParams) -> None:
        """Give up ``full``, if ``group`` has not done so for other dtypes already."""
        if group.full is full:
            self._give_up_after_backward(group)

    def _give_up_after_backward(self, group: ParamGroup) -> None:
        if self.options.frees_after_backward:
            group.free()
        else:
            group.keep()
            group.last()

    def _forget_awaited(self) -> None:
        for full in self.group.variants if self.group else ():
            full.awaited.forget()


def _without_leaves(tree: Any) -> Any:
    """Return ``tree`` with views in place of leaves: these come at every step, and would gather hooks."""
    return map_tensors(lambda t: t.view_as(t) if t.requires_grad and t.is_leaf else t, tree)
