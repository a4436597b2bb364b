"""A file that is slow to import."""

import os
import time

import pytest

if "RANK" in os.environ:
    import torch
pytestmark = pytest.mark.ranks(2)

if "RANK" in os.environ:
    time.sleep(2)
    torch.set_default_dtype(torch.float64)


def test_after(world):
    assert torch.get_default_dtype() == torch.float64
