"""Collectives of three ranks in one process: their values, and calls that do not fit."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from lockstep.shm.collectives import Collectives, aligned, flat, of, starts
from lockstep.shm.errors import CollectiveMismatch, OutOfSharedMemory
from lockstep.shm.memory import Segment
from lockstep.shm.operation import Operation
from lockstep.shm.record import Entry, recorder
from suites.selftest.shm.ends import meet_all


def piece(*numels: int, first: float = 0.0, step: int = 1) -> torch.Tensor:
    """Return numbers from one on in a shape, or in every second place of memory."""
    whole = torch.arange(math.prod(numels), dtype=torch.float32).view(numels) + first
    return torch.stack([whole, whole], -1)[..., 0] if step == 2 else whole


def complete(begun: Sequence[Operation]) -> None:
    for operation in begun:
        operation.complete()
        assert operation.entry.completed


@pytest.fixture
def three() -> Iterator[list[Collectives]]:
    ends = [Collectives(channel) for channel in meet_all(3)]
    yield ends
    assert not any(end.pending for end in ends)
    for end in ends:
        end.channel.leave(0)


either = pytest.mark.parametrize(
    ("numel", "step"),
    [(4, 1), (4, 2), (30_000, 1), (30_000, 2)],
    ids=["short", "short-strided", "long", "long-strided"],
)


@either
def test_each_rank_has_the_tensors_of_all(three: list[Collectives], numel: int, step: int) -> None:
    inputs = [piece(numel, first=10.0 * rank, step=step) for rank in range(3)]
    outputs = [piece(3, numel, step=step) for _ in three]
    complete(
        [
            end.all_gather_single(*each)
            for end, each in zip(three, zip(outputs, inputs, strict=True), strict=True)
        ]
    )
    assert all(output.equal(torch.stack(inputs)) for output in outputs)
    uneven = [piece(numel + rank, first=10.0 * rank, step=step) for rank in range(3)]
    lists = [[piece(numel + rank, first=-9.0, step=step) for rank in range(3)] for _ in three]
    complete([end.all_gather(lists[end.rank], uneven[end.rank]) for end in three])
    assert all(got.equal(uneven[rank]) for each in lists for rank, got in enumerate(each))
    for root in range(3):
        lists[root] = [piece(numel, first=-9.0, step=step) for _ in three]
        complete(
            [end.gather(lists[root] if end.rank == root else [], inputs[end.rank], root) for end in three]
        )
        assert all(got.equal(inputs[rank]) for rank, got in enumerate(lists[root]))


@pytest.mark.parametrize("numel", [4, 30_000])
@pytest.mark.parametrize("is_lent", [False, True], ids=["own", "lent"])
def test_a_rank_may_gather_into_the_tensor_that_its_own_is_part_of(
    three: list[Collectives], numel: int, is_lent: bool
) -> None:
    outputs = [
        end.channel.allocate(3 * numel, torch.float32) if is_lent else torch.empty(3 * numel) for end in three
    ]
    for rank, output in enumerate(outputs):
        output.fill_(-1)
        output[rank * numel : (rank + 1) * numel] = piece(numel, first=rank)
    complete(
        [end.all_gather_single(o, o.view(3, -1)[end.rank]) for end, o in zip(three, outputs, strict=True)]
    )
    expected = torch.cat([piece(numel, first=rank) for rank in range(3)])
    assert all(output.equal(expected) for output in outputs)
    inputs = [end.channel.allocate(numel, torch.float32).fill_(end.rank) for end in three]
    complete([end.all_gather_single(outputs[end.rank], inputs[end.rank]) for end in three])
    assert all(output.view(3, -1).amax(1).tolist() == [0.0, 1.0, 2.0] for output in outputs)


@either
def test_each_rank_has_the_sum_or_its_part(three: list[Collectives], numel: int, step: int) -> None:
    def inputs(*shape: int) -> list[torch.Tensor]:
        return [piece(*shape, first=10.0 * rank, step=step) for rank in range(3)]

    total = sum(inputs(numel))
    tensors = inputs(numel)
    complete([end.all_reduce(tensors[end.rank], 0) for end in three])
    assert all(tensor.equal(total) for tensor in tensors)
    for root in range(3):
        tensors = inputs(numel)
        complete([end.reduce(tensors[end.rank], root, 0) for end in three])
        for rank, (tensor, before) in enumerate(zip(tensors, inputs(numel), strict=True)):
            assert tensor.equal(total if rank == root else before)
    whole, outputs = inputs(3, numel), [piece(numel, step=step) for _ in three]
    complete([end.reduce_scatter_single(outputs[end.rank], whole[end.rank], 0) for end in three])
    assert torch.stack(outputs).equal(sum(inputs(3, numel)))
    assert all(map(torch.equal, whole, inputs(3, numel)))
    lists = [[piece(numel + place, first=10.0 * rank, step=step) for place in range(3)] for rank in range(3)]
    outputs = [piece(numel + rank, step=step) for rank in range(3)]
    complete([end.reduce_scatter(outputs[end.rank], lists[end.rank], 0) for end in three])
    for place, output in enumerate(outputs):
        assert output.equal(sum(of_rank[place] for of_rank in lists))


@either
def test_each_rank_has_what_the_root_has_for_it(three: list[Collectives], numel: int, step: int) -> None:
    for root in range(3):
        tensors = [piece(numel, first=10.0 * rank, step=step) for rank in range(3)]
        complete([end.broadcast(tensors[end.rank], root) for end in three])
        assert all(tensor.equal(piece(numel, first=10.0 * root)) for tensor in tensors)
        parts = [piece(numel, first=20.0 * rank, step=step) for rank in range(3)]
        outputs = [piece(numel, first=-9.0, step=step) for _ in three]
        complete([end.scatter(outputs[end.rank], parts if end.rank == root else [], root) for end in three])
        assert all(map(torch.equal, outputs, parts))


@either
def test_each_rank_has_what_all_have_for_it(three: list[Collectives], numel: int, step: int) -> None:
    def sent(a: int, b: int) -> torch.Tensor:
        return piece(numel * ((a + b) % 3), first=10.0 * a + b, step=step)

    outputs = [[piece(sent(a, b).numel(), first=-9.0, step=step) for a in range(3)] for b in range(3)]
    complete([end.all_to_all(outputs[end.rank], [sent(end.rank, b) for b in range(3)]) for end in three])
    assert all(got.equal(sent(a, b)) for b, each in enumerate(outputs) for a, got in enumerate(each))
    rows = [piece(3, numel, first=100.0 * rank, step=step) for rank in range(3)]
    got = [piece(3, numel, first=-9.0, step=step) for _ in three]
    complete([end.all_to_all_single(got[end.rank], rows[end.rank], [], []) for end in three])
    assert all(each.equal(torch.stack([row[rank] for row in rows])) for rank, each in enumerate(got))
    got = [piece(sum((rank + a) % 3 for a in range(3)), numel, first=-9.0, step=step) for rank in range(3)]
    counts = [[(rank + other) % 3 for other in range(3)] for rank in range(3)]
    complete(
        [
            end.all_to_all_single(got[end.rank], rows[end.rank], counts[end.rank], counts[end.rank])
            for end in three
        ]
    )
    for rank, each in enumerate(got):
        assert each.equal(torch.cat([rows[a].split(counts[a])[rank] for a in range(3)]))


def test_a_tensor_without_elements_is_exchanged_too(three: list[Collectives]) -> None:
    tensors = [torch.empty(0, 2) for _ in three]
    complete([end.all_reduce(tensors[end.rank], 0) for end in three])
    complete([end.all_to_all_single(tensors[end.rank], tensors[end.rank], [0] * 3, [0] * 3) for end in three])
    complete([end.broadcast(tensors[end.rank], 1) for end in three])
    complete([end.barrier() for end in three])
    assert [(tensor.shape, tensor.dtype) for tensor in tensors] == [((0, 2), torch.float32)] * 3
    assert [len(end.pending) for end in three] == [0] * 3


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_the_group_does_not_have_is_refused(three: list[Collectives], root: int) -> None:
    end, tensor = three[0], torch.ones(1)
    calls: dict[str, Callable[[], object]] = {
        "reduce": lambda: end.reduce(tensor, root, 0),
        "broadcast": lambda: end.broadcast(tensor, root),
        "gather": lambda: end.gather([], tensor, root),
        "scatter": lambda: end.scatter(tensor, [], root),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name}.* {root}"):
            call()
    assert end.channel.next_number == 0


def test_all_pieces_that_do_not_fit_are_named(three: list[Collectives]) -> None:
    sends = [[1, 1, 1], [1, 1, 2], [3, 1, 1]]
    begun = [
        end.all_to_all_single(torch.ones(3), torch.ones(sum(sends[end.rank])), [1, 1, 1], sends[end.rank])
        for end in three
    ]
    one, two, last = (f"rank {rank} (pid {os.getpid()})" for rank in range(3))
    for operation in begun:
        with pytest.raises(CollectiveMismatch) as error:
            operation.complete()
        assert str(error.value) == (
            "all_to_all_single of float32 (#1) of group g: "
            f"{two} sends 2 elements to {last}, which expects 1; "
            f"{last} sends 3 elements to {one}, which expects 1"
        )


def test_a_call_without_memory_is_over_on_all_ranks(
    three: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(nbytes: int, what: object) -> Segment:
        raise OutOfSharedMemory(f"{what}: none")

    begun = [end.all_reduce(torch.ones(30_000), 0) for end in three[1:]]
    entries: list[Entry] = []
    with monkeypatch.context() as patched:
        patched.setattr(three[0].channel.arena, "take", take)
        patched.setattr(recorder, "add", entries.append)
        with pytest.raises(OutOfSharedMemory, match=r"\Aall_reduce \(SUM\) of 30000 float32 \(#1\): none\Z"):
            three[0].all_reduce(torch.ones(30_000), 0)
    assert [bool(entry.completed) for entry in entries] == [True]
    for operation in begun:
        with pytest.raises(OutOfSharedMemory, match=r"rank 0 .* could not take part"):
            operation.complete()
    assert all(three[1].channel.is_read(peer, 0, 0) for peer in three[1].channel.others)
    complete([end.barrier() for end in three])


def test_sizes_keep_what_follows_at_a_multiple_of_64() -> None:
    assert [aligned(nbytes) for nbytes in (0, 1, 63, 64, 65, 128)] == [0, 64, 64, 64, 128, 128]
    assert starts([]) == [0]
    assert starts([torch.ones(1), torch.ones(16), torch.ones(17)]) == [0, 64, 128, 256]
    whole = torch.ones(2, 3)
    assert flat(whole).data_ptr() == whole.data_ptr()
    assert flat(whole).shape == flat(whole.T).shape == (6,)
    assert flat(whole[:, 0]).data_ptr() != whole.data_ptr()
    handed = of(whole)
    assert (handed.nbytes, handed.at, handed.note, handed.also_to) == (24, whole.data_ptr(), b"", 0)
    assert of(whole.T).at == 0
