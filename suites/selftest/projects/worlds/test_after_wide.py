"""State after a wider fixture of another file."""

import os

import pytest

if "RANK" in os.environ:
    import torch
pytestmark = pytest.mark.ranks(2)


def test_after(world):
    assert torch.get_default_dtype() == torch.float32
