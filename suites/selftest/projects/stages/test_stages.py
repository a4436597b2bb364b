"""Tests with stages: what is saved on a world of one size is loaded on one of another."""

import pytest
import torch
import torch.distributed as dist

import lockstep

pytestmark = pytest.mark.ranks(2, timeout=20)


def ranks_in(path):
    return sorted(int(file.name) for file in path.iterdir() if file.name.isdigit())


@lockstep.stage(ranks=4)
def saved(world):
    assert world.size == dist.get_world_size() == 4
    torch.save(world.gather(world.rank), world.shared_tmp_path / str(world.rank))


def test_load(world, saved):
    assert world.size == dist.get_world_size() == 2
    world.assert_same(str(saved))
    assert ranks_in(saved) == [0, 1, 2, 3]
    assert torch.load(saved / str(world.rank)) == [0, 1, 2, 3]
    assert saved != world.shared_tmp_path
    assert not ranks_in(world.shared_tmp_path)


def test_is_of_one_test(world, saved):
    assert ranks_in(saved) == [0, 1, 2, 3]


@pytest.mark.ranks(4)
def test_same_size(world, saved):
    assert ranks_in(saved) == [0, 1, 2, 3]


@pytest.mark.ranks(1, 2)
def test_sizes(world, saved):
    assert ranks_in(saved) == [0, 1, 2, 3]


@pytest.mark.ranks(2, group=False)
def test_without_group(first_of_one):
    assert not dist.is_initialized()
    assert ranks_in(first_of_one) == [0]


@pytest.mark.usefixtures("saved")
def test_used(world):
    assert world.size == 2


@lockstep.stage(ranks=1)
def first_of_one(world):
    assert world.size == 1
    (world.shared_tmp_path / "0").touch()


@lockstep.stage(ranks=3)
def third(world, saved):
    (world.shared_tmp_path / f"{world.rank}").touch()
    assert ranks_in(saved) == [0, 1, 2, 3]


def test_chain(third, first_of_one, saved):
    assert [ranks_in(path) for path in (third, first_of_one, saved)] == [[0, 1, 2], [0], [0, 1, 2, 3]]


@pytest.fixture(params=["a", "b"])
def letter(request):
    return request.param


@lockstep.stage(ranks=3)
def written(world, number, letter, tmp_path):
    assert tmp_path.is_dir()
    if world.rank == 2:
        (world.shared_tmp_path / "text").write_text(f"{letter}{number}")


@pytest.mark.parametrize("number", [1, 2])
def test_parameters(written, number, letter):
    assert (written / "text").read_text() == f"{letter}{number}"


class TestMethods:
    word = "of the class"

    @lockstep.stage(ranks=1)
    def method(self, world):
        (world.shared_tmp_path / "text").write_text(self.word)

    def test_method(self, method):
        assert (method / "text").read_text() == self.word


@lockstep.stage(ranks=3, scope="module")
def counted(world, kind):
    (world.shared_tmp_path / f"{kind}{world.rank}").touch()


@pytest.fixture(scope="module", params=["x", "y"])
def kind(request):
    return request.param


PATHS = {}


def test_module_first(counted, kind):
    PATHS[kind] = counted
    assert sorted(path.name for path in counted.iterdir()) == [f"{kind}0", f"{kind}1", f"{kind}2"]


def test_module_second(counted, kind):
    assert PATHS[kind] == counted


def test_module_has_run_for_each():
    assert len(set(PATHS.values())) == 2


@pytest.mark.skip(reason="no need")
def test_skipped(fails):
    pass


@pytest.mark.xfail(strict=True)
def test_xfail(saved):
    raise AssertionError


@pytest.mark.xfail(strict=True)
def test_xfail_in_stage(fails):
    pass


@lockstep.stage(ranks=4)
def skips(world):
    pytest.skip("nothing to save")


def test_skip_in_stage(skips):
    raise AssertionError


@lockstep.stage(ranks=4)
def fails(world):
    print(f"printed on {world.rank}")
    assert world.rank != 3, "could not be saved"
    world.barrier()


def test_failing_stage(world, fails):
    raise AssertionError("does not run")


def test_after_failure(saved):
    assert ranks_in(saved) == [0, 1, 2, 3]


@lockstep.stage(ranks=3)
def dies(world):
    import os
    import signal

    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


def test_dying_rank(dies):
    raise AssertionError("does not run")


@lockstep.stage(ranks=3)
def hangs(world):
    if world.rank != 1:
        world.barrier()


def test_hang(hangs):
    raise AssertionError("does not run")


@lockstep.stage(ranks=3, scope="module")
def fails_once(world):
    with (world.shared_tmp_path.parent / f"runs-{world.rank}").open("a") as file:
        file.write("x")
    raise ValueError("of the module")


def test_module_failure(fails_once):
    raise AssertionError("does not run")


def test_module_failure_again(fails_once):
    raise AssertionError("does not run")


def test_module_failed_once(world):
    assert (world.shared_tmp_path.parent / f"runs-{world.rank}").read_text() == "x"


def test_by_name(request):
    request.getfixturevalue("saved")


def test_warm(world):
    assert world.gather(world.rank) == [0, 1]
