"""The fixture `world`: equality of what ranks hold, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from lockstep import RankWorld

pytestmark = pytest.mark.ranks(2)

COMPLEX = torch.tensor([complex(1, -0.0), complex(float("nan"), 2)])


@pytest.mark.parametrize("value", [COMPLEX, COMPLEX.conj()], ids=["complex", "conjugated"])
def test_equal_complex_tensors_are_the_same(world: RankWorld, value: torch.Tensor) -> None:
    world.assert_same(value.clone())


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (torch.tensor([complex(1, 0.0)]), torch.tensor([complex(1, -0.0)])),
        (torch.tensor([complex(float("nan"), 1)]), torch.tensor([complex(float("nan"), 2)])),
    ],
    ids=["sign", "part-of-nan"],
)
def test_each_part_of_a_complex_number_counts(
    world: RankWorld, here: torch.Tensor, there: torch.Tensor
) -> None:
    with pytest.raises(AssertionError, match="rank"):
        world.assert_same(there if world.rank else here)
