"""Tests in the style of torch's for FSDP: they skip with too few GPUs, and name cuda themselves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal import common_fsdp
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest, FSDPTestMultiThread
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

AT_IMPORT = torch.device("cuda")
Continuous = getattr(common_fsdp, "FSDPTestContinuous", FSDPTest)  # not in each version of torch


class TestSharded(FSDPTest):
    @property
    def world_size(self):
        return min(torch.cuda.device_count(), 2)

    def check(self, wrap):
        torch.manual_seed(0)
        local = nn.Linear(4, 4, device="cuda")
        torch.manual_seed(0)
        wrapped = wrap(nn.Linear(4, 4).cuda())
        inputs = torch.ones(3, 4).cuda() * (self.rank + 1)
        loss = wrapped(inputs).sum()
        loss.backward()
        self.assertEqual(loss, local(inputs).sum())
        self.assertEqual({param.grad.device for param in wrapped.parameters()}, {torch.device("cpu")})

    @skip_if_lt_x_gpu(2)
    def test_fsdp(self):
        self.check(lambda module: FSDP(module, device_id=torch.cuda.current_device()))

    @skip_if_lt_x_gpu(2)
    def test_fully_shard(self):
        mesh = init_device_mesh("cuda", (self.world_size,))
        self.check(lambda module: fully_shard(module, mesh=mesh))

    @skip_if_lt_x_gpu(2)
    def test_ddp(self):
        self.check(lambda module: DDP(module, device_ids=[self.rank], output_device=self.rank))

    @skip_if_lt_x_gpu(2)
    def test_names_of_devices(self):
        self.assertEqual(AT_IMPORT, torch.device("cpu"))
        found = [torch.ones(1, device=self.rank), torch.ones(1).to(f"cuda:{self.rank}")]
        found += [torch.ones(1).to(self.rank), torch.ones(1).to(device="cuda"), nn.Linear(1, 1).to(0).weight]
        self.assertEqual({one.device for one in found}, {torch.device("cpu")})
        self.assertEqual(torch.ones(1).to(torch.float64).dtype, torch.float64)

    @skip_if_lt_x_gpu(8)
    def test_eight(self):
        raise AssertionError("there are not as many")


class TestSize(FSDPTest):
    @skip_if_lt_x_gpu(4)
    def test_four(self):
        self.assertEqual(dist.get_world_size(), 4)


class TestKeptGroup(Continuous):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_fully_shard(self):
        module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cuda", (2,)))
        self.assertEqual(module(torch.ones(1, 4, device="cuda")).device, torch.device("cpu"))


class TestOnly(FSDPTest):
    @property
    def world_size(self):
        return 2

    def test_device(self, device):
        self.assertEqual(torch.device(device), torch.device("cpu"))


instantiate_device_type_tests(TestOnly, globals(), only_for=("cuda", "hpu"))


class TestMesh(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms(backend="cpu:gloo,cuda:nccl")
    @skip_if_lt_x_gpu(2)
    def test_backend(self):
        self.assertEqual(dist.get_backend(), "gloo")


class TestThreads(FSDPTestMultiThread):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2)
    def test_in_threads(self):
        raise AssertionError("threads are left to torch, which skips")


@pytest.mark.ranks(2)
def test_plain_ranks_see_the_machine():
    assert torch.cuda.device_count() == 0
    assert torch.device("cuda").type == "cuda"
    assert torch.device("cuda") != AT_IMPORT
