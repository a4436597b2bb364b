"""The interface of the engines that the suites hold to the same behaviour. Inside a rank; imports torch.

A suite describes a sharded model in a `ShardSpec` and reaches the engine through the fixture `engine`. For
what an engine does not offer its adapter raises `NotOffered`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.assertions.parity import MakeOptimizer, Trainee
from lockstep.conformance.capabilities import Capability, NotOffered
from lockstep.conformance.spec import ProcessGroups, ShardSpec
from lockstep.engine import GroupInfo
from lockstep.recorders import Collective


@dataclass(frozen=True)
class Traffic:
    """The collectives of an engine in a log, in order.

    Attributes:
        gathers: one entry for each all-gather of parameters, with the shard that this rank sent.
        reductions: one entry for each operation that reduces gradients, with what this rank sent.
        others: what belongs to neither.
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
    share_comm_ctx: Callable[[list[Any]], None]


@dataclass(frozen=True)
class Wrapper:
    """The front that wraps modules: torch's public names, with torch's signatures."""

    FullyShardedDataParallel: Any
    ShardingStrategy: type[Enum]
    BackwardPrefetch: type[Enum]
    CPUOffload: type[Any]
    MixedPrecision: type[Any]
    CustomPolicy: type[Any]
    ModuleWrapPolicy: type[Any]
    always_wrap_policy: Callable[..., bool]
    lambda_auto_wrap_policy: Callable[..., bool]
    size_based_auto_wrap_policy: Callable[..., bool]
    transformer_auto_wrap_policy: Callable[..., bool]
    enable_wrap: Callable[..., Any]
    wrap: Callable[..., nn.Module]


@dataclass(frozen=True)
class StateDicts:
    """The front that saves state by type: torch's public names, with torch's signatures."""

    FullyShardedDataParallel: Any
    StateDictType: type[Enum]
    FullStateDictConfig: type[Any]
    LocalStateDictConfig: type[Any]
    ShardedStateDictConfig: type[Any]
    FullOptimStateDictConfig: type[Any]
    LocalOptimStateDictConfig: type[Any]
    ShardedOptimStateDictConfig: type[Any]


class Snapshot(GroupInfo):
    """Group info of which some fields may be missing: to read one of those raises `NotOffered`."""

    def __init__(self, engine: str, missing: Mapping[str, Capability], **fields: Any) -> None:
        # Frozen, as its base is. A missing field is not set, so that reading it calls `__getattr__`.
        vars(self).update(fields, _engine=engine, _missing=missing)

    def __getattr__(self, name: str) -> Any:
        missing: Mapping[str, Capability] = vars(self).get("_missing", {})
        if name in missing:
            raise NotOffered(vars(self)["_engine"], missing[name])
        raise AttributeError(name)

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(fields)})"


class Engine(Protocol):
    """An engine that shards or replicates a model. Every method is called on all ranks in step."""

    @property
    def name(self) -> str:
        """The name in `find` and the option `--engine`."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Its capabilities; a claim that requires more is skipped."""

    @property
    def composable(self) -> Composable:
        """Return the front that shards modules in place."""

    @property
    def wrapper(self) -> Wrapper:
        """Return the front that wraps modules."""

    @property
    def state_dicts(self) -> StateDicts:
        """Return the front that saves the state of models and optimizers by type."""

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        """Return the sharded model; `model` is used up by it.

        Raises:
            NotOffered: `spec` asks for what the engine does not have.
        """

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the model that was sharded, without what is around it, if there is anything."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backwards reduce no gradients: they wait for the next one outside."""

    def backward(self, model: nn.Module, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of a (scaled) loss of `model`: `loss.backward()`, or the engine's own method.

        `retain_graph`: another backward of the same loss follows.
        """

    def optimizer(self, model: nn.Module, make: MakeOptimizer) -> Optimizer:
        """Return what steps the parameters of `model`, a sharded model or a module of one.

        That is `make(model.parameters())`, or an optimizer of the engine's own, which makes torch's from its
        shards: an object with `step()`, `zero_grad(set_to_none=True)`, and the `param_groups` that a gradient
        scaler reads.

        Args:
            make: makes one of torch's optimizers from parameters, e.g. `partial(torch.optim.SGD, lr=0.1)`.
        """

    def clip_grad_norm_(self, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the root `model`; return the norm over all of them, shape ().

        Args:
            max_norm: what the norm is at most afterwards, as in `torch.nn.utils.clip_grad_norm_`.
            norm_type: the p of the p-norm over all elements; inf: the largest magnitude.
        """

    def full_state(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the state dict of `model` with whole tensors, by the names in the bare model."""

    def groups(self, model: nn.Module) -> Sequence[GroupInfo]:
        """Return info on each group of a sharded model, outer before inner; see also `Snapshot`."""

    def pre_backward_hooks(self, output: Tensor) -> int:
        """Return how many hooks on an output of a sharded module or unit announce its backward."""

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return copies of all parameters in full, original dtype, by their names in the bare model."""

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        """Return copies of all gradients in full, by parameter name; None where no rank has one.

        They are the mean over the ranks that share `model`, in the dtype that the engine leaves them in.
        """

    def summon(
        self, model: nn.Module, writeback: bool = False, with_grads: bool = False
    ) -> AbstractContextManager[None]:
        """Return a context in which modules see unsharded parameters; `writeback` keeps changes.

        `with_grads`: and their gradients.
        """

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        """Return what of `log` is a gather of parameters or a reduction of gradients.

        What an engine sends to compare what ranks wrap is left out.
        """

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
        """Return a scaler for the gradients of `model`, used as torch's own: all ranks step, or none.

        `process_group`: the ranks that agree, as in the model's `ShardSpec`; None is the default group.
        """


def trainee(engine: Engine, model: nn.Module, **more: Any) -> Trainee:
    """Return a sharded model as `assert_parity` trains it: all of a step goes through the engine."""
    settings: dict[str, Any] = {
        "full_parameters": engine.full_parameters,
        "full_gradients": engine.full_gradients,
        "backward": engine.backward,
        "optimizer": engine.optimizer,
    }
    return Trainee(model, **settings | more)
