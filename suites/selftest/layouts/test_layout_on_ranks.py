"""Places, parts and groups of a layout on the ranks that have it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lockstep.layouts import Layout


@pytest.mark.layouts(tp=(1, 2), ep=(1, 2), at_most=4)
def test_a_layout_says_sizes_places_and_parts(layout: Layout) -> None:
    assert (layout["dp"], layout.at("dp")) == (1, 0)
    assert layout.part(("tp", "ep")) == (layout.rank, dist.get_world_size())
    whole = torch.arange(5)
    assert (
        torch.cat([whole[:3], whole[3:]][layout.at("tp") :][:1]).equal(layout.slice(whole, "tp"))
        or layout["tp"] == 1
    )
    with pytest.raises(ValueError, match=r"of size 1 in .*, where there is no group"):
        layout.group("dp")
    with pytest.raises(KeyError, match="this layout has the axes tp, ep, pp, dp, fsdp, cp"):
        layout["sp"]
    assert dist.get_world_size(layout.group("tp", "ep")) == layout["tp"] * layout["ep"]


def test_a_layout_refuses_what_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="dp2-tp2 has 4 ranks, this world 1"):
        Layout({"dp": 2, "tp": 2})
    layout = Layout({"dp": 1})
    with pytest.raises(KeyError, match="'sp': this layout has the axes dp, "):
        layout.group("sp")
    with pytest.raises(RuntimeError, match="one rank: the layout has no mesh, or has ended"):
        layout.mesh  # noqa: B018


@pytest.mark.layouts(dp=(2,), cp=(2,), tp=(2,))
def test_a_group_of_two_axes_is_made_where_it_is_used(layout: Layout) -> None:
    if layout.at("dp") == 0:
        value = torch.tensor([layout.rank])
        dist.all_reduce(value, group=layout.group("cp", "tp"))
        assert value.item() == 6


@pytest.mark.parametrize("number", range(3))
@pytest.mark.layouts(cp=(2,), tp=(2,))
def test_a_layout_that_is_not_used_ends_on_all_ranks(layout: Layout, number: int) -> None:
    """Ranks that ended its groups at once broke those that were still connecting."""
    assert layout.mesh.size() == 4
