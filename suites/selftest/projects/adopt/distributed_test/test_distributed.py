"""Classes for the launcher of this project, one for each way in which they differ."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from launcher import DistributedTest


def total(value=1):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture(params=["red", "green"])
def color(request):
    return request.param


class TestPassing(DistributedTest):
    world_size = 2

    @pytest.fixture
    def number(self):
        return 7

    def test_sum(self):
        assert (total(), dist.get_world_size(), os.environ["WORLD_SIZE"]) == (2, 2, "2")

    def test_fixtures(self, color, number, word="default"):  # noqa: PT028
        assert (color in ("red", "green"), number, word) == (True, 7, "default")

    @pytest.mark.parametrize("value", [1, 2])
    def test_parameters(self, value):
        assert total(value) == 2 * value

    @pytest.mark.world_size(1)
    def test_mark(self):
        assert dist.get_world_size() == 1

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_parameter_of_size(self, world_size):
        assert dist.get_world_size() == world_size

    def test_one_directory(self, class_tmpdir, tmpdir, tmp_path):
        for folder in (class_tmpdir, tmpdir, tmp_path):
            if dist.get_rank() == 0:
                with open(f"{folder}/by-rank-0.txt", "w") as file:
                    file.write("here")
            dist.barrier()
            with open(f"{folder}/by-rank-0.txt") as file:
                assert file.read() == "here"

    def test_directory_of_the_class(self, class_tmpdir):
        assert os.path.exists(f"{class_tmpdir}/by-rank-0.txt")


class TestSizes(DistributedTest):
    world_size = (1, 2)

    def test_sum(self):
        assert total() == dist.get_world_size()


class LoopOverSizes(DistributedTest):
    """Launches as DeepSpeed's did before there was a file store."""

    def __call__(self, request):
        self.method = getattr(self, request.function.__name__)
        self.kwargs = self._kwargs_of(request, self.method)
        for size in self.launched:
            self._launch_procs(size, f"file://{request.getfixturevalue('tmpdir')}/store")


class TestLoopOverSizes(LoopOverSizes):
    world_size = launched = (1, 2)

    def test_sum(self):
        assert total() == dist.get_world_size()

    def test_of_one(self):
        assert dist.get_world_size() == 1


class TestLaunchesOneOfItsSizes(LoopOverSizes):
    world_size, launched = (1, 2), (1,)

    def test_sum(self):
        assert total() == dist.get_world_size()


class TestReusing(DistributedTest):
    reuse_dist_env = True

    def test_1(self):
        assert total() == 2

    def test_2(self):
        assert total() == 2


class TestNotInitialised(DistributedTest):
    init_distributed = False

    def test_from_environment(self):
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        assert total() == 2


class TestNoEnvironment(DistributedTest):
    world_size = 1
    init_distributed = False
    set_dist_env = False

    def test_nothing_is_set(self):
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()


class TestSkipping(DistributedTest):
    @pytest.mark.skip(reason="not today")
    def test_mark(self):
        raise AssertionError

    def test_all(self):
        pytest.skip("on all ranks")

    def test_one(self):
        if dist.get_rank() == 1:
            pytest.skip("on one rank")


class TestNeedsAccelerator(DistributedTest):
    requires_cuda_env = True

    def __call__(self, request):
        pytest.skip("only with an accelerator")

    def test_nothing(self):
        raise AssertionError


class TestFailing(DistributedTest):
    def test_1_one_rank(self):
        assert dist.get_rank() == 0

    def test_2_under_collective(self):
        if dist.get_rank() == 1:
            raise ValueError("of rank 1")
        total()

    def test_3_then(self):
        assert total() == 2


class TestAfterFixture(DistributedTest):
    world_size = 1

    def test_files(self, written_by_two, class_tmpdir):
        assert [class_tmpdir.join(f"of-{rank}.txt").read() for rank in range(2)] == ["2", "2"]


class TestLauncherOfItsOwn(DistributedTest):
    def _launch_procs(self, num_procs, init_method):
        super()._launch_procs(num_procs, init_method)

    def test_sum(self):
        assert total() == 2


class TestDying(DistributedTest):
    def test_1_killed(self):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_2_then(self):
        assert total() == 2


class TestHanging(DistributedTest):
    def test_1_one_waits(self):
        if dist.get_rank() == 0:
            total()

    def test_2_then(self):
        assert total() == 2
