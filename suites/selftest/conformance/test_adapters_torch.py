"""The adapters of torch's engines, and of the composable front: what they shard, show and refuse."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn

from lockstep.conformance import Capability, NotOffered, Precision, ShardSpec, find
from lockstep.conformance.models import KnownGradients
from lockstep.recorders import CollectivesLog
from suites.selftest.project import copy_project

SHARDING = ["lockstep-composable", "torch-fsdp1", "torch-fsdp2"]
REPLICATING = ["torch-ddp", "torch-zero1"]
ALL = [*SHARDING, *REPLICATING]
EVERY_ENGINE = pytest.mark.parametrize("name", ALL)
EVERY_SHARDING = pytest.mark.parametrize("name", SHARDING)


def shard(world, name, strategy=None, **more):
    """Return the engine and four weights of five elements, a unit each but for the first."""
    engine = find(name)
    bare = KnownGradients(5).to(world.device)
    strategy = strategy or ("NO_SHARD" if name in REPLICATING else "FULL_SHARD")
    return engine, engine.shard(bare, ShardSpec(strategy, units=("1", "2", "3"), **more))


def backward(world, model, value=1.0):
    model(torch.tensor(value * (0.5 + world.rank), device=world.device)).backward()


def weights(value):
    return {f"{index}.weight": [value] * 5 for index in range(4)}


def listed(tensors):
    return {name: None if t is None else t.tolist() for name, t in tensors.items()}


@pytest.mark.ranks(2)
@EVERY_ENGINE
def test_gradients_are_the_mean_and_a_step_moves_parameters(world, name):
    engine, model = shard(world, name)
    assert listed(engine.full_gradients(model)) == dict.fromkeys(weights(0))
    backward(world, model, 2.0)
    assert listed(engine.full_gradients(model)) == weights(2.0)
    engine.optimizer(model, partial(torch.optim.SGD, lr=1.0)).step()
    assert listed(engine.full_parameters(model)) == listed(engine.full_state(model)) == weights(-2.0)


@pytest.mark.ranks(2)
@EVERY_ENGINE
def test_a_backward_without_sync_is_added_to_the_next(world, name):
    engine, model = shard(world, name)
    with engine.no_sync(model), CollectivesLog() as log:
        backward(world, model, 1.0)
    assert log.counts().keys() <= {"all_gather", "all_gather_into_tensor", "all_to_all_single"}
    assert max((entry.nbytes for entry in log), default=0) <= 5 * 4  # no whole gradient of a group
    backward(world, model, 2.0)
    assert listed(engine.full_gradients(model)) == weights(3.0)


@pytest.mark.ranks(2)
@EVERY_ENGINE
def test_the_norm_is_that_of_all_gradients(world, name):
    engine, model = shard(world, name)
    backward(world, model, 2.0)
    assert engine.clip_grad_norm_(model, 1.0).item() == pytest.approx(2 * 20**0.5)
    found = engine.full_gradients(model)["3.weight"]
    assert found.tolist() == pytest.approx([20**-0.5] * 5, rel=1e-5)


@pytest.mark.ranks(2)
@EVERY_SHARDING
def test_groups_show_what_is_gathered_when(world, name):
    engine, model = shard(world, name, precision=Precision(torch.bfloat16, torch.float32))
    seen = []
    unit = engine.unwrapped(engine.unwrapped(model)[1])
    unit.register_forward_pre_hook(lambda *_: seen.extend(engine.groups(model)))
    assert [g.state.name for g in engine.groups(model)] == ["SHARDED"] * 4
    backward(world, model)
    assert [(g.name, g.parameters) for g in seen] == [
        ("", ("0.weight",)),
        *((f"{n}", (f"{n}.weight",)) for n in (1, 2, 3)),
    ]
    assert [(g.state.name, g.gathered_bytes > 0) for g in seen][:2] == [("UNSHARDED", True)] * 2
    assert [g.state.name for g in seen][3] == "SHARDED"
    for group in engine.groups(model):
        dtypes = (group.original_dtype, group.compute_dtype, group.reduce_dtype, group.gradient_dtype)
        assert dtypes == (torch.float32, torch.bfloat16, torch.float32, torch.float32)
        assert (group.local_numel, group.full_numel, group.padding) == (3, 6, 1)
        assert (group.state.name, group.gathered_bytes, group.local_bytes) == ("SHARDED", 0, 12)


@pytest.mark.ranks(2)
@EVERY_SHARDING
def test_traffic_is_gathers_and_reductions_and_nothing_else(world, name):
    engine, model = shard(world, name, precision=Precision(torch.bfloat16, torch.float32))
    with CollectivesLog() as log:
        backward(world, model)
        dist.barrier()
    traffic = engine.traffic(log)
    assert {(e.dtype, e.shape) for e in traffic.gathers} == {(torch.bfloat16, (3,))}
    assert [(e.dtype, e.shape) for e in traffic.reductions] == [(torch.float32, (6,))] * 4
    assert [e.op for e in traffic.others] == ["barrier"]


@pytest.mark.ranks(2)
def test_summoned_parameters_are_full(world):
    engine, model = shard(world, "torch-fsdp1")
    with engine.summon(model):
        assert [tuple(module.weight.shape) for module in engine.unwrapped(model)] == [(5,)] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["lockstep-composable", "torch-fsdp2", "torch-ddp"])
def test_no_front_but_a_wrapper_shows_full_parameters_in_place(world, name):
    engine, model = shard(world, name)
    with pytest.raises(NotOffered, match="full parameters in place"):
        engine.summon(model)
    assert Capability.SUMMON not in engine.capabilities


@pytest.mark.ranks(2)
@EVERY_ENGINE
def test_ignored_modules_are_left_alone(world, name):
    engine = find(name)
    bare = KnownGradients(5).to(world.device)
    strategy = "NO_SHARD" if name in REPLICATING else "FULL_SHARD"
    model = engine.shard(bare, ShardSpec(strategy, units=("1",), ignored=("3",), use_orig_params=True))
    backward(world, model, 2.0)
    assert bare[3].weight.grad.tolist() == [1.0 + 2 * world.rank] * 5
    assert engine.full_gradients(model)["1.weight"].tolist() == [2.0] * 5


@pytest.mark.ranks(2)
@EVERY_ENGINE
def test_a_scaler_keeps_ranks_together(world, name):
    engine, model = shard(world, name)
    scaler = engine.grad_scaler(model, init_scale=4.0)
    optimizer = engine.optimizer(model, partial(torch.optim.SGD, lr=1.0))
    for value in (float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor(value * (0.5 + world.rank), device=world.device))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert listed(engine.full_parameters(model)) == weights(-2.0)
    assert world.gather(scaler.get_scale()) == [2.0, 2.0]


NOT_OFFERED = [
    ("torch-ddp", {"strategy": "FULL_SHARD"}, Capability.SHARDING),
    ("torch-ddp", {"precision": Precision(torch.bfloat16)}, Capability.MIXED_PRECISION),
    ("torch-ddp", {"offload": True}, Capability.OFFLOAD),
    ("torch-fsdp1", {"full_precision_in_eval": True}, Capability.PRECISION_IN_EVAL),
    ("torch-fsdp2", {"strategy": "HYBRID_SHARD"}, Capability.HYBRID_BY_HOSTS),
    ("torch-fsdp2", {"precision": Precision(buffer_dtype=torch.bfloat16)}, Capability.BUFFER_DTYPE),
    ("lockstep-composable", {"sync_module_states": True}, Capability.SYNC_STATES),
    ("lockstep-composable", {"forward_prefetch": True}, Capability.PREFETCH),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "settings", "capability"), NOT_OFFERED)
def test_what_an_engine_lacks_is_not_offered_by_name(world, name, settings, capability):
    spec = ShardSpec(**{"strategy": "NO_SHARD" if name in REPLICATING else "FULL_SHARD", **settings})
    with pytest.raises(NotOffered) as caught:
        find(name).shard(nn.Linear(2, 2), spec)
    assert (caught.value.engine, caught.value.capability) == (name, capability)
    assert str(caught.value) == f"{name} does not offer: {capability.value}"
    assert capability not in find(name).capabilities


@pytest.mark.ranks(2)
def test_torchs_wrapper_cannot_offload_without_accelerator(world):
    """Where torch fixes it, the adapter may offer it."""
    offload = fsdp.CPUOffload(offload_params=True)
    # The second is what a torch built for CUDA says.
    with pytest.raises(RuntimeError, match=r"accelerator|Found no NVIDIA driver"):
        fsdp.FullyShardedDataParallel(nn.Linear(2, 2), cpu_offload=offload, device_id=world.device)(
            torch.ones(1, 2)
        )
    assert not find("torch-fsdp1").capabilities & {Capability.OFFLOAD}


def test_known_deviations_are_strict_expected_failures(pytester):
    copy_project("deviations", pytester.path)
    result = pytester.runpytest_subprocess(
        "-p", "lockstep.conformance.plugin", "-rxf", "-o", "verbosity_subtests=1", timeout=60
    )
    result.stdout.fnmatch_lines_random(
        [
            "XFAIL test_it.py::test_breaks_on_one_rank - it breaks*",
            "XFAIL at setup of test_it.py::test_hangs - [[]NOTRUN[]] it hangs*",
            "*[[]XPASS(strict)[]] it was fixed (pytorch#7)*",
            "SUBXFAIL[[]n=1[]] test_it.py::test_cases - some cases break*",
            "*[[]XPASS(strict)[]] some cases break*",
            "*3 failed, 1 passed, 3 xfailed, 2 subtests passed*",
        ]
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["lockstep-composable", "torch-fsdp2"])
def test_a_unit_inside_two_others_is_sharded_before_both(world, name):
    engine = find(name)
    shared = nn.Linear(3, 3).to(world.device)
    bare = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.Linear(3, 3).to(world.device), shared))
    inputs = torch.ones(1, 3, device=world.device)
    expected = bare(inputs)
    model = engine.shard(bare, ShardSpec("FULL_SHARD", units=(nn.Linear, nn.Sequential)))
    assert torch.equal(model(inputs), expected)
    assert torch.equal(engine.full_parameters(model)["0.0.weight"], shared.weight.full_tensor())
