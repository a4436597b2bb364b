"""Logs of recorders, entry by entry, which fail when they saw nothing."""

import copy
import dataclasses
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep.recorders import Collective, CollectivesLog, ForwardDtypes, named_tensors
from lockstep.recorders.execution import ExecutionLog, active_log
from lockstep.recorders.tensors import flat_bytes

pytestmark = [
    # torch 2.13 gave two collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16


def only(log: CollectivesLog) -> Collective:
    assert len(log) == 1, str(log)
    return next(iter(log))


# collectives


@pytest.mark.ranks(2)
def test_all_reduce_is_recorded_with_every_field(world, collectives):
    dist.all_reduce(torch.ones(3, 4, dtype=BF16, device=world.device))
    assert only(collectives) == Collective("all_reduce", (BF16,), ((3, 4),), 24, 2, 0, False)


ISSUE = {
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([t.clone(), t.clone()], t),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t.new_empty(8), t),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t.new_empty(2), t),
    "all_to_all_single": lambda t: dist.all_to_all_single(t.clone(), t),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ISSUE)
def test_a_collective_has_the_torch_name_and_the_input_shape(world, collectives, op):
    ISSUE[op](torch.ones(4, dtype=F64, device=world.device))
    assert only(collectives) == Collective(op, (F64,), ((4,),), 32, 2, 0, False)


@pytest.mark.ranks(2)
def test_list_form_is_one_entry_with_every_input(world, collectives):
    parts = [torch.ones(2, device=world.device), torch.ones(2, device=world.device)]
    dist.reduce_scatter(torch.empty(2, device=world.device), parts)
    assert only(collectives) == Collective("reduce_scatter", (F32, F32), ((2,), (2,)), 16, 2, 0, False)


@pytest.mark.ranks(2)
def test_barrier_hands_in_nothing(world, collectives):
    dist.barrier()
    assert only(collectives) == Collective("barrier", (), (), 0, 2, 0, False)


@pytest.mark.ranks(2)
def test_scatter_hands_in_its_list_at_the_source_only(world, collectives):
    parts = [torch.ones(2, device=world.device)] * 2
    dist.scatter(torch.empty(2, device=world.device), parts if world.rank == 0 else None, src=0)
    assert only(collectives).nbytes == (16 if world.rank == 0 else 0)


@pytest.mark.ranks(2)
def test_send_hands_in_its_tensor_and_recv_nothing(world, collectives):
    t = torch.ones(2, device=world.device)
    dist.send(t, 1) if world.rank == 0 else dist.recv(t, 0)
    assert (only(collectives).op, only(collectives).nbytes) == (
        ("send", 8) if world.rank == 0 else ("recv", 0)
    )


@pytest.mark.ranks(2)
def test_group_size_is_that_of_the_group_in_use(world, collectives):
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    with CollectivesLog() as log:
        dist.all_reduce(torch.ones(1, device=world.device), group=alone)
    dist.destroy_process_group(alone)
    assert only(log).group_size == 1


FUNCTIONAL = {
    "all_reduce": lambda t, group: functional.all_reduce(t, "sum", group),
    "broadcast": lambda t, group: functional.broadcast(t, 0, group),
    "all_gather_into_tensor": lambda t, group: functional.all_gather_tensor(t, 0, group),
    "reduce_scatter_tensor": lambda t, group: functional.reduce_scatter_tensor(t, "sum", 0, group),
    "all_to_all_single": lambda t, group: functional.all_to_all_single(t, None, None, group),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", FUNCTIONAL)
def test_a_functional_collective_is_recorded_once(world, collectives, op):
    _ = FUNCTIONAL[op](torch.ones(4, device=world.device), world.group) + 1
    assert only(collectives) == Collective(op, (F32,), ((4,),), 16, 2, 0, False)


@pytest.mark.ranks(2)
def test_a_functional_collective_in_place_has_the_same_name(world, collectives):
    t = torch.ones(4, device=world.device)
    work = torch.ops._c10d_functional.all_reduce_(t, "sum", world.group.group_name)
    torch.ops._c10d_functional.wait_tensor(work)
    assert only(collectives) == Collective("all_reduce", (F32,), ((4,),), 16, 2, 0, False)


@pytest.mark.ranks(2)
def test_a_collective_of_a_pending_result_is_recorded_once(world, collectives):
    pending = functional.all_reduce(torch.ones(4, device=world.device), "sum", world.group)
    _ = functional.all_reduce(pending, "sum", world.group) + 1
    assert collectives.counts() == {"all_reduce": 2}


@pytest.mark.ranks(2)
def test_autograd_collectives_are_seen_in_forward_and_backward(world, collectives):
    x = torch.ones(4, device=world.device, requires_grad=True)
    # Not the sum alone: torch 2.11 refuses a gradient that is not contiguous.
    functional.all_gather_tensor_autograd(x, 0, world.group).square().sum().backward()
    assert [(c.op, c.shape, c.in_backward) for c in collectives] == [
        ("all_gather_into_tensor", (4,), False),
        ("reduce_scatter_tensor", (8,), True),
    ]


@pytest.mark.ranks(2)
def test_object_collective_is_its_sizes_then_its_bytes(world, collectives):
    """They are gathered by all_gather up to torch 2.13, by all_gather_into_tensor in 2.15."""
    dist.all_gather_object([None, None], "x" * 100)
    sizes, payload = collectives
    assert sizes.op == payload.op in {"all_gather", "all_gather_into_tensor"}
    assert (sizes.dtype, sizes.shape) == (torch.int64, (1,))
    assert payload.dtype == torch.uint8
    assert payload.nbytes > 100


@pytest.mark.ranks(2)
def test_collective_inside_an_operator_of_dtensor_is_seen(world):
    mesh = world.mesh(2)
    x = distribute_tensor(torch.ones(4, 4, device=world.device), mesh, [Shard(0)])
    with CollectivesLog() as log:
        x @ x
    assert only(log) == Collective("all_gather_into_tensor", (F32,), ((2, 4),), 32, 2, 0, False)


@pytest.mark.ranks(2)
def test_reducer_of_ddp_is_seen_in_backward(world):
    model = DistributedDataParallel(nn.Linear(3, 5).to(world.device))
    loss = model(torch.ones(2, 3, device=world.device)).sum()
    with CollectivesLog() as log:
        loss.backward()
    assert only(log) == Collective("all_reduce", (F32,), ((20,),), 80, 2, 0, True)


@pytest.mark.ranks(2)
def test_inner_log_holds_its_part_and_outer_log_everything(world, collectives):
    t = torch.ones(1, device=world.device)
    dist.all_reduce(t)
    with CollectivesLog() as inner:
        dist.broadcast(t, 0)
    dist.all_reduce(t)
    assert inner.counts() == {"broadcast": 1}
    assert [c.op for c in collectives] == ["all_reduce", "broadcast", "all_reduce"]


@pytest.mark.ranks(2)
def test_queries_add_up_per_operation(world, collectives):
    for dtype in (F32, F16):
        dist.all_reduce(torch.ones(4, dtype=dtype, device=world.device))
    dist.barrier()
    assert collectives.counts() == {"all_reduce": 2, "barrier": 1}
    assert collectives.dtypes("all_reduce") == {F32, F16}
    assert collectives.nbytes("all_reduce") == 24
    assert [c.index for c in collectives.of("all_reduce")] == [0, 1]
    assert str(collectives).splitlines()[1].split() == [
        "1",
        "all_reduce",
        "8",
        "B",
        "2",
        "ranks",
        "float16[4]",
    ]


@pytest.mark.ranks(2)
def test_a_query_for_an_absent_operation_lists_the_present_ones(world, collectives):
    dist.barrier()
    with pytest.raises(AssertionError, match=r"no all_reduce was seen; seen: barrier x 1"):
        collectives.dtypes("all_reduce")


def test_query_of_a_log_that_saw_nothing_fails():
    with CollectivesLog() as log, pytest.raises(AssertionError, match="seen: no collective at all"):
        log.nbytes("all_reduce")
    assert log.count("all_reduce") == 0


def test_log_that_was_never_entered_does_not_count_zero():
    with pytest.raises(RuntimeError, match="never entered"):
        CollectivesLog().count("all_reduce")


def test_misspelt_operation_does_not_count_zero():
    with CollectivesLog() as log, pytest.raises(ValueError, match="'allreduce' is not a collective"):
        log.count("allreduce")


@pytest.mark.ranks(2)
def test_label_is_that_of_the_innermost_part_of_a_profile(world):
    values = torch.zeros(2, device=world.device)
    with CollectivesLog() as log:
        with torch.profiler.record_function("step"):
            with torch.profiler.record_function("reduce"):
                dist.all_reduce(values)
            dist.all_reduce(values)
        dist.all_reduce(values)
    assert [entry.label for entry in log] == ["reduce", "step", ""]


def test_dtype_of_an_entry_without_inputs_is_an_error():
    with pytest.raises(ValueError, match="exactly one, got 0 dtypes"):
        _ = Collective("barrier", (), (), 0, 2, 0, False).dtype


# dtypes in forward


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: dict[str, torch.Tensor]


class TakesBatch(nn.Module):
    def forward(self, scale: float, batch: Batch, *, mask: torch.Tensor) -> torch.Tensor:
        return batch.x * scale * mask


class Caster(nn.Module):
    """Cast the parameters and the input of what it wraps."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.dtype))


@pytest.fixture
def two_layers() -> Iterator[nn.Sequential]:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_every_module_is_recorded_in_the_order_of_its_calls(two_layers):
    with ForwardDtypes(two_layers) as log:
        two_layers(torch.ones(3, 2))
    assert [(c.module, c.index) for c in log] == [("", 0), ("0", 1), ("1", 2)]
    assert log.calls("1")[0].parameters == {"weight": F32, "bias": F32}
    assert log.calls("1")[0].buffers == {
        "running_mean": F32,
        "running_var": F32,
        "num_batches_tracked": torch.int64,
    }


def test_cast_by_a_hook_that_is_registered_later_is_seen(two_layers):
    layer = two_layers[0].half()
    with ForwardDtypes(two_layers) as log:
        layer.register_forward_pre_hook(lambda module, args: (args[0].half(),))
        two_layers(torch.ones(3, 2))
    assert log.inputs("") == {F32}
    assert log.inputs("0") == {F16}


def test_a_cast_by_a_wrapper_has_the_name_of_the_bare_model(two_layers):
    log = ForwardDtypes(two_layers)
    with log:
        Caster(two_layers, F64)(torch.ones(3, 2))
    assert log.inputs("0") == log.parameters("0") == log.buffers("1") == {F64}


def test_parameter_that_became_a_plain_tensor_is_seen(two_layers):
    log, layer = ForwardDtypes(two_layers), two_layers[0]
    weight, bias = layer._parameters.pop("weight"), layer._parameters.pop("bias")
    layer.weight, layer.bias = weight.detach().double(), bias.detach().double()
    with log:
        layer(torch.ones(3, 2, dtype=F64))
    assert log.calls("0")[0].parameters == {"weight": F64, "bias": F64}


def test_tensors_in_dataclasses_containers_and_keywords_are_seen():
    model, x = TakesBatch(), torch.ones(2)
    with ForwardDtypes(model) as log:
        model(2.0, Batch(x.half(), {"ids": x.long()}), mask=x.bool())
    assert log.calls(model)[0].inputs == {"1.x": F16, "1.extra.ids": torch.int64, "mask": torch.bool}
    assert log.inputs(model) == {F16}


def test_recomputation_under_checkpointing_is_a_call_in_backward(two_layers):
    with ForwardDtypes(two_layers) as log:
        checkpoint(two_layers[0], torch.ones(3, 2), use_reentrant=False).sum().backward()
    assert [(c.module, c.in_backward) for c in log] == [("0", False), ("0", True)]


def test_module_is_as_it_was_after_the_log(two_layers):
    before = [dict(vars(module)) for module in two_layers.modules()]
    with ForwardDtypes(two_layers) as log:
        pass
    two_layers(torch.ones(3, 2))
    assert [vars(module).keys() for module in two_layers.modules()] == [b.keys() for b in before]
    assert len(log) == 0


def test_forward_that_was_put_on_the_instance_is_put_back(two_layers):
    own = two_layers[0].forward = lambda x: x.double()
    with ForwardDtypes(two_layers) as log:
        two_layers[0](torch.ones(3, 2))
    assert two_layers[0].forward is own
    assert log.inputs("0") == {F32}


def test_a_copy_made_under_the_log_has_its_own_parameters(two_layers):
    with ForwardDtypes(two_layers):
        twin = copy.deepcopy(two_layers[0])
        nn.init.zeros_(twin.weight)
        nn.init.zeros_(twin.bias)
        assert twin(torch.ones(3, 2)).count_nonzero() == 0


def test_a_query_for_an_uncalled_module_lists_the_called_ones(two_layers):
    with ForwardDtypes(two_layers) as log:
        two_layers[0](torch.ones(3, 2))
    with pytest.raises(AssertionError, match="the forward of '1' was never called; called: 0"):
        log.inputs("1")
    with pytest.raises(ValueError, match="no module '2'"):
        log.inputs("2")


def test_query_for_floating_inputs_fails_where_all_are_integers():
    table = nn.Embedding(3, 2)
    with ForwardDtypes(table) as log:
        table(torch.tensor([1]))
    with pytest.raises(AssertionError, match="no floating-point inputs in 1 calls"):
        log.inputs(table)


def test_log_of_dtypes_that_was_never_entered_does_not_answer(two_layers):
    with pytest.raises(RuntimeError, match="never entered"):
        len(ForwardDtypes(two_layers))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1).expand(1, 1),
        torch.ones(()),
        torch.ones(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(8, dtype=torch.int16)[::2],
        torch.tensor([1 + 2j]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
    ],
    ids=["expanded", "number", "empty", "transposed", "strided", "complex", "conjugate", "negative"],
)
def test_a_tensor_of_any_strides_is_compared_by_its_bytes(tensor):
    expected = tensor.resolve_conj().resolve_neg().numpy().tobytes()
    assert flat_bytes(tensor).numpy().tobytes() == expected


def test_named_tensors_gives_each_tensor_its_path():
    a, b = torch.ones(1), torch.ones(2)
    assert named_tensors((a, {"mask": [b, 3]})) == {"0": a, "1.mask.0": b}


def test_an_execution_that_is_over_keeps_no_parameter_alive():
    layer = nn.Linear(2, 2)
    weight = weakref.ref(layer.weight)
    with ExecutionLog() as log:
        layer(torch.ones(1, 2)).sum().backward()
    assert log.events
    del layer
    assert weight() is None


def test_a_log_is_active_inside_and_the_one_before_it_afterwards():
    assert active_log() is None
    with ExecutionLog() as outer:
        with ExecutionLog() as inner:
            assert active_log() is inner
        assert active_log() is outer
    assert active_log() is None
