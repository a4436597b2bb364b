"""State that a wider fixture changes."""

import os

import pytest

if "RANK" in os.environ:
    import torch
pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module", autouse=True)
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_a(world):
    assert torch.get_default_dtype() == torch.float64


def test_b(world):
    assert torch.get_default_dtype() == torch.float64
    torch.set_default_dtype(torch.float16)


def test_c(world):
    assert torch.get_default_dtype() == torch.float64
