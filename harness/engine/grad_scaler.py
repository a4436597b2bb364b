"""Loss scaling in which all ranks step or none, and clipping by the norm over ranks. Runs on ranks."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.engine import collectives
from lockstep.engine.mesh import ProcessGroups
from lockstep.engine.torch_internals import pytree, unscale_and_check
from lockstep.engine.unit import Unit

_RANGE = torch.finfo(torch.float32)


class ShardedGradScaler(GradScaler):
    """A `torch.amp.GradScaler` for a model whose gradients are sharded over ranks.

    All ranks call all methods except `scale` in step, for the same optimizers in the same order, with or
    without gradients. If any rank has an inf or a NaN, no rank steps that optimizer, and `update` lowers the
    scale, which stays a normal, finite fp32 number.

    Gradients may have any floating-point dtype, fp16 included, may be on any device, sparse, or `DTensor`s.
    An fp16 gradient that overflows when it is unscaled counts as an inf.

    Args:
        device: The type of the device that computes. None: the accelerator if there is one, else "cpu".
        init_scale: The first scale, a positive fp32 number.
        backoff_factor, growth_factor: What `update` multiplies the scale by after an inf, and after
            `growth_interval` steps without one.
        enabled: With False `scale` returns what it gets, and `step` steps.
        process_group: The ranks that must agree, at least all that share the model: a group, or the pair
            (shard, replicate) of a hybrid model. None: the default group when the flag is reduced.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroups | None = None,
    ) -> None:
        if device is not None and not isinstance(device, str):
            raise TypeError(
                f'ShardedGradScaler: device must be a kind of device such as "cpu", got {device!r}; '
                "pass init_scale by name."
            )
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        super().__init__(
            device or (accelerator.type if accelerator else "cpu"),
            init_scale=_checked("init_scale", init_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._groups = _as_groups(process_group)

    def scale(self, outputs: Any) -> Any:
        """Return `outputs`, tensors in nested containers, times the scale, in their own dtypes.

        An iterable that is no container becomes an iterator. Raises TypeError for anything but tensors.
        """
        return pytree.tree_map(self._scaled, outputs) if self._enabled else outputs

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless a rank has found an inf, and unscale before that if `unscale_` was not called.

        Raises RuntimeError for a second step before `update`, and for a closure.
        """
        if self._enabled and any(map(callable, args)):
            raise RuntimeError(
                "ShardedGradScaler.step: a closure would compute gradients that are not unscaled; "
                "run backward before step, and pass the optimizer alone."
            )
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Back off after an inf, grow after `growth_interval` steps without one, or set `new_scale`.

        Raises AssertionError if no gradient was checked since the last update, and ValueError for a
        `new_scale` that is not a positive fp32 number.
        """
        super().update(None if new_scale is None else _checked("new_scale", float(new_scale)))
        if self._enabled and self._scale is not None:
            self._scale.clamp_(min=_RANGE.tiny)  # 1 / scale must be finite; torch's growth stops before inf

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a scaler of this class or of torch.

        Raises RuntimeError for that of a disabled scaler, and ValueError if its scale is 0 or inf.
        """
        if self._enabled and state_dict:
            _checked("the scale of the state_dict", state_dict["scale"])
        super().load_state_dict(state_dict)

    def _scaled(self, output: Any) -> Any:
        if isinstance(output, Iterable) and not isinstance(output, Tensor | str):
            return map(self.scale, output)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"ShardedGradScaler.scale: expected tensors, got {type(output).__name__}; "
                "scale the loss tensor itself, before item() or float()."
            )
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        # In fp32, as the scale itself may be larger than fp16 can hold: 2**16 is.
        precise = output.to(torch.promote_types(output.dtype, torch.float32))
        return (precise * self._scale.to(output.device, non_blocking=True)).to(output.dtype)

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Multiply gradients by `inv_scale`; return whether any rank found an inf: 0-dim, 0.0 or 1.0.

        torch calls it in `unscale_`, and in `step` for optimizers that unscale themselves. Those count the
        flag as skipped steps, so it must not be the number of ranks.
        """
        alike: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in _local_gradients(optimizer):
            alike[gradient.device, gradient.dtype].append(gradient)
        for (device, dtype), gradients in alike.items():
            flag, factor = torch.zeros((), device=device), inv_scale.to(device, non_blocking=True)
            unscale_and_check(gradients, flag, factor)
            if dtype is torch.float16:  # the check is before the product, which may overflow
                unscale_and_check(gradients, flag, torch.ones_like(factor))
            found_inf += flag.to(found_inf.device)
        groups = self._groups or ((dist.group.WORLD,) if dist.group.WORLD else ())
        if not groups:
            raise RuntimeError(
                "ShardedGradScaler: no process group to agree over; call torch.distributed.init_process_group"
                " first, pass process_group, or use torch.amp.GradScaler on a single process."
            )
        everyones = collectives.total(found_inf, groups)
        return {found_inf.device: everyones.clamp_(max=1.0)}


def _local_gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this rank's part of each gradient as a dense tensor that shares its memory."""
    for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # Values of one index may overflow when they are added, so that comes before the check.
            precise = torch.promote_types(gradient.dtype, torch.float32)
            gradient = parameter.grad = gradient.to(precise).coalesce().to(gradient.dtype)
            gradient = gradient.values()
        yield gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _checked(what: str, scale: float) -> float:
    if not _RANGE.tiny <= scale <= _RANGE.max:  # nor NaN
        raise ValueError(
            f"ShardedGradScaler: {what} must be a positive number that fp32 can hold, got {scale}."
        )
    return scale


def _as_groups(process_group: object) -> tuple[dist.ProcessGroup, ...]:
    if process_group is None:
        return ()
    groups = process_group if isinstance(process_group, tuple) else (process_group,)
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"ShardedGradScaler: rank {dist.get_rank()} is not in process_group; make the scaler only on "
                "ranks that are."
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "ShardedGradScaler: process_group must be a ProcessGroup or a pair (shard, replicate) of "
                f"them, got {type(group).__name__}."
            )
    return groups


def clip_gradients(
    units: Iterable[Unit], parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`; return the norm before.

    Replicated gradients (NO_SHARD, `parameters` outside of units) count once, like sharded ones. Norms are
    computed in fp32, or in fp64 for fp64 gradients.
    """
    groups = [unit.group for unit in units if unit.group]
    if any(group.gradients.unreduced for group in groups):
        raise RuntimeError(
            "clip_grad_norm_: gradients from no_sync are not reduced yet; run a synced backward first."
        )
    # By shard axis, as replicas hold the same; None is for what is not sharded.
    held: defaultdict[dist.ProcessGroup | None, list[Tensor]] = defaultdict(list)
    held[None] += [p.grad for p in parameters if p.grad is not None]
    for group in groups:
        axis = group.config.mesh.shard
        held[axis.group if axis else None] += group.gradients.visible()
    device = groups[0].shard.device if groups else torch.device("cpu")
    largest = norm_type == float("inf")
    sums = [
        collectives.total(_power_sum(gradients, norm_type, device), [over] if over else [], largest)
        for over, gradients in held.items()
    ]
    norm = torch.stack(sums).amax() if largest else torch.stack(sums).sum() ** (1 / norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in chain.from_iterable(held.values()):
        gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))
    return norm


def _power_sum(gradients: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over all elements, in fp64; for p = inf the largest |g|."""
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for gradient in gradients:
        precise = torch.promote_types(gradient.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(gradient, norm_type, dtype=precise).to(device, torch.float64))
    stacked = torch.stack(norms)
    return stacked.amax() if norm_type == float("inf") else (stacked**norm_type).sum()
