"""State of a rank that is restored after the test that changed it."""

import os

import pytest
from notes import note

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


def test_changes(world):
    note(world, "pids")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True
    os.environ["LEFT"] = "1"
    os.environ.pop("HOME")
    os.chdir("/")
    dist.new_group([0, 1])


def test_sees_nothing_of_it(world):
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert "LEFT" not in os.environ
    assert "HOME" in os.environ
    assert os.getcwd() != "/"
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_was_not_replaced(world):
    note(world, "pids")


def test_makes_a_mesh_without_a_word(world):
    note(world, "pids")
    world.mesh(2, 1, names=("a", "b"))
