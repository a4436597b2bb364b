"""Sharded data parallelism in a group that does not begin with rank 0: the owner's gradients are dropped.

fairscale 0.4.13, nn/data_parallel/sharded_ddp.py, `_get_reduce_fn`: `if dst_rank != self._global_rank`
compares a rank of the group with one of the world, and drops the gradient on the rank that takes the step.
Without buckets, that is with `reduce_buffer_size=0`, or in a group of one rank.
Run: torchrun --nproc-per-node 4 shows_owner.py
"""

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
group = groups[rank // 2]
model = torch.nn.Linear(1, 1, bias=False)  # its only parameter is the first rank's of each group
torch.nn.init.ones_(model.weight)
optimizer = OSS(model.parameters(), torch.optim.SGD, group, lr=0.5)
parallel = ShardedDataParallel(model, optimizer, group, reduce_buffer_size=0)
parallel(torch.ones(1, 1)).sum().backward()
gradient = model.weight.grad
optimizer.step()
found = [None] * 4
dist.all_gather_object(found, (gradient, model.weight.item()))
if rank == 0:
    for each, (gradient, weight) in enumerate(found):
        print(f"rank {each}: gradient {gradient}, weight after a step {weight}, right is 0.5")
dist.destroy_process_group()
