"""One face for the engines that the suites hold to the same behaviour. Inside a rank; imports torch.

A suite says what it wants in a `ShardSpec` and reaches the engine through the `engine` fixture. What an
engine does not offer, its adapter refuses with `NotOffered` when it is asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.conformance.capabilities import Capability
from harness.conformance.spec import ProcessGroups, ShardSpec
from harness.recorders import Collective

__all__ = ["Composable", "Engine", "Group", "Traffic"]


class Group(Protocol):
    """What an engine shows of one group of parameters, as it is at the moment of asking.

    ``parameters`` are names as in the bare model. ``state.name`` is SHARDED, PREFETCHED (full parameters
    are on their way), UNSHARDED, RETAINED or SHARDED_POST_FORWARD (they wait for backward, whole or
    cut over a few ranks) or SUMMONED. ``gradient_dtype`` is None while
    no gradient is held. ``post_backward_hooks``: for each full parameter that modules compute with, how many
    hooks await its gradient; empty before the first gather. ``local_numel`` and ``full_numel`` count elements
    of this rank's shard and of all shards, ``padding`` included. ``local_bytes`` is what the shard occupies,
    ``gathered_bytes`` what full parameters occupy now, 0 when they are freed. ``low_precision_bytes`` is what
    the copy of the shard occupies that is cast to be sent in a gather: 0 once that has arrived, and always
    where nothing is cast.
    """

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def state(self) -> Enum: ...
    @property
    def original_dtype(self) -> torch.dtype: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    @property
    def flat_dtype(self) -> torch.dtype: ...
    @property
    def gradient_dtype(self) -> torch.dtype | None: ...
    @property
    def post_backward_hooks(self) -> tuple[int, ...]: ...
    @property
    def local_numel(self) -> int: ...
    @property
    def full_numel(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def local_bytes(self) -> int: ...
    @property
    def gathered_bytes(self) -> int: ...
    @property
    def low_precision_bytes(self) -> int: ...
    @property
    def training(self) -> bool: ...


@dataclass(frozen=True)
class Traffic:
    """What a log of collectives says of an engine, in order.

    ``gathers``: one entry for each gather of parameters, with the shard that this rank handed in.
    ``reductions``: one entry for each operation that brings gradients together, with what was handed in.
    ``others``: what belongs to neither.
    """

    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    others: tuple[Collective, ...]


@dataclass(frozen=True)
class Composable:
    """The front that shards modules in place: torch's public names, with torch's signatures."""

    fully_shard: Callable[..., Any]
    replicate: Callable[..., Any]
    MixedPrecisionPolicy: type[Any]
    OffloadPolicy: type[Any]
    CPUOffloadPolicy: type[Any]
    FSDPModule: type[Any]
    register_fsdp_forward_method: Callable[[nn.Module, str], None]


class Engine(Protocol):
    """What shards a model. Every method is called on all ranks in step."""

    @property
    def name(self) -> str:
        """What `find` and the option ``--engine`` call it."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it offers; a claim that asks for more is skipped."""
        ...

    @property
    def composable(self) -> Composable:
        """Return the front that shards modules in place."""
        ...

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        """Return the sharded model; ``model`` is used up by it."""
        ...

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the model that was sharded, without what is around it, if there is anything."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose backwards keep gradients to themselves, for the next one outside."""
        ...

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the root ``model``; return the norm over all of them, shape ()."""
        ...

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the state dict of ``model`` with whole tensors, by the names in the bare model."""
        ...

    def groups(self, model: nn.Module) -> Sequence[Group]:
        """Return the groups of a sharded model, outer before inner."""
        ...

    def pre_backward_hooks(self, output: Tensor) -> int:
        """Return how many hooks on an output of a sharded module or unit announce its backward."""
        ...

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return copies of all parameters in full, original dtype, by their names in the bare model."""
        ...

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        """Return copies of all gradients in full, by parameter name; None where no rank has one."""
        ...

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the model shows full original parameters; changes are kept if told."""
        ...

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        """Return what of ``log`` is a gather of parameters or a reduction of gradients.

        What an engine sends to compare what ranks wrap is left out.
        """
        ...

    def grad_scaler(
        self,
        model: nn.Module,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroups | None = None,
    ) -> torch.amp.GradScaler:
        """Return a scaler for the gradients of ``model``, used as torch's own: all ranks step, or none.

        ``process_group``: the ranks that agree, as in the model's `ShardSpec`; None is the default group.
        """
        ...
