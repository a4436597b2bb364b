"""Shardings of DTensor's operators that are kept for meshes of later tests: they are right there, too."""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import use_min_cost_redistribution_plan
from torch.distributed.tensor.experimental import register_sharding
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.rank.dtensor_internals import MAX_TENSORS, Kept, NotKept, _remembering, rules_of

pytestmark = pytest.mark.ranks(2)
ALONE = pytest.mark.ranks(1, group=False)
aten = torch.ops.aten
propagator = DTensor._op_dispatcher.sharding_propagator


@pytest.fixture
def make_mesh(world):
    groups = []

    def make() -> DeviceMesh:
        groups.append(dist.new_group())
        return DeviceMesh.from_group(groups[-1], "cpu")

    yield make
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def modes(monkeypatch):
    """The modes in which operators have run on fake tensors."""
    modes: list[FakeTensorMode] = []
    enter = FakeTensorMode.__enter__
    monkeypatch.setattr(FakeTensorMode, "__enter__", lambda mode: modes.append(mode) or enter(mode))
    return modes


def test_an_operator_runs_on_fake_tensors_once_for_all_meshes(make_mesh, modes):
    num_modes = []
    for shape in [(3, 2), (3, 2), (2, 3)]:
        sharded = DTensor.from_local(torch.ones(shape), make_mesh(), [Shard(0)])
        assert sharded.sum(1).shape == (2 * shape[0],)
        num_modes.append(len(modes))
    assert 0 < num_modes[0] == num_modes[1] < num_modes[2]


def test_shapes_are_found_once_for_all_placements(make_mesh, modes, double):
    num_modes = []
    for placement, value in [(Shard(0), 1.5), (Shard(1), 1.5), (Replicate(), 1.5), (Replicate(), True)]:
        product = distribute_tensor(torch.ones(4, 6, dtype=torch.int64), make_mesh(), [placement]) * value
        assert (product.shape, product.dtype) == ((4, 6), torch.int64 if value is True else torch.float64)
        num_modes.append(len(modes))
    assert 0 < num_modes[0] == num_modes[1] == num_modes[2] < num_modes[3]


def test_results_have_the_mesh_of_their_arguments(make_mesh):
    for _ in range(2):
        ones = DTensor.from_local(torch.ones(2), mesh := make_mesh(), [Shard(0)])
        square = ones.reshape(2, 2)
        assert (square @ square).device_mesh is mesh
        assert (square @ square).full_tensor().tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(("order", "rows"), [("abab", [1, 2, 3, 4]), ("abba", [5, 6, 7, 8])])
def test_arguments_may_be_on_several_meshes_of_the_same_ranks(make_mesh, modes, order, rows):
    num_modes = []
    for _ in range(2):
        by_name = {"a": make_mesh(), "b": make_mesh()}
        meshes = [by_name[name] for name in order * 5]
        pairs = zip(rows * 5, meshes, strict=True)
        sharded = [DTensor.from_local(torch.ones(n), mesh, [Shard(0)]) for n, mesh in pairs]
        scaled = torch._foreach_mul(sharded, 3.0)
        assert [each.full_tensor().tolist() for each in scaled] == [[3.0] * 2 * n for n in rows * 5]
        assert [each.device_mesh is mesh for each, mesh in zip(scaled, meshes, strict=True)] == [True] * 20
        num_modes.append(len(modes))
    assert 0 < num_modes[0] == num_modes[1]


def test_results_of_too_many_tensors_are_dropped():
    known, kept = Kept(), []
    for name, num_tensors in [
        ("a", MAX_TENSORS - 1),
        ("b", 1),
        ("c", 2),
        ("d", MAX_TENSORS + 1),
        ("e", MAX_TENSORS - 2),
        ("f", 1),
    ]:
        known.keep(name, len, num_tensors)
        kept.append("".join(known))
    assert kept == ["a", "ab", "c", "c", "ce", "f"]


def test_tensors_that_an_operator_returns_count(make_mesh, monkeypatch):
    kept = []
    monkeypatch.setattr(Kept, "keep", lambda self, key, value, num: kept.append(num))
    DTensor.from_local(torch.ones(6, 4), make_mesh(), [Shard(1)]).unbind(0)
    assert kept == [1 + 6] * 2  # its shapes, and how it is sharded


def test_shapes_of_symbolic_sizes_are_found_each_time(make_mesh):
    size = ShapeEnv().create_unbacked_symint()
    spec = DTensorSpec(make_mesh(), (Replicate(),), TensorMeta(torch.Size([size]), (1,), torch.float32))
    schema = SimpleNamespace(op=aten.detach.default, args_schema=(spec,), kwargs_schema={})
    made = iter("ab")
    find = _remembering(lambda *_: next(made), lambda: False)
    assert [find(propagator, schema) for _ in range(2)] == ["a", "b"]


def test_no_result_keeps_a_mesh(world):
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    assert (DTensor.from_local(torch.ones(2), mesh, [Shard(0)]) * 3).full_tensor().tolist() == [3] * 4
    freed = weakref.ref(mesh)
    del mesh
    dist.destroy_process_group(group)
    gc.collect()
    assert freed() is None


def test_a_rule_that_is_replaced_by_hand_counts_at_once(make_mesh, monkeypatch):
    def placements() -> Sequence[Placement]:
        return DTensor.from_local(torch.ones(2), make_mesh(), [Shard(0)]).unsqueeze(1).placements

    assert placements() == (Shard(0),)
    rules, operator = propagator.op_strategy_funcs, aten.unsqueeze.default
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


def test_the_sign_of_a_zero_counts(make_mesh):
    signs = []
    for zero in (0.0, -0.0):
        ones = DTensor.from_local(torch.ones(2), make_mesh(), [Shard(0)])
        signs.append(math.copysign(1, ones.new_full((4,), zero).to_local()[0].item()))
    assert signs == [1, -1]


def test_a_rule_of_a_test_is_asked_for_each_mesh(make_mesh, monkeypatch):
    asked = []
    before = propagator.op_strategy_funcs[aten.unsqueeze.default]
    rule = lambda op_schema: asked.append(op_schema) or before(op_schema)  # noqa: E731
    monkeypatch.setitem(propagator.op_strategy_funcs, aten.unsqueeze.default, rule)
    for _ in range(2):
        DTensor.from_local(torch.ones(3, 2), make_mesh(), [Shard(0)]).unsqueeze(0)
    assert len(asked) == 2


def test_rules_count_of_what_an_operator_is_decomposed_into(make_mesh):
    def placements() -> Sequence[Placement]:
        matrix = DTensor.from_local(torch.ones(2, 3), mesh := make_mesh(), [Shard(0)])
        return torch.mv(matrix, DTensor.from_local(torch.ones(3), mesh, [Replicate()])).placements

    operator = aten.sum.dim_IntList
    if operator not in propagator.op_strategy_funcs:
        pytest.skip("this torch takes its own rule for sums before a registered one")
    assert placements() == (Shard(0),)
    before = propagator.op_strategy_funcs[operator], propagator.op_to_schema_info[operator]

    @register_sharding(operator)
    def replicated(x, dim, keepdim=False, dtype=None):
        return [([Replicate()], [Replicate(), None, None])]

    try:
        assert placements() == (Replicate(),)
    finally:
        propagator.register_op_strategy(operator, *before)


def test_all_rules_must_be_of_torch():
    theirs, ours = torch.nn.functional.relu, len
    tables = (
        {1: theirs},
        {1: theirs, 2: theirs},
        {2: SimpleNamespace(func=ours), 3: SimpleNamespace(func=theirs)},
    )
    names = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    ruled = SimpleNamespace(**dict(zip(names, tables, strict=True)))
    assert [rules_of(ruled, 1), rules_of(ruled, 3)] == [(theirs, theirs), (theirs,)]
    for operator in (2, 4):
        with pytest.raises(NotKept):
            rules_of(ruled, operator)


@contextlib.contextmanager
def fake_group(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    yield
    dist.destroy_process_group()


meshes = []


@ALONE
@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (2, 1)])
def test_shapes_are_those_of_the_place_in_the_mesh(world, rank, rows):
    with fake_group(rank, 3):
        mesh = init_device_mesh("cpu", (3,))
        meshes.append(mesh)  # the first is equal to the second
        seven = DTensor.from_local(torch.ones(rows, 4), mesh, [Shard(0)], shape=(7, 4), stride=(4, 1))
        assert seven.view(7, 2, 2).to_local().shape == (rows, 2, 2)


@ALONE
def test_a_part_of_a_mesh_may_outlive_its_groups(world):
    with fake_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        sharded = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    assert sharded.amax(1).to_local().shape == (2,)


@ALONE
@pytest.mark.parametrize("planned", [False, True])
def test_the_plan_of_least_cost_is_another(world, planned):
    with fake_group(0, 8):
        mesh = init_device_mesh("cpu", (2, 4))
        left, right = (
            DTensor.from_local(torch.ones(16, 64), mesh, [Replicate(), Shard(0)]) for _ in range(2)
        )
        with use_min_cost_redistribution_plan() if planned else contextlib.nullcontext():
            placements = (left @ right).placements
    assert placements == ((Shard(1), Shard(0)) if planned else (Replicate(), Shard(0)))
