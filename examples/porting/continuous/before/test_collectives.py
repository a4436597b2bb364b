"""Results of collectives: claims of PyTorch's test/distributed/test_c10d_ops_nccl.py, here on gloo."""

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest
from torch.testing._internal.common_utils import run_tests


class CollectivesTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @property
    def device(self):
        return torch.device("cpu")

    def test_all_reduce_by_op(self):
        for op, expected in ((dist.ReduceOp.SUM, 3), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 2)):
            value = torch.tensor([self.rank + 1], device=self.device)
            dist.all_reduce(value, op=op)
            self.assertEqual(value, torch.tensor([expected]))

    def test_broadcast_from_each_rank(self):
        for source in range(self.world_size):
            value = torch.tensor([self.rank], device=self.device)
            dist.broadcast(value, src=source)
            self.assertEqual(value.item(), source)

    def test_all_gather(self):
        gathered = [torch.zeros(2) for _ in range(self.world_size)]
        dist.all_gather(gathered, torch.full((2,), float(self.rank)))
        self.assertEqual(torch.stack(gathered), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))

    def test_a_group_of_ranks_that_do_not_exist_is_refused(self):
        with self.assertRaisesRegex(ValueError, "rank"):
            dist.new_group([0, self.world_size])


if __name__ == "__main__":
    run_tests()
