"""
>>> import os
>>> "RANK" in os.environ
False
"""

import logging
import os
import sys
import unittest
import warnings

import pytest

pytestmark = pytest.mark.ranks(2)


def test_monkeypatch(world, monkeypatch):
    monkeypatch.setenv("HOME", str(world.rank))
    assert world.gather(os.environ["HOME"]) == ["0", "1"]


def test_monkeypatch_is_undone(world):
    assert world.gather(os.environ["HOME"]) == [os.environ["HOME"]] * 2 != ["0", "1"]


def test_capsys(world, capsys):
    print("out", world.rank)
    print("err", world.rank, file=sys.stderr)
    assert capsys.readouterr() == (f"out {world.rank}\n", f"err {world.rank}\n")


def test_capfd(world, capfd):
    os.write(1, b"native")
    assert capfd.readouterr().out == "native"


def test_caplog(world, caplog):
    logging.warning("from %d", world.rank)
    assert caplog.messages == [f"from {world.rank}"]


def test_tmp_path(world, tmp_path):
    assert tmp_path.is_dir()
    assert len(set(world.gather(str(tmp_path)))) == 2


def test_shared_tmp_path(world):
    world.assert_same(str(world.shared_tmp_path))
    (world.shared_tmp_path / str(world.rank)).touch()
    world.barrier()
    assert sorted(path.name for path in world.shared_tmp_path.iterdir()) == ["0", "1"]


def test_shared_tmp_path_is_of_one_test(world):
    assert not list(world.shared_tmp_path.iterdir())


def test_properties(world, record_property):
    record_property("same", 1)
    record_property("rank", f"is {world.rank}")
    import torch

    record_property("loss", torch.tensor(0.5))


@pytest.mark.parametrize("n", [3, 5], ids=["three", "five"])
def test_parametrized(world, n, request):
    assert request.node.callspec.id == {3: "three", 5: "five"}[n]


class TestClass:
    def setup_method(self):
        self.value = 3

    def test_method(self, world):
        assert self.value == 3
        assert world.size == 2


class TestOld(unittest.TestCase):
    def setUp(self):
        self.rank = int(os.environ["RANK"])

    def test_unittest(self):
        assert self.rank in (0, 1)


def test_warnings(world):
    warnings.warn("seen by all", DeprecationWarning)


class OwnWarning(UserWarning):
    pass


def test_own_warning(world):
    if world.rank == 1:
        warnings.warn("seen by one", OwnWarning)


@pytest.mark.skip(reason="marked")
def test_skip(world):
    pass


@pytest.mark.skipif("sys.platform != 'amiga'", reason="wrong machine")
def test_skipif(world):
    pass


def test_skip_by_hook(world):
    pass


def test_importorskip(world):
    pytest.importorskip("no_such_module")
