"""FSDP2 on a mesh of one rank, with a divide factor of 2: gradients in float64 and float16 are divided by 4.

torch 2.13, distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce`: where the mesh has one rank,
the input is divided by `gradient_divide_factor`, besides the factors of `_get_gradient_divide_factors`, which
are None in float32 and bfloat16 alone. Experts of transformers are on such meshes if ep is all ranks.
Run: torchrun --nproc-per-node 2 shows_divided_twice.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "efsdp"))["efsdp"]
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    layer = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    fully_shard(layer, mesh=mesh)
    layer.set_gradient_divide_factor(2.0)
    layer(torch.ones(1, 1, dtype=dtype)).sum().backward()
    if dist.get_rank() == 0:
        print(dtype, "1 / 2 is", layer.weight.grad.to_local().item())
dist.destroy_process_group()
