"""Memory of a rank: what tests have freed, and what remembers them, does not stay to the last test."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from lockstep.rank.dtensor_internals import DROP_EVERY, DTensorResults

pytestmark = pytest.mark.ranks(2)

MEBI = 2**20
kept: list[Any] = []


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def mesh_of_result(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a result on `mesh`: the one of an equal mesh where that result is remembered."""
    return (DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).detach() * 2).device_mesh


def default_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


# What is freed


def test_300_mebibytes_are_freed_below_a_block_that_stays():
    kept.append(resident())
    # Too small for a mapping of their own: the last one keeps the allocator from giving back those below it.
    blocks = [bytearray(64 * 1024) for _ in range(4800)]
    kept.append(blocks[-1])
    assert resident() > kept[0] + 200 * MEBI  # a busy machine may have taken back pages of what is idle


def test_they_are_given_back():
    assert resident() < kept[0] + 80 * MEBI


# Fixtures


@pytest.fixture
def narrow(world, request):
    kept.append(weakref.ref(request))


@pytest.mark.parametrize("test", [0, 1, 2])
def test_requests_of_ended_tests_are_not_kept_by_wide_fixtures(narrow, test):
    gc.collect()
    living = [request for each in kept if isinstance(each, weakref.ref) and (request := each()) is not None]
    assert len(living) == 1


# DTensor


def test_results_of_operators_are_remembered():
    mesh = default_mesh()
    assert mesh_of_result(mesh) is mesh
    kept.append(mesh)


def test_they_are_until_the_groups_change():
    assert mesh_of_result(default_mesh()) is kept[-1]
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    assert mesh == kept[-1]
    assert mesh_of_result(mesh) is mesh
    dist.barrier()  # a rank may not end the group while the other still connects to it
    dist.destroy_process_group(group)


def test_results_of_other_groups_are_forgotten():
    mesh = default_mesh()
    assert mesh_of_result(mesh) is mesh


def parts() -> DTensor:
    # torch 2.15 takes its own rule before a registered one, for operators that it has one of a new form for.
    complex_ones = torch.ones(1, 3, dtype=torch.complex64)
    return torch.view_as_real(DTensor.from_local(complex_ones, default_mesh(), [Shard(0)]))


def test_an_operator_follows_the_rule_of_torch():
    assert parts().placements == (Shard(0),)


def test_a_rule_that_a_later_test_registers_counts():
    @register_sharding(torch.ops.aten.view_as_real.default)
    def replicated(x):
        return [([Replicate()], [Replicate()])]

    assert parts().placements == (Replicate(),)


def test_results_are_dropped_now_and_then():
    results = DTensorResults()
    mesh = mesh_of_result(default_mesh())
    for _ in range(DROP_EVERY - 1):
        results.end_test()
    assert mesh_of_result(default_mesh()) is mesh
    results.end_test()
    assert mesh_of_result(default_mesh()) is not mesh


# What an operator returns for equal shapes on another mesh


@pytest.fixture
def make_mesh(world):
    groups = []

    def make() -> DeviceMesh:
        groups.append(dist.new_group())
        return DeviceMesh.from_group(groups[-1], "cpu")

    yield make
    for group in groups:
        dist.destroy_process_group(group)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_an_operator_runs_on_fake_tensors_once_for_all_meshes(make_mesh, monkeypatch):
    modes: list[FakeTensorMode] = []
    enter = FakeTensorMode.__enter__
    monkeypatch.setattr(FakeTensorMode, "__enter__", lambda mode: modes.append(mode) or enter(mode))
    num_modes = []
    for shape in [(3, 2), (3, 2), (2, 3)]:
        sharded = DTensor.from_local(torch.ones(shape), make_mesh(), [Shard(0)])
        assert sharded.sum(1).shape == (2 * shape[0],)
        num_modes.append(len(modes))
    assert 0 < num_modes[0] == num_modes[1] < num_modes[2]


def test_results_have_the_mesh_of_their_arguments(make_mesh):
    for _ in range(2):
        ones = DTensor.from_local(torch.ones(2), mesh := make_mesh(), [Shard(0)])
        square = ones.reshape(2, 2)
        assert (square @ square).device_mesh is mesh
        assert (square @ square).full_tensor().tolist() == [[2, 2], [2, 2]]


def test_no_result_keeps_a_mesh(world):
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    assert (DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) * 3).full_tensor().tolist() == [3] * 4
    freed = weakref.ref(mesh)
    del mesh
    dist.destroy_process_group(group)
    gc.collect()
    assert freed() is None


def test_a_rule_that_is_put_aside_by_hand_counts_no_more(make_mesh, monkeypatch):
    def placements() -> Sequence[Placement]:
        return DTensor.from_local(torch.ones(2), make_mesh(), [Shard(0)]).unsqueeze(1).placements

    assert placements() == (Shard(0),)
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    operator = torch.ops.aten.unsqueeze.default
    before = rules[operator]

    def replicated(op_schema: Any) -> Any:
        strategy = before(op_schema)
        for each in strategy.strategies:
            each.output_specs.placements = (Replicate(),)
        return strategy

    monkeypatch.setitem(rules, operator, replicated)
    assert placements() == (Replicate(),)
    monkeypatch.undo()
    assert placements() == (Shard(0),)


def half_of_seven(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.full((2,), 7), mesh, [Shard(0)]) / 2


def test_a_quotient_has_the_default_dtype(make_mesh):
    assert half_of_seven(make_mesh()).dtype is torch.float32


def test_it_follows_another_default_dtype(make_mesh, double):
    assert half_of_seven(make_mesh()).dtype is torch.float64
    assert half_of_seven(make_mesh()).full_tensor().tolist() == [3.5] * 4


@pytest.mark.parametrize("number", [2, 2.0, True])
def test_a_product_with_a_number_has_the_dtype_of_its_type(make_mesh, number):
    sevens = DTensor.from_local(torch.full((2,), 7), make_mesh(), [Shard(0)])
    assert (sevens * number).dtype is (torch.full((2,), 7) * number).dtype
