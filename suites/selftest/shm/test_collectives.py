"""Every collective of torch.distributed: what each rank has afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from suites.selftest.shm.samples import ALL, ONLY_SHM, same, sample

pytestmark = [
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated.*:FutureWarning"),
]

only_shm = pytest.mark.parametrize("backend", ["shm"])
by_dtype = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, id=f"{backend}-{str(dtype).removeprefix('torch.')}")
        for backend in ("shm", "gloo")
        for dtype in ALL
        if backend == "shm" or dtype not in ONLY_SHM
    ],
)


def everyone(size, dtype=torch.float32, numel=6):
    return [sample(rank, dtype, numel) for rank in range(size)]


# one dtype after the other


@by_dtype
@pytest.mark.ranks(2)
def test_broadcast(world, group, dtype):
    for source in range(world.size):
        tensor = sample(world.rank, dtype)
        dist.broadcast(tensor, source, group=group)
        assert same(tensor, sample(source, dtype))


@by_dtype
@pytest.mark.ranks(3)
def test_all_gather(world, group, dtype):
    outputs = [torch.empty(6, dtype=dtype) for _ in range(world.size)]
    dist.all_gather(outputs, sample(world.rank, dtype), group=group)
    assert all(map(same, outputs, everyone(world.size, dtype)))


@by_dtype
@pytest.mark.ranks(2)
def test_all_gather_into_tensor(world, group, dtype):
    output = torch.empty(12, dtype=dtype)
    dist.all_gather_into_tensor(output, sample(world.rank, dtype), group=group)
    assert same(output, torch.cat(everyone(2, dtype)))


@by_dtype
@pytest.mark.ranks(3)
def test_gather(world, group, dtype):
    outputs = [torch.empty(6, dtype=dtype) for _ in range(world.size)] if world.rank == 1 else None
    dist.gather(sample(world.rank, dtype), outputs, dst=1, group=group)
    if outputs is not None:
        assert all(map(same, outputs, everyone(world.size, dtype)))


@by_dtype
@pytest.mark.ranks(3)
def test_scatter(world, group, dtype):
    output = torch.empty(6, dtype=dtype)
    dist.scatter(output, everyone(world.size, dtype) if world.rank == 2 else None, src=2, group=group)
    assert same(output, sample(world.rank, dtype))


@by_dtype
@pytest.mark.ranks(3)
def test_all_to_all_single(world, group, dtype):
    output = torch.empty(6, dtype=dtype)
    dist.all_to_all_single(output, sample(world.rank, dtype), group=group)
    pieces = [piece.view(3, 2)[world.rank] for piece in everyone(3, dtype)]
    assert same(output, torch.cat(pieces))


@by_dtype
@pytest.mark.ranks(2)
def test_send_and_recv(world, group, dtype):
    if world.rank == 0:
        dist.send(sample(0, dtype), 1, group=group)
    else:
        tensor = torch.empty(6, dtype=dtype)
        assert dist.recv(tensor, 0, group=group) == 0
        assert same(tensor, sample(0, dtype))


# forms


@pytest.mark.ranks(2)
def test_all_gather_of_matrices_stacks_or_concatenates(world, group, backend):
    mine = sample(world.rank).view(2, 3)
    both = torch.stack(everyone(2)).view(2, 2, 3)
    # gloo has only the first of the two.
    for shape in ((4, 3), (2, 2, 3)) if backend == "shm" else ((4, 3),):
        output = torch.empty(shape)
        dist.all_gather_into_tensor(output, mine, group=group)
        assert same(output.view(2, 2, 3), both)


@only_shm
@pytest.mark.ranks(3)
def test_all_gather_of_uneven_sizes(world, group):
    outputs = [torch.empty(rank, 2) for rank in range(3)]
    dist.all_gather(outputs, torch.full((world.rank, 2), float(world.rank)), group=group)
    assert [output.tolist() for output in outputs] == [[], [[1.0, 1.0]], [[2.0, 2.0]] * 2]


@pytest.mark.ranks(2)
def test_all_gather_coalesced_keeps_lists_apart(world, group):
    mine = [sample(world.rank), sample(world.rank, torch.float32, 3) * 10]
    outputs = [[torch.empty(6), torch.empty(3)] for _ in range(2)]
    dist.all_gather_coalesced(outputs, mine, group=group)
    for rank, (first, second) in enumerate(outputs):
        assert same(first, sample(rank))
        assert same(second, sample(rank, torch.float32, 3) * 10)


@pytest.mark.ranks(2)
def test_all_reduce_coalesced_sums_each(world, group):
    tensors = [torch.full((2,), world.rank + 1.0), torch.full((3, 1), world.rank * 10.0)]
    dist.all_reduce_coalesced(tensors, group=group)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0], [[10.0]] * 3]


@only_shm
@pytest.mark.ranks(2)
def test_all_reduce_coalesced_of_two_dtypes_sums_each(world, group):
    tensors = [torch.full((2,), world.rank + 1.0), torch.full((3,), world.rank + 1)]
    group.allreduce_coalesced(tensors).wait()  # `dist.all_reduce_coalesced` wants one dtype
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0], [3, 3, 3]]


@only_shm
@pytest.mark.ranks(2)
def test_coalesced_collectives_of_two_dtypes_move_each(world, group):
    pieces = [torch.full((1,), world.rank + 1.0), torch.full((2,), world.rank + 1)]
    wholes = [torch.empty(2), torch.empty(4, dtype=torch.int64)]
    group.all_gather_single_coalesced(wholes, pieces).wait()
    assert [whole.tolist() for whole in wholes] == [[1.0, 2.0], [1, 1, 2, 2]]
    group.reduce_scatter_single_coalesced(pieces, wholes).wait()
    assert [piece.tolist() for piece in pieces] == ([[2.0], [2, 2]], [[4.0], [4, 4]])[world.rank]


@only_shm
@pytest.mark.ranks(2)
def test_all_reduce_coalesced_scales_each_before_the_sum(world, group):
    tensors = [torch.full((2,), world.rank + 1.0), torch.full((1,), 10.0)]
    dist.all_reduce_coalesced(tensors, dist._make_nccl_premul_sum(0.5), group=group)
    assert [tensor.tolist() for tensor in tensors] == [[1.5, 1.5], [10.0]]


@pytest.mark.ranks(3)
def test_reduce_scatter_of_a_list(world, group):
    output = torch.empty(6)
    dist.reduce_scatter(output, [sample(world.rank) * (to + 1) for to in range(3)], group=group)
    assert same(output, sum(everyone(3)) * (world.rank + 1))


@pytest.mark.ranks(3)
def test_reduce_scatter_tensor(world, group, backend):
    for shape in ((2,), (1, 2)) if backend == "shm" else ((1, 2),):
        output = torch.empty(shape)
        dist.reduce_scatter_tensor(output, sample(world.rank).view(3, 2), group=group)
        assert same(output.view(2), sum(everyone(3)).view(3, 2)[world.rank])


@only_shm
@pytest.mark.ranks(3)
def test_reduce_scatter_of_uneven_sizes(world, group):
    inputs = [torch.full((to,), world.rank + 1.0) for to in range(3)]
    output = torch.empty(world.rank)
    dist.reduce_scatter(output, inputs, group=group)
    assert output.tolist() == [6.0] * world.rank


@pytest.mark.ranks(2)
def test_all_to_all_of_lists_of_different_sizes(world, group, backend):
    inputs = [torch.full((world.rank + 2 * to,), float(world.rank)) for to in range(2)]
    outputs = [torch.empty(source + 2 * world.rank) for source in range(2)]
    if backend == "shm":
        dist.all_to_all(outputs, inputs, group=group)
    else:
        _all_to_all(outputs, inputs, group)
    assert [output.tolist() for output in outputs] == [
        [float(source)] * (source + 2 * world.rank) for source in range(2)
    ]


def _all_to_all(outputs, inputs, group):
    """Do on gloo, which does not have all_to_all of lists, the same with splits."""
    joined = torch.cat(outputs)
    sizes = ([output.numel() for output in outputs], [each.numel() for each in inputs])
    dist.all_to_all_single(joined, torch.cat(inputs), *sizes, group=group)
    for output, piece in zip(outputs, joined.split(sizes[0]), strict=True):
        output.copy_(piece)


@pytest.mark.ranks(3)
def test_all_to_all_single_with_splits_of_rows(world, group):
    rows = [(source + to) % 3 for source in [world.rank] for to in range(3)]
    received = [(source + world.rank) % 3 for source in range(3)]
    mine = torch.arange(3.0)[:, None].repeat_interleave(torch.tensor(rows), 0).expand(-1, 2) + 10 * world.rank
    output = torch.empty(sum(received), 2)
    dist.all_to_all_single(output, mine.contiguous(), received, rows, group=group)
    expected = [10.0 * source + world.rank for source in range(3) for _ in range(received[source])]
    assert output.tolist() == [[value] * 2 for value in expected]


@pytest.mark.ranks(3)
def test_reduce_leaves_the_sum_at_the_root(world, group):
    tensor = sample(world.rank)
    dist.reduce(tensor, 1, group=group)
    if world.rank == 1:
        assert same(tensor, sum(everyone(3)))


@only_shm
@pytest.mark.ranks(2)
def test_reduce_leaves_the_others_input_alone(world, group):
    tensor = sample(world.rank)
    dist.reduce(tensor, 1, group=group)
    assert same(tensor, sum(everyone(2)) if world.rank == 1 else sample(0))


@pytest.mark.ranks(2)
def test_object_collectives(world, group):
    values = [None] * 2
    dist.all_gather_object(values, {"rank": world.rank, "text": "x" * world.rank}, group=group)
    assert values == [{"rank": 0, "text": ""}, {"rank": 1, "text": "x"}]
    sent = [["list"], {"of": "rank 1"}] if world.rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1, group=group)
    assert sent == [["list"], {"of": "rank 1"}]
    gathered = [None] * 2 if world.rank == 0 else None
    dist.gather_object(world.rank * "a", gathered, dst=0, group=group)
    assert gathered == (["", "a"] if world.rank == 0 else None)
    received = [None]
    dist.scatter_object_list(received, [1, "two"] if world.rank == 0 else None, src=0, group=group)
    assert received == [1 if world.rank == 0 else "two"]


@pytest.mark.ranks(2)
def test_object_point_to_point(world, group):
    if world.rank == 0:
        dist.send_object_list([{"a": 1}, None], 1, group=group)
    else:
        received = [None, None]
        dist.recv_object_list(received, 0, group=group)
        assert received == [{"a": 1}, None]


@pytest.mark.ranks(2)
def test_barrier_waits_for_the_last_rank(world, group):
    store = dist.PrefixStore("barrier", dist.distributed_c10d._get_default_store())
    for turn in range(4):
        if world.rank == turn % 2:
            store.set(f"{turn}", "set before the barrier")
        dist.barrier(group=group)
        assert store.check([f"{turn}"])


@pytest.mark.ranks(3)
def test_monitored_barrier_of_the_group_lets_all_pass(world, group, backend):
    store = dist.PrefixStore(f"monitored on {backend}", dist.distributed_c10d._get_default_store())
    if world.rank == 1:
        store.set("last", "set before the barrier")
    # `dist.monitored_barrier` compares the backend's name with "gloo"; the group's method is what it calls.
    if backend == "shm":
        group.monitored_barrier()
    else:
        dist.monitored_barrier(group=group)
    assert store.check(["last"])


@pytest.mark.ranks(1)
def test_a_world_of_one(world, group):
    tensor = sample(0)
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, 0, group=group)
    dist.all_gather_into_tensor(output := torch.empty(6), tensor, group=group)
    dist.reduce_scatter_tensor(tensor, output, group=group)
    dist.barrier(group=group)
    assert same(tensor, sample(0))


@pytest.mark.ranks(4)
def test_four_ranks(world, group):
    tensor = sample(world.rank)
    dist.all_reduce(tensor, group=group)
    assert same(tensor, sum(everyone(4)))
    output = torch.empty(24)
    dist.all_gather_into_tensor(output, sample(world.rank), group=group)
    assert same(output, torch.cat(everyone(4)))
    dist.all_to_all_single(output, torch.cat(everyone(4)), group=group)
    assert same(output, sample(world.rank).repeat(4))


# memory


@only_shm
@pytest.mark.ranks(2)
def test_inputs_with_even_gaps_and_expanded_ones(world, group):
    mine, both = sample(world.rank), everyone(2)
    for apart in (lambda one: torch.stack([one, one], -1)[..., 0], lambda one: one[:1].expand(6)):
        output = torch.zeros(12)
        dist.all_gather_into_tensor(output, apart(mine), group=group)
        assert same(output, torch.cat([apart(one) for one in both]))
        piece = torch.zeros(3)
        dist.reduce_scatter_tensor(piece, apart(mine), group=group)
        assert same(piece, sum(map(apart, both)).view(2, 3)[world.rank])
        dist.all_to_all_single(piece := torch.zeros(6), apart(mine), group=group)
        assert same(piece, torch.cat([apart(one).view(2, 3)[world.rank] for one in both]))
        lent = group.allocate(12, torch.float32).copy_(mine.repeat_interleave(2))
        dist.reduce_scatter_tensor(piece := torch.zeros(3), lent[::2], group=group)
        assert same(piece, sum(both).view(2, 3)[world.rank])


@only_shm  # gloo sums whatever lies in between
@pytest.mark.ranks(2)
def test_tensors_that_are_not_contiguous(world, group):
    tensor = torch.zeros(3, 4)[:, ::2]
    tensor.copy_(sample(world.rank).view(3, 2))
    dist.all_reduce(tensor, group=group)
    assert same(tensor.reshape(-1), sum(everyone(2)))
    dist.broadcast(turned := sample(world.rank).view(2, 3).T, 1, group=group)
    assert same(turned, sample(1).view(2, 3).T)
    outputs = list(torch.zeros(6, 2).unbind(1))
    dist.all_gather(outputs, sample(world.rank), group=group)
    assert all(map(same, outputs, everyone(2)))
    output = torch.zeros(12, 2)[:, 0]
    dist.all_gather_into_tensor(output, sample(world.rank), group=group)
    assert same(output, torch.cat(everyone(2)))
    scattered = torch.zeros(3, 2)[:, 1]
    dist.reduce_scatter_tensor(scattered, sample(world.rank).view(3, 2).T.reshape(6), group=group)
    assert same(scattered, sum(everyone(2)).view(3, 2).T.reshape(6)[world.rank * 3 :][:3])


@pytest.mark.ranks(2)
def test_outputs_that_are_views_leave_their_neighbours_alone(world, group):
    memory = torch.full((16,), -1.0)
    dist.all_gather_into_tensor(memory[2:14], sample(world.rank), group=group)
    assert memory[[0, 1, 14, 15]].tolist() == [-1.0] * 4
    assert same(memory[2:14], torch.cat(everyone(2)))


@pytest.mark.ranks(2)
def test_all_gather_in_place(world, group):
    output = torch.zeros(12)
    mine = output.view(2, 6)[world.rank]
    mine.copy_(sample(world.rank))
    dist.all_gather_into_tensor(output, mine, group=group)
    assert same(output, torch.cat(everyone(2)))


@only_shm
@pytest.mark.ranks(2)
def test_reduce_scatter_in_place(world, group):
    full = sample(world.rank)
    dist.reduce_scatter_tensor(full.view(2, 3)[world.rank], full, group=group)
    assert same(full.view(2, 3)[world.rank], sum(everyone(2)).view(2, 3)[world.rank])


@only_shm
@pytest.mark.ranks(2)
def test_all_to_all_in_place(world, group):
    full = sample(world.rank)
    dist.all_to_all_single(full, full, group=group)
    assert same(full, torch.cat([piece.view(2, 3)[world.rank] for piece in everyone(2)]))


@pytest.mark.ranks(2)
def test_the_input_may_be_overwritten_after_a_synchronous_call(world, group):
    tensor, output = sample(world.rank), torch.empty(12)
    for turn in range(20):
        dist.all_gather_into_tensor(output, tensor, group=group)
        tensor += 1
        assert same(output, torch.cat(everyone(2)) + turn)


@pytest.mark.ranks(2)
def test_tensors_without_elements(world, group):
    empty = torch.empty(0, 3)
    dist.all_reduce(empty, group=group)
    dist.broadcast(empty, 0, group=group)
    dist.all_gather([torch.empty(0, 3), torch.empty(0, 3)], empty, group=group)
    dist.all_gather_into_tensor(torch.empty(0, 3), empty, group=group)
    dist.reduce_scatter_tensor(torch.empty(0, 3), empty, group=group)
    dist.all_to_all_single(torch.empty(0, 3), empty, group=group)
    dist.all_reduce(one := torch.ones(1), group=group)
    assert one.item() == 2


@pytest.mark.ranks(2)
def test_a_scalar_has_one_element(world, group):
    dist.all_reduce(scalar := torch.tensor(world.rank + 1.0), group=group)
    assert scalar == torch.tensor(3.0)


@pytest.mark.ranks(2)
def test_sizes_that_grow_and_shrink(world, group):
    for numel in (1, 100_000, 3, 1_000_000, 10):
        tensor = torch.full((numel,), world.rank + 1.0)
        dist.all_reduce(tensor, group=group)
        assert tensor.min() == tensor.max() == 3.0
