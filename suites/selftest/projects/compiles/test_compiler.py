"""Code of inductor where there is no C++ compiler."""

import os

import pytest
import torch
from torch._inductor import config

pytestmark = pytest.mark.ranks(2)
os.environ["CXX"] = "/nowhere/c++"
config.cpp.cxx = (None, os.environ["CXX"])  # as where the variable was set before torch was imported


def compiled():
    return torch.compile(lambda x: (x.sin() * 2).sum())(torch.ones(4))


def test_default_backend(world):
    compiled()


def test_after(world):
    assert world.gather(world.rank) == [0, 1]


@pytest.fixture
def value():
    return compiled()


def test_in_a_fixture(value):
    pass


def test_cases(run_subtests):
    def claim(backend):
        torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.ones(4))

    run_subtests({"backend": ["eager", "inductor"]}, claim)


def test_one_rank(world):
    if world.rank == 1:
        compiled()


def test_wrong(world):
    with pytest.raises(Exception, match="InvalidCxxCompiler"):
        compiled()
    assert world.size == 3


def test_not_needed(compiles):
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(4))
