"""Gradients that come to visible parameters and not through their unit. Runs on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lockstep.engine import collectives
from lockstep.engine.guard import REMEDIES
from lockstep.engine.param import LocalShard
from lockstep.engine.torch_internals import gradient_hooks, untraced


class Arrivals:
    """Catch gradients that come to the visible parameters of a shard, so that they are reduced as others are.

    Where there are several shards, each is of one rank's part, and the loss may differ between ranks: no
    reduction is defined for them, and they are refused.

    Attributes:
        waiting: What has come and is not reduced, by the index of its parameter in the shard.
    """

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self.waiting: dict[int, Tensor] = {}
        self._watched: dict[nn.Parameter, RemovableHandle] = {}

    def take(self) -> Mapping[int, Tensor]:
        """Return what has come, and forget it."""
        taken, self.waiting = self.waiting, {}
        return taken

    def watch(self, begin: WeakMethod[Callable[[], None]]) -> None:
        """Catch the gradients of parameters that are trained by now; `begin` a backward with each."""
        shard = self._shard
        originals = [param.parameter for param in shard.params]
        for index, parameter in enumerate(originals if shard.config.use_orig_params else [shard.flat]):
            if parameter.requires_grad and parameter not in self._watched:
                hook = _Hook(ref(self), index, begin)
                self._watched[parameter] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def unwatch(self) -> None:
        """Forget which parameters are watched, as some become other tensors."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def catch(self, index: int, gradient: Tensor) -> Tensor:
        """Keep the `gradient` of visible parameter number `index`, and return what is left of it: zeros."""
        shard = self._shard
        parameter = shard.params[index].parameter if shard.config.use_orig_params else shard.flat
        if not shard.whole or gradient_hooks(parameter):
            raise RuntimeError(self._refusal(index, gradient))
        whole = gradient.to_dense() if gradient.is_sparse else gradient
        local = collectives.local_gradient(whole, parameter) if isinstance(whole, DTensor) else whole
        fresh = {index: local} if shard.config.use_orig_params else dict(enumerate(shard.layout.views(local)))
        for place, value in fresh.items():
            before = self.waiting.get(place)
            self.waiting[place] = (
                value.to(shard.device) if before is None else before + value.to(shard.device)
            )
        # Autograd wants the layout that it gave.
        return torch.zeros_like(gradient if gradient.is_sparse else parameter)

    def _refusal(self, index: int, gradient: Tensor) -> str:
        shard = self._shard
        names = shard.params[index].name
        if not shard.config.use_orig_params:
            named = zip(shard.params, shard.spans, strict=True)
            names = ", ".join(param.name for param, span in named if gradient[span].any())
        why = "it is this rank's shard there, and no reduction makes a whole gradient of what ranks get"
        if shard.whole:
            why = "hooks of register_post_accumulate_grad_hook would see it before it is reduced"
        return (
            f"a gradient came to parameter {names!r} of {shard.config.name} as it is seen between steps: it "
            f"was read outside the forward of the root, by the loss perhaps, and {why}. Remedy: let the root "
            f"compute this part of the loss, and {REMEDIES}; or read it under torch.no_grad(), if this shall "
            "not train it."
        )


@dataclass(frozen=True)
class _Hook:
    """A hook on a visible parameter. No collector sees through it, so it refers weakly to what holds that."""

    arrivals: ref[Arrivals]
    index: int
    begin: WeakMethod[Callable[[], None]]
    __torch_unserializable__: ClassVar[bool] = True  # so that saving the parameter does not warn of it

    @untraced
    def __call__(self, gradient: Tensor) -> Tensor:
        arrivals, begin = self.arrivals(), self.begin()
        if arrivals is None or begin is None:
            return gradient
        begin()
        return arrivals.catch(self.index, gradient)
