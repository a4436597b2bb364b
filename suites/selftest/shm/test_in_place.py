"""Collectives in which a rank reads the contributions of its peers where they lie."""

import pytest
import torch
import torch.distributed as dist

from lockstep.shm import CollectiveMismatch

pytestmark = pytest.mark.ranks(2, backend="shm")


def of(rank, numel):
    return torch.arange(float(numel)) + 100 * rank


@pytest.mark.parametrize("numel", [0, 4, 40_000])
@pytest.mark.parametrize("allocated", [False, True])
def test_a_gather_shows_all_contributions_in_rank_order(world, numel, allocated):
    mine, group, seen = of(world.rank, numel), dist.group.WORLD, []
    if allocated:
        mine = group.allocate(numel, torch.float32).copy_(mine)
    work = group.all_gather_views(mine, lambda parts: seen.extend(part.clone() for part in parts))
    assert not seen
    work.wait()
    assert [part.tolist() for part in seen] == [of(rank, numel).tolist() for rank in range(2)]


@pytest.mark.parametrize("numel", [0, 4, 40_000])
def test_a_reduction_shows_the_pieces_of_this_rank(world, numel):
    seen = []
    work = dist.group.WORLD.reduce_scatter_views(
        of(world.rank, 2 * numel), lambda parts: seen.extend(part.clone() for part in parts)
    )
    work.wait()
    piece = slice(world.rank * numel, (world.rank + 1) * numel)
    assert [part.tolist() for part in seen] == [of(rank, 2 * numel)[piece].tolist() for rank in range(2)]


def test_reads_of_several_calls_come_in_any_order(world):
    seen = {}
    works = [
        dist.group.WORLD.all_gather_views(
            of(world.rank, 3) + number, lambda parts, n=number: seen.update({n: [p.tolist() for p in parts]})
        )
        for number in range(3)
    ]
    for work in works if world.rank else reversed(works):
        work.wait()
    assert seen == {n: [(of(rank, 3) + n).tolist() for rank in range(2)] for n in range(3)}


def test_a_peer_may_give_all_gather_an_output_instead(world):
    group, seen = dist.group.WORLD, []
    if world.rank:
        group.all_gather_views(of(1, 2), lambda parts: seen.extend(torch.cat(list(parts)).tolist())).wait()
    else:
        output = torch.empty(4)
        group.all_gather_single(output, of(0, 2)).wait()
        seen.extend(output.tolist())
    assert seen == [0.0, 1.0, 100.0, 101.0]


def test_other_sizes_are_a_mismatch_that_nothing_reads(world):
    seen = []
    with pytest.raises(CollectiveMismatch, match=r"all_gather_single of 2 float32.*of 3 float32|of 3.*of 2"):
        dist.group.WORLD.all_gather_views(of(0, 2 + world.rank), seen.append).wait()
    assert not seen


def test_an_error_of_the_reader_is_raised_by_the_wait(world):
    def fails(parts):
        raise ZeroDivisionError("of the reader")

    with pytest.raises(ZeroDivisionError, match="of the reader"):
        dist.group.WORLD.all_gather_views(of(world.rank, 2), fails).wait()
    dist.barrier()
