"""Places, parts and groups of a layout, as a rank of a world that does not run has them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.layouts import layout as module
from lockstep.layouts.layout import Layout, as_axes, chunk

Make = Callable[..., Layout]
SIZES = {"dp": 2, "fsdp": 1, "tp": 3, "cp": 2}


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> Make:
    """Make layouts of a world of 12 ranks whose groups are their ranks."""
    mesh = SimpleNamespace(get_group=lambda axis: f"group of {axis}", get_all_groups=lambda: ["one", "world"])

    def of(sizes: dict[str, int], rank: int = 0, world: int = 12, **more: Any) -> Layout:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: world)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "barrier", lambda: calls.append(("barrier",)))
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="world"))
        monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append(("end", group)))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
        monkeypatch.setattr(module, "group_of", lambda group: group)
        monkeypatch.setattr(
            dist, "new_group", lambda ranks, **options: calls.append(("new", options)) or tuple(ranks)
        )
        monkeypatch.setattr(
            module,
            "init_device_mesh",
            lambda kind, shape, mesh_dim_names: calls.append((kind, shape, mesh_dim_names)) or mesh,
        )
        return Layout(sizes, **more)

    return of


def test_the_mesh_has_the_axes_larger_than_1(make: Make, calls: list[tuple[Any, ...]]) -> None:
    layout = make(SIZES, device_type="cuda")
    assert calls == [("cuda", (2, 3, 2), ("dp", "tp", "cp")), ("barrier",)]
    assert (layout.name, repr(layout)) == ("dp2-tp3-cp2", "<layout dp2-tp3-cp2>")
    assert layout.large == ("dp", "tp", "cp")
    assert list(layout.sizes.items()) == [*SIZES.items(), ("pp", 1), ("ep", 1)]
    assert layout.asked == set()


def test_a_layout_of_one_rank_has_no_mesh(make: Make, calls: list[tuple[Any, ...]]) -> None:
    layout = make({"dp": 1}, world=1)
    assert (layout.name, calls) == ("one rank", [])
    with pytest.raises(RuntimeError, match="one rank: the layout has no mesh, or has ended"):
        _ = layout.mesh
    layout.close()
    assert calls == []


def test_a_process_without_a_group_is_rank_0_of_1() -> None:
    layout = Layout({"dp": 1})
    assert (layout.rank, layout["dp"], layout.at("dp")) == (0, 1, 0)
    with pytest.raises(ValueError, match=r"\Adp2 has 2 ranks, this world 1\Z"):
        Layout({"dp": 2})


def test_a_world_of_another_size_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"\Adp2-tp3-cp2 has 12 ranks, this world 6\Z"):
        make(SIZES, world=6)


def test_ranks_are_numbered_along_the_last_axis_first(make: Make) -> None:
    layout = make(SIZES, rank=9)
    assert [(layout.at("dp", rank), layout.at("tp", rank), layout.at("cp", rank)) for rank in range(12)] == [
        (dp, tp, cp) for dp in range(2) for tp in range(3) for cp in range(2)
    ]
    assert [layout.at(axis) for axis in ("dp", "tp", "cp", "fsdp", "pp")] == [1, 1, 1, 0, 0]
    assert layout.at("dp", 0) == 0
    assert layout.asked == {"dp", "tp", "cp", "fsdp", "pp"}
    with pytest.raises(KeyError, match="'xp': this layout has the axes dp, fsdp, tp, cp, pp, ep"):
        layout.at("xp")


def test_a_part_is_counted_with_the_first_axis_outermost(make: Make) -> None:
    layout = make(SIZES, rank=9)
    assert layout.part("tp") == (1, 3)
    assert layout.part(("dp", "tp")) == (4, 6)
    assert layout.part(["tp", "dp", "pp"]) == (3, 6)
    assert layout.part("tp", 4) == (2, 3)
    assert layout.part(()) == (0, 1)
    tensor = torch.arange(14).view(2, 7)
    assert layout.slice(tensor, "tp", dim=1).tolist() == [[3, 4, 5], [10, 11, 12]]
    assert layout.slice(tensor, "dp").tolist() == [list(range(7, 14))]


def test_members_differ_on_the_axes_alone(make: Make) -> None:
    layout = make(SIZES, rank=9)
    assert layout.members(["tp"]) == [7, 9, 11]
    assert layout.members(["tp"], 0) == [0, 2, 4]
    assert layout.members(["dp", "cp"]) == [2, 3, 8, 9]
    assert layout.members([]) == [9]


def test_groups_of_several_axes_are_made_once(make: Make, calls: list[tuple[Any, ...]]) -> None:
    layout = make(SIZES, rank=9)
    calls.clear()
    assert layout.group("tp") == layout.group("tp", "pp") == "group of tp"
    assert layout.group("cp", "tp", "dp") == "world"
    assert layout.asked == {"tp", "pp", "cp", "dp"}
    assert calls == []
    made = (6, 7, 8, 9, 10, 11)
    assert layout.group("cp", "tp") == layout.group("tp", "cp") == made
    assert calls == [("new", {"use_local_synchronization": True})]
    calls.clear()
    with layout as entered:
        assert entered is layout
    assert calls == [("end", "one"), ("end", made)]
    layout.close()
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match="dp2-tp3-cp2: the layout has no mesh, or has ended"):
        layout.group("tp")


def test_a_group_of_axes_of_size_1_is_refused(make: Make) -> None:
    layout = make(SIZES)
    ask = r'of size 1 in dp2-tp3-cp2, where there is no group: ask first if layout\["{}"\] > 1'
    with pytest.raises(ValueError, match=r"group\('fsdp', 'pp'\): " + ask.format("fsdp")):
        layout.group("fsdp", "pp")
    with pytest.raises(ValueError, match=r"group\(\): " + ask.format("tp")):
        layout.group()
    with pytest.raises(KeyError, match="'xp': this layout has the axes dp, fsdp, tp, cp, pp, ep"):
        layout.group("tp", "xp")


def test_axes_across_hosts_have_neighbours_on_another(make: Make) -> None:
    assert make(SIZES).across_hosts == ()
    assert make(SIZES, hosts=("a",) * 12).across_hosts == ()
    assert make(SIZES, hosts=("a",) * 6 + ("b",) * 6).across_hosts == ("dp",)
    assert make(SIZES, hosts=("a", "b") * 6).across_hosts == ("cp",)
    assert make(SIZES, hosts=("a",) * 4 + ("b",) * 8).across_hosts == ("dp", "tp")


def test_collectives_are_sorted_by_the_axes_of_their_groups(make: Make) -> None:
    layout = make(SIZES)
    groups: list[tuple[int, ...]] = [(0, 2, 4), (0, 1, 2, 3), (1, 3, 5), (0,), tuple(range(12))]
    collectives: list[Any] = [SimpleNamespace(group=group) for group in groups]
    found = layout.by_axes(collectives)
    assert {axes: [each.group for each in of] for axes, of in found.items()} == {
        "tp": [groups[0], groups[2]],
        "tp-cp": [groups[1]],
        "": [groups[3]],
        "dp-tp-cp": [groups[4]],
    }


def test_chunks_are_those_of_torch_and_then_empty() -> None:
    tensor = torch.arange(10).view(5, 2)
    parts = [chunk(tensor, index, 4) for index in range(4)]
    assert [part.tolist() for part in parts] == [
        *(each.tolist() for each in torch.chunk(tensor, 4)),
        [],
    ]
    assert parts[3].shape == (0, 2)
    assert parts[0].data_ptr() == tensor.data_ptr()
    assert [chunk(tensor, index, 2, dim=1).shape for index in range(2)] == [(5, 1)] * 2
    assert (as_axes("dp"), as_axes(["dp", "tp"])) == (("dp",), ("dp", "tp"))
