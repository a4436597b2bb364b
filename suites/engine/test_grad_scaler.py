"""`ShardedGradScaler`: its arguments, results and refusals."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import lockstep.engine as lockstep
from lockstep.conformance import find
from lockstep.engine import ShardedGradScaler

INF, NAN = float("inf"), float("nan")
Pair = namedtuple("Pair", ["first", "second"])


@pytest.fixture
def scaler(group_of_one):
    return ShardedGradScaler(init_scale=4.0)


@pytest.fixture
def used(scaler):
    """A scaler that has scaled a loss."""
    scaler.scale(torch.zeros(()))
    return scaler


def optimizer_of(*gradients, lr=1.0):
    """Return an optimizer of one parameter of zeros for each gradient."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return torch.optim.SGD(parameters, lr=lr)


def test_the_default_scaler_is_enabled_and_a_torch_grad_scaler():
    scaler = ShardedGradScaler()
    assert (scaler.is_enabled(), scaler.get_scale()) == (True, 2.0**16)
    assert isinstance(scaler, torch.amp.GradScaler)


def test_a_scale_passed_as_device_is_refused():
    with pytest.raises(
        TypeError, match=r"device must be a kind of device .*, got 1024.0; pass init_scale by"
    ):
        ShardedGradScaler(2.0**10)


def test_an_adapters_scaler_passes_every_setting_on():
    settings = {"growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 5}
    scaler = find("lockstep").grad_scaler(nn.Linear(1, 1), init_scale=8.0, **settings)
    assert scaler.state_dict() == {"scale": 8.0, "_growth_tracker": 0, **settings}
    assert not find("lockstep").grad_scaler(nn.Linear(1, 1), enabled=False).is_enabled()


def test_scale_maps_over_containers(scaler):
    one, two = torch.tensor([1.0, 2.0]), torch.tensor(3.0, dtype=torch.float16)
    assert scaler.scale({"a": [one], "b": (two,)})["a"][0].tolist() == [4.0, 8.0]
    scaled = scaler.scale(Pair(one, {"two": two}))
    assert (type(scaled), scaled.second["two"].item()) == (Pair, 12.0)
    assert [t.tolist() for t in scaler.scale(t for t in (one, two))] == [[4.0, 8.0], 12.0]
    assert [t.tolist() for t in scaler.scale({"a": one}.values())] == [[4.0, 8.0]]
    assert scaler.scale([]) == []


def test_scale_is_differentiable(scaler):
    loss = torch.tensor([0.5, 0.25], dtype=torch.float16, requires_grad=True)
    scaler.scale(loss).sum().backward()
    assert (loss.grad.tolist(), loss.grad.dtype) == ([4.0, 4.0], torch.float16)


@pytest.mark.parametrize("loss", [1.5, None, [torch.ones(1), 1.5], {"loss": "1.5"}, [[[2]]]], ids=str)
def test_scaling_a_non_tensor_is_refused(scaler, loss):
    with pytest.raises(TypeError, match="scale the loss tensor itself, before item"):
        scaler.scale(loss)


def test_gradients_of_every_dtype_may_be_in_one_optimizer(used):
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    optimizer = optimizer_of(*(torch.tensor([6.0, -3.0], dtype=dtype) for dtype in dtypes))
    used.step(optimizer)
    for parameter, dtype in zip(optimizer.param_groups[0]["params"], dtypes, strict=True):
        assert (parameter.tolist(), parameter.dtype) == ([-1.5, 0.75], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_one_bad_element_of_any_dtype_stops_all_parameters(used, dtype, bad):
    optimizer = optimizer_of(torch.ones(3), torch.tensor([1.0, bad], dtype=dtype), torch.ones(0))
    used.step(optimizer)
    assert [p.tolist() for p in optimizer.param_groups[0]["params"]] == [[0.0] * 3, [0.0] * 2, []]


def test_sparse_values_that_overflow_when_coalesced_are_found(used):
    embedding = nn.Embedding(2, 1, sparse=True)
    (embedding(torch.tensor([1, 1])) * 3e38).sum().backward()
    assert embedding.weight.grad._values().isfinite().all()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.tolist()
    used.step(optimizer)
    used.update()
    assert (embedding.weight.tolist(), used.get_scale()) == (before, 2.0)


def test_an_optimizer_without_gradients_can_be_stepped(used):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    for _ in range(2):
        used.unscale_(optimizer)
        used.step(optimizer)
        used.update()
    assert used.state_dict()["_growth_tracker"] == 2


class TestWrongUse:
    def test_unscaling_twice_is_refused(self, used):
        optimizer = optimizer_of(torch.ones(1))
        used.unscale_(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_.. has already been called on this optimizer"):
            used.unscale_(optimizer)

    def test_unscaling_after_the_step_is_refused(self, used):
        optimizer = optimizer_of(torch.ones(1))
        used.step(optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_.. is being called after step"):
            used.unscale_(optimizer)

    def test_a_second_step_without_update_is_refused(self, used):
        optimizer = optimizer_of(torch.full((1,), 4.0))
        used.step(optimizer)
        with pytest.raises(RuntimeError, match=r"step.. has already been called since the last update"):
            used.step(optimizer)
        assert optimizer.param_groups[0]["params"][0].tolist() == [-1.0]

    def test_an_update_without_a_step_is_refused(self, used):
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            used.update()

    @pytest.mark.parametrize("method", ["unscale_", "step"])
    def test_gradients_of_an_unscaled_loss_are_refused(self, scaler, method):
        with pytest.raises(AssertionError, match=r"script did not use scaler.scale\(loss"):
            getattr(scaler, method)(optimizer_of(torch.ones(1)))

    @pytest.mark.parametrize("by_name", [False, True])
    def test_a_closure_is_refused(self, used, by_name):
        given = ((), {"closure": lambda: 0.0}) if by_name else ((lambda: 0.0,), {})
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            used.step(optimizer_of(torch.ones(1)), *given[0], **given[1])

    def test_a_disabled_scaler_allows_a_closure(self):
        optimizer = optimizer_of(torch.ones(1))
        assert ShardedGradScaler(enabled=False).step(optimizer, lambda: 0.5) == 0.5

    @pytest.mark.parametrize("scale", [0.0, -1.0, INF, NAN, 1e39, 1e-39])
    def test_a_scale_outside_positive_fp32_is_refused(self, used, scale):
        for give in (
            lambda: ShardedGradScaler(init_scale=scale),
            lambda: used.update(scale),
            lambda: used.load_state_dict(used.state_dict() | {"scale": scale}),
        ):
            with pytest.raises(ValueError, match="must be a positive number that fp32 can hold, got"):
                give()
        assert used.get_scale() == 4.0

    def test_a_wrong_process_group_type_is_refused(self, group_of_one):
        for wrong in (3, (group_of_one, "world")):
            with pytest.raises(TypeError, match=r"ProcessGroup or a pair \(shard, replicate\) of them, got"):
                ShardedGradScaler(process_group=wrong)

    def test_a_step_without_a_process_group_is_refused(self, request):
        scaler = ShardedGradScaler()
        scaler.scale(torch.zeros(()))
        with pytest.raises(RuntimeError, match=r"init_process_group first, pass process_group, or use"):
            scaler.step(optimizer_of(torch.ones(1)))
        request.getfixturevalue("group_of_one")
        optimizer = optimizer_of(torch.tensor([2.0**16]))
        scaler.step(optimizer)
        assert optimizer.param_groups[0]["params"][0].tolist() == [-1.0]

    @pytest.mark.ranks(2)
    def test_a_rank_outside_the_process_group_is_refused(self, world):
        group = dist.new_group([0])
        if world.rank == 1:
            with pytest.raises(ValueError, match="rank 1 is not in process_group"):
                ShardedGradScaler(process_group=group)
        if world.rank == 0:
            dist.destroy_process_group(group)


class TestStates:
    def test_state_is_interchangeable_with_torchs_scaler(self, used):
        for source, target in (
            (used, torch.amp.GradScaler("cpu")),
            (torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=7), ShardedGradScaler()),
        ):
            target.load_state_dict(source.state_dict())
            assert target.state_dict() == source.state_dict()

    def test_an_enabled_scaler_refuses_the_state_of_a_disabled_one(self, used):
        assert ShardedGradScaler(enabled=False).state_dict() == {}
        with pytest.raises(RuntimeError, match="source state dict is empty"):
            used.load_state_dict({})

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
    def test_copies_of_a_scaler_are_independent(self, used, copied):
        other = copied(used)
        used.step(optimizer_of(torch.tensor([INF])))
        used.update()
        assert (used.get_scale(), other.get_scale()) == (2.0, 4.0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bad", [None, INF, NAN])
@pytest.mark.parametrize(
    "shard",
    [fully_shard, lockstep.fully_shard, lockstep.replicate],
    ids=["torchs_fully_shard", "fully_shard", "replicate"],
)
def test_dtensor_gradients_are_unscaled_and_agreed_on(world, collectives, shard, bad):
    """Ranks agree by one all-reduce; torch's own handling of DTensors adds one for each kind of gradient."""
    model = nn.Linear(1, 2 * world.size, bias=False, device=world.device)
    nn.init.zeros_(model.weight)
    shard(model, mesh=world.mesh())
    scaler, optimizer = ShardedGradScaler(init_scale=4.0), torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.tensor([[1.0 + world.rank - (world.size - 1) / 2]], device=world.device)
    scaler.scale(model(x).sum()).backward()
    own = model.weight.grad.to_local()
    if bad and world.rank == 0:
        own[0] = bad
    before = len(collectives)
    scaler.unscale_(optimizer)
    assert isinstance(model.weight.grad, DTensor)
    assert own[1:].tolist() == [[1.0]] * (len(own) - 1)
    scaler.step(optimizer)
    scaler.update()
    assert [(entry.op, entry.shapes) for entry in collectives.entries[before:]] == [("all_reduce", ((),))]
    weight, scale = (0.0, 2.0) if bad else (-1.0, 4.0)
    assert model.weight.full_tensor().tolist() == [[weight]] * 2 * world.size
    assert world.gather(scaler.get_scale()) == [scale] * world.size
