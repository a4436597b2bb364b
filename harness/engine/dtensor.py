"""Full tensors to `DTensor`s over the ranks of a group, and back. Runs on ranks."""

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.engine import collectives
from harness.engine.policy import ShardingStrategy
from harness.engine.shard import LocalShard


def cut(full: Iterable[Tensor], shard: LocalShard) -> list[DTensor]:
    """Return this rank's part of tensors that all ranks of the group hold in full, in memory of its own.

    Cut along dim 0 as torch.chunk does: uneven, perhaps empty at the end. What is on every rank anyway, 0-dim
    tensors and those of NO_SHARD, is replicated. Communicates nothing.
    """
    group = shard.settings.axes.process_group
    mesh = DeviceMesh.from_group(group, shard.device.type)
    no_shard = shard.settings.strategy is ShardingStrategy.NO_SHARD
    return [_cut_one(tensor, mesh, replicated=no_shard or tensor.dim() == 0) for tensor in full]


def whole(value: Tensor, name: str) -> Tensor:
    """Return a `DTensor` in full, and any other tensor as it is. A collective of the tensor's own mesh.

    Raises ValueError on a rank that is not in that mesh.
    """
    if not isinstance(value, DTensor):
        return value
    if value.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{name!r} is a DTensor over {value.device_mesh}, and this rank is not among its ranks; save it "
            "with torch.distributed.checkpoint, and load it into the state_dict of the model here."
        )
    return collectives.full_tensor(value)


def _cut_one(full: Tensor, mesh: DeviceMesh, replicated: bool) -> DTensor:
    chunks = (full,) if replicated else full.chunk(mesh.size())
    index = 0 if replicated else mesh.get_local_rank()
    local = chunks[index] if index < len(chunks) else full[:0]
    placement = Replicate() if replicated else Shard(0)
    return DTensor.from_local(
        local.clone(), mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
    )
