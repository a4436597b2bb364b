"""Results of collectives: claims of PyTorch's test/distributed/test_c10d_ops_nccl.py, here on gloo."""

import pytest
import torch
import torch.distributed as dist
from lockstep.assertions import assert_equal


@pytest.mark.ranks(2, backend="gloo")
class TestCollectives:
    @property
    def device(self):
        return torch.device("cpu")

    def test_all_reduce_by_op(self, world):
        for op, expected in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 2)):
            value = torch.tensor([world.rank + 1], device=self.device)
            dist.all_reduce(value, op=op)
            assert_equal(value, torch.tensor([expected]))

    def test_broadcast_from_each_rank(self, world):
        for source in range(world.size):
            value = torch.tensor([world.rank], device=self.device)
            dist.broadcast(value, src=source)
            assert_equal(value.item(), source)

    def test_all_gather(self, world):
        gathered = [torch.zeros(2) for _ in range(world.size)]
        dist.all_gather(gathered, torch.full((2,), float(world.rank)))
        assert_equal(torch.stack(gathered), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))

    def test_a_group_of_ranks_that_do_not_exist_is_refused(self, world):
        with pytest.raises(ValueError, match="rank"):
            dist.new_group([0, world.size])
