"""Random sequences of collectives and messages: shm gives bit for bit what gloo gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.torch_version import TorchVersion

import lockstep.shm  # noqa: F401  registers the backend
from suites.selftest.shm.samples import INTEGERS, LOW, REAL

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning")

DTYPES = (*LOW, *REAL, *INTEGERS, torch.bool)
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")
COLUMNS = (0, 1, 3, 40, 1500)
"""5 rows of 1,500 elements are too large for the memory beside a header, which 40 fit."""
LAYOUTS = ("plain", "transposed", "gaps", "every other row", "behind a byte")
EXAMPLES = 150
"""Where no profile asks for more. Of the smaller groups of three ranks, half have two or all of them."""


@dataclass(frozen=True)
class Call:
    """A collective or a message of a sequence.

    Attributes:
        kind: name of its function below.
        group: 0 is that of all ranks, 1 a smaller one.
        layouts: of the input and of the output on shm. gloo gets contiguous tensors: it reads others wrongly.
        root: rank in the group, modulo its size; of a message the sender.
        splits: rows that ranks send to each other, modulo their number.
        is_async: whether it is waited for at the end of the sequence.
        seed: of the values.
    """

    kind: str
    group: int
    dtype: torch.dtype
    rows: int
    columns: int
    layouts: tuple[str, str]
    reduction: str
    root: int
    splits: tuple[int, ...]
    is_async: bool
    seed: int


@dataclass(frozen=True)
class Place:
    """A group of one backend, as a call uses it.

    Attributes:
        ranks: members of the group by their rank in the world.
        index: this rank in the group.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


def values(call: Call, index: int, rows: int, reduces: bool = False) -> Tensor:
    """Return the input of a rank: any bits where they are only moved.

    Whole numbers are reduced: their sums and products are exact in every dtype. shm adds fp16 and bf16 in
    fp32, in rank order, and gloo in the dtype, in an order of its own: others would differ by rounding.
    """
    generator = torch.Generator().manual_seed(call.seed * 16 + index)
    shape = (rows, call.columns)
    if reduces or call.dtype is torch.bool:
        low = -2 if call.dtype.is_signed else 0
        return torch.randint(low, 4, shape, generator=generator).to(call.dtype)
    nbytes = rows * call.columns * call.dtype.itemsize
    flat = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return flat.view(call.dtype).view(shape)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values in other memory."""
    match layout:
        case "transposed":
            return tensor.t().contiguous().t()
        case "gaps":
            return torch.stack([tensor, tensor], -1)[..., 0]
        case "every other row":
            return torch.stack([tensor, tensor], 1).flatten(0, 1)[::2]
        case "behind a byte":
            whole = torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])
            return whole[1:].view(tensor.shape)
    return tensor.clone()


class Tensors:
    """The inputs and outputs of a call on one rank and one backend."""

    def __init__(self, call: Call, place: Place) -> None:
        self.call, self.place = call, place
        self.reduces = "reduce" in call.kind

    def given(self, rows: int | None = None, index: int | None = None) -> Tensor:
        """Return an input of this rank, or of another one."""
        rows = self.call.rows if rows is None else rows
        index = self.place.index if index is None else index
        return laid_out(values(self.call, index, rows, self.reduces), self.call.layouts[0])

    def filled(self, rows: int | None = None) -> Tensor:
        """Return an output."""
        rows = self.call.rows if rows is None else rows
        return laid_out(torch.zeros(rows, self.call.columns, dtype=self.call.dtype), self.call.layouts[1])

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        names = BITWISE if self.call.reduction in BITWISE and self.call.dtype in INTEGERS else REDUCTIONS
        name = self.call.reduction if self.call.reduction in names else "SUM"
        return getattr(dist.ReduceOp, name)  # type: ignore[no-any-return]

    @property
    def root(self) -> int:
        return self.place.ranks[self.call.root % self.place.size]

    @property
    def is_root(self) -> bool:
        return self.place.index == self.call.root % self.place.size

    def splits(self) -> tuple[list[int], list[int]]:
        """Return the rows that this rank sends to each other one, and that it receives."""
        size, mine = self.place.size, self.place.index
        drawn = [self.call.splits[at % len(self.call.splits)] for at in range(size * size)]
        return drawn[mine * size : (mine + 1) * size], drawn[mine::size]

    @property
    def options(self) -> dict[str, object]:
        return {"group": self.place.group, "async_op": self.call.is_async}


Started = tuple[list[Tensor], dist.Work | None]


def all_reduce(t: Tensors) -> Started:
    tensor = t.given()
    return [tensor], dist.all_reduce(tensor, t.op, **t.options)


def reduce(t: Tensors) -> Started:
    tensor = t.given()
    return [tensor] if t.is_root else [], dist.reduce(tensor, t.root, t.op, **t.options)


def broadcast(t: Tensors) -> Started:
    tensor = t.given()
    return [tensor], dist.broadcast(tensor, t.root, **t.options)


def all_gather(t: Tensors) -> Started:
    outputs = [t.filled() for _ in t.place.ranks]
    return outputs, dist.all_gather(outputs, t.given(), **t.options)


def all_gather_into_tensor(t: Tensors) -> Started:
    output = t.filled(t.call.rows * t.place.size)
    return [output], dist.all_gather_into_tensor(output, t.given(), **t.options)


def reduce_scatter(t: Tensors) -> Started:
    output = t.filled()
    inputs = [t.given(index=t.place.index + 4 * to) for to in range(t.place.size)]
    return [output], dist.reduce_scatter(output, inputs, t.op, **t.options)


def reduce_scatter_tensor(t: Tensors) -> Started:
    output = t.filled()
    return [output], dist.reduce_scatter_tensor(
        output, t.given(t.call.rows * t.place.size), t.op, **t.options
    )


def gather(t: Tensors) -> Started:
    outputs = [t.filled() for _ in t.place.ranks] if t.is_root else None
    return outputs or [], dist.gather(t.given(), outputs, t.root, **t.options)


def scatter(t: Tensors) -> Started:
    output = t.filled()
    inputs = [t.given(index=to) for to in range(t.place.size)] if t.is_root else None
    return [output], dist.scatter(output, inputs, t.root, **t.options)


def all_to_all(t: Tensors) -> Started:
    outputs = [t.filled() for _ in t.place.ranks]  # gloo wants all of one size
    inputs = [t.given(index=t.place.index + 4 * to) for to in range(t.place.size)]
    return outputs, dist.all_to_all(outputs, inputs, **t.options)


def all_to_all_single(t: Tensors) -> Started:
    sends, receives = t.splits()
    output = t.filled(sum(receives))
    return [output], dist.all_to_all_single(output, t.given(sum(sends)), receives, sends, **t.options)


def message(t: Tensors) -> Started:
    """Send from the root to the next rank of the group."""
    to = t.place.ranks[(t.call.root + 1) % t.place.size]
    if t.is_root:
        tensor = t.given()
        if t.call.is_async:
            return [], dist.isend(tensor, to, group=t.place.group)
        return [], dist.send(tensor, to, group=t.place.group)  # type: ignore[func-returns-value]
    if t.place.ranks[t.place.index] != to:
        return [], None
    output = t.filled()
    if t.call.is_async:
        return [output], dist.irecv(output, t.root, group=t.place.group)
    dist.recv(output, t.root, group=t.place.group)
    return [output], None


def barrier(t: Tensors) -> Started:
    return [], dist.barrier(**t.options)


KINDS: dict[str, Callable[[Tensors], Started]] = {
    one.__name__: one
    for one in (
        *(all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter),
        *(reduce_scatter_tensor, gather, scatter, all_to_all, all_to_all_single, message, barrier),
    )
}
if TorchVersion(torch.__version__) < "2.12":
    del KINDS["all_to_all"]  # gloo does not have it


def dtypes_of(kind: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a kind: gloo adds the bytes of truth values, so that a sum of them is no bool."""
    return DTYPES[:-1] if "reduce" in kind else DTYPES


CALLS = st.builds(
    Call,
    kind=st.sampled_from(sorted(KINDS)),
    group=st.integers(0, 1),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(0, 5),
    columns=st.sampled_from(COLUMNS),
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    reduction=st.sampled_from([*REDUCTIONS, *BITWISE]),
    root=st.integers(0, 5),
    splits=st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple),
    is_async=st.booleans(),
    seed=st.integers(0, 999),
).map(lambda call: call if call.dtype in dtypes_of(call.kind) else replace(call, dtype=torch.uint8))


def play(calls: Sequence[Call], places: Sequence[Place | None], order: random.Random) -> list[list[Tensor]]:
    """Make the calls in order, wait for those that are asynchronous in any order, and return the outputs."""
    results: list[list[Tensor]] = []
    works: list[dist.Work] = []
    for call in calls:
        place = places[call.group]
        if call.kind == "message" and place is not None and place.size == 1:
            place = None
        outputs, work = KINDS[call.kind](Tensors(call, place)) if place is not None else ([], None)
        results.append(outputs)
        works += [work] if work is not None else []
    order.shuffle(works)
    for work in works:
        work.wait()
    return results


@contextmanager
def places_of(world: object, backend: str, members: Sequence[int]) -> Iterator[list[Place | None]]:
    """Make the group of all ranks and a smaller one; the place is None where this rank is not in it.

    Of gloo the world has one of all ranks.
    """
    places: list[Place | None] = []
    made: list[dist.ProcessGroup] = []
    for ranks in (range(world.size), members):
        if backend == "gloo" and len(ranks) == world.size:
            group = dist.group.WORLD
        else:
            made.append(group := dist.new_group(list(ranks), backend=backend))
        places.append(Place(group, list(ranks), ranks.index(world.rank)) if world.rank in ranks else None)
    dist.barrier()  # a rank that ends a group of gloo while another still connects would fail that one
    yield places
    for group in made:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, by which NaN is equal to itself."""
    return tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1)).view(torch.uint8)


@pytest.mark.ranks(3, backend="gloo", timeout=600)
@settings(
    max_examples=settings.default.max_examples if settings.default.max_examples > 100 else EXAMPLES,
    deadline=None,
)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=10),
    members=st.sets(st.integers(0, 2), min_size=1).map(sorted),
    order=st.integers(0, 999),
)
def test_shm_gives_what_gloo_gives(world, calls, members, order):
    ranks = [rank for rank in members if rank < world.size] or [world.size - 1]
    with places_of(world, "shm", ranks) as places:
        got = play(calls, places, random.Random(order * 8 + world.rank))
    plain = [replace(call, layouts=("plain", "plain")) for call in calls]
    with places_of(world, "gloo", ranks) as places:
        expected = play(plain, places, random.Random(order * 8 + world.rank))
    for call, (ours, theirs) in zip(calls, zip(got, expected, strict=True), strict=True):
        assert [one.shape for one in ours] == [one.shape for one in theirs], call
        assert all(map(torch.equal, map(bits, ours), map(bits, theirs))), f"{call}: {ours}, gloo: {theirs}"
