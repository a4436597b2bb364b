"""A test of torch's kind that reads its environment: that of a child of torch's own launcher."""

import os

import pytest
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TestEnvironment(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_has_no_variables_of_a_launcher(self):
        self.assertEqual([name for name in LAUNCHERS if name in os.environ], [])

    def test_local_rank_must_be_given(self):
        dist.init_process_group("gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2)
        with pytest.raises(RuntimeError, match="LOCAL_RANK"):
            dist.get_node_local_rank()


@pytest.mark.ranks(2)
def test_plain_ranks_have_them():
    assert [name for name in LAUNCHERS if name not in os.environ] == []
