"""In which form state is saved and loaded: frozen values, no behaviour. Imports nothing of the engine."""

from dataclasses import dataclass
from enum import Enum, auto


class StateDictType(Enum):
    """Say in which form `state_dict` and `optim_state_dict` return what is sharded."""

    FULL_STATE_DICT = auto()
    """Full tensors under original names, as an unsharded model has them; loads onto anything.

    Saving gathers group by group. Unless a config says otherwise every rank ends up with the whole model.
    Loading a model communicates nothing, and needs memory for one full group and those around it.
    """
    LOCAL_STATE_DICT = auto()
    """This rank's flat shard of each group; loads on the same rank, world size and wrapping only.

    Costs no communication, and for the model no memory: tensors are the live ones, as with an unsharded
    model. Save each rank's to a file of its own; torch.distributed.checkpoint would take them for copies of
    one another.
    """
    SHARDED_STATE_DICT = auto()
    """`DTensor`s under original names, cut along dim 0 as torch.chunk cuts; through
    torch.distributed.checkpoint they load at any world size and wrapping.

    Saving gathers group by group and keeps this rank's part; loading gathers parameter by parameter, and
    needs memory for two full groups and those around. Parameters that are on every rank anyway (NO_SHARD,
    0-dim) are replicated.
    """


@dataclass(frozen=True)
class StateDictConfig:
    """``offload_to_cpu``: tensors are moved to CPU, group by group."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict, but for what lies outside any unit.

    Loading wants the dict on every rank.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Nothing of its own."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Nothing of its own."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """``offload_to_cpu``: tensors are moved to CPU, one kind of state of one group at a time."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict; loading reads rank 0's alone."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Nothing of its own."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Nothing of its own."""


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """The kind of state dict, and its configs for the model and the optimizer.

    Raises TypeError for a config of another kind.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        _check_kind(self.state_dict_type)
        for field, wanted in zip(
            ("state_dict_config", "optim_state_dict_config"), _CONFIGS[self.state_dict_type], strict=True
        ):
            given = getattr(self, field)
            if type(given) is not wanted:
                raise TypeError(
                    f"{field}: {self.state_dict_type.name} goes with {wanted.__name__} of "
                    f"harness.engine, got {type(given).__name__} of {type(given).__module__}."
                )

    @property
    def rank0_only(self) -> bool:
        return getattr(self.state_dict_config, "rank0_only", False)

    @property
    def optim_rank0_only(self) -> bool:
        return getattr(self.optim_state_dict_config, "rank0_only", False)


def settings_for(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Return settings with the kind's own configs for None."""
    _check_kind(kind)
    default, optim_default = _CONFIGS[kind]
    return StateDictSettings(kind, config or default(), optim_config or optim_default())


def _check_kind(kind: object) -> None:
    if not isinstance(kind, StateDictType):
        raise TypeError(
            f"state_dict_type: expected a StateDictType of harness.engine, got {kind!r} of "
            f"{type(kind).__module__}."
        )
