"""The trainings of engine.py: equal models under each engine, with the same options where they have them.

bf16: sharding engines hold fp32 shards, and gather, compute and reduce in bf16. Unsharded and DDP hold fp32
parameters and compute under autocast; DDP sends gradients through torch's bf16_compress_hook. So each has
fp32 master parameters, bf16 products and bf16 on the wire; a model converted to bf16 would be spared the
first. Autocast keeps layer norms in fp32, the others do not.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep import engine as ours

LEARNING_RATE = 0.5
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Case:
    """One comparison of engines: world size, model and dtype."""

    world: int
    model: str
    dtype: str


class Block(nn.Sequential):
    """A unit of more than one module."""


@dataclass(frozen=True)
class Workload:
    """A model: so many times `make`, each of the class `unit`; `shape` is that of one input."""

    make: Callable[[], nn.Module]
    times: int
    unit: type[nn.Module]
    shape: tuple[int, ...]

    def build(self) -> nn.Sequential:
        """Return the model, the same on every call, with weights under which all layers learn."""
        torch.manual_seed(0)
        model = nn.Sequential(*(self.make() for _ in range(self.times)))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
        return model

    def data(self, rank: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of one rank, (batch, *shape) each."""
        generator = torch.Generator().manual_seed(rank)
        inputs, targets = torch.randn(2, batch, *self.shape, generator=generator)
        return inputs, targets


WORKLOADS = {
    "relu512x6": Workload(lambda: Block(nn.Linear(512, 512), nn.ReLU()), 6, Block, (512,)),
    "linear1024x8": Workload(lambda: nn.Linear(1024, 1024), 8, nn.Linear, (1024,)),
    "transformer256x4": Workload(
        lambda: nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True),
        4,
        nn.TransformerEncoderLayer,
        (8, 256),
    ),
}


@dataclass(frozen=True)
class Setup:
    """Options of an engine: `unit` is the class of units, `low` means bf16.

    Attributes:
        mesh: The ranks, on the backend that ours are measured on. The others are on the default group.
    """

    unit: type[nn.Module]
    low: bool
    mesh: DeviceMesh


def unsharded(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the plain model: no communication."""
    return model


def ddp(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under DDP; `low`: gradients on the wire in bf16."""
    wrapped = DistributedDataParallel(model)
    if setup.low:
        wrapped.register_comm_hook(None, send_bf16)
    return wrapped


def send_bf16(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Do as bf16_compress_hook, by a name that DDP lets through on other backends than nccl."""
    return bf16_compress_hook(group, bucket)


def fsdp1(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under torch's FullyShardedDataParallel."""
    return fsdp.FullyShardedDataParallel(
        model,
        sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({setup.unit}),
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        mixed_precision=fsdp.MixedPrecision(param_dtype=torch.bfloat16) if setup.low else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under torch's fully_shard; it is set to prefetch in forward as well."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setup.low else None)
    units = list(model)
    for one in (*units, model):
        fsdp.fully_shard(one, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    for one, following in itertools.pairwise(units):
        one.set_modules_to_forward_prefetch([following])
    return model


def ours_(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under lockstep.engine."""
    return ours.FullyShardedDataParallel(
        model,
        process_group=setup.mesh.get_group(),
        sharding_strategy=ours.ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ours.ModuleWrapPolicy({setup.unit}),
        backward_prefetch=ours.BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        mixed_precision=ours.MixedPrecision(param_dtype=torch.bfloat16) if setup.low else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def ours_composable(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under lockstep.engine's fully_shard; it prefetches in forward by default."""
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setup.low else None)
    for one in (*model, model):
        ours.fully_shard(one, mesh=setup.mesh, reshard_after_forward=True, mp_policy=policy)
    return model


def ours_replicate(model: nn.Sequential, setup: Setup) -> nn.Module:
    """Return the model under lockstep.engine's replicate."""
    policy = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setup.low else None)
    for one in (*model, model):
        ours.replicate(one, mesh=setup.mesh, mp_policy=policy)
    return model


UNSHARDED, DDP, FSDP1, FSDP2 = "unsharded", "DDP", "FSDP1", "FSDP2"
OURS, OURS_COMPOSABLE, OURS_REPLICATE = "ours", "ours fully_shard", "ours replicate"
ENGINES = {
    UNSHARDED: unsharded,
    DDP: ddp,
    FSDP1: fsdp1,
    FSDP2: fsdp2,
    OURS: ours_,
    OURS_COMPOSABLE: ours_composable,
    OURS_REPLICATE: ours_replicate,
}
PEERS = {OURS: (UNSHARDED, DDP, FSDP1, FSDP2), OURS_COMPOSABLE: (DDP, FSDP2), OURS_REPLICATE: (DDP,)}
"""What each of ours is compared with."""


class Training:
    """One model under one engine, with its optimizer and its data: this rank's, or that of all ranks.

    `mesh` is what an engine of ours runs on.
    """

    def __init__(
        self, engine: str, case: Case, batch: int, mesh: DeviceMesh, of_all_ranks: bool = False
    ) -> None:
        workload, low = WORKLOADS[case.model], case.dtype == "bf16"
        ranks = range(case.world) if of_all_ranks else [dist.get_rank()]
        data = [workload.data(rank, batch) for rank in ranks]
        self._inputs, self._targets = (torch.cat(parts) for parts in zip(*data, strict=True))
        self._model = ENGINES[engine](workload.build(), Setup(workload.unit, low, mesh))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE)
        self._autocast = low and engine in (UNSHARDED, DDP)

    def forward(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self._autocast else nullcontext():
            output = self._model(self._inputs)
        return nn.functional.mse_loss(output.float(), self._targets)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> Tensor:
        """Take one training step and return the loss before it, 0-dim, detached."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss.detach()
