"""The process group by its methods, on two ranks of one process, and calls that a function intercepts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.shm import process_group
from lockstep.shm.errors import CollectiveTimeout, GroupAborted, ShmError
from lockstep.shm.interception import _METHODS, intercept
from lockstep.shm.peer import LEFT, PRESENT
from lockstep.shm.process_group import ShmProcessGroup, abort_all, create
from lockstep.shm.work import ShmWork

SECONDS = datetime.timedelta(seconds=20)
LATER = SimpleNamespace(asyncOp=True, reduceOp=None)
NOW = SimpleNamespace(asyncOp=False, reduceOp=None)


def on_both(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def options(store: dist.Store, rank: int, timeout: object = SECONDS) -> SimpleNamespace:
    return SimpleNamespace(
        store=store, group_rank=rank, group_size=2, timeout=timeout, group_id="g", asyncOp=True
    )


@pytest.fixture
def groups() -> Iterator[list[ShmProcessGroup]]:
    store = dist.HashStore()
    made = on_both(lambda rank: create(options(store, rank), None))
    yield made
    for group in made:
        group._channel.leave(0)


def test_a_group_has_torchs_names(groups: list[ShmProcessGroup]) -> None:
    first, second = groups
    assert repr(second) == "<group g of backend shm, rank 1 of 2>"
    assert (second.rank(), second.size()) == (1, 2)
    assert first.getBackendName() == process_group.NAME == "shm"
    assert first.group_name == first.getGroupName() == "g"
    first.setGroupName("of a test")
    assert first.group_name == first.getGroupName() == first._channel.name == "of a test"
    assert first.group_desc == first.getGroupDesc() == ""
    first.setGroupDesc("described")
    assert first.group_desc == first.getGroupDesc() == first._collectives.description == "described"


def test_a_group_answers_what_torch_asks_of_a_backend(groups: list[ShmProcessGroup]) -> None:
    group = groups[0]
    for name in ("splitting", "coalescing", "time_estimate", "shrinking"):
        assert getattr(group, f"supports_{name}") is False
    assert group.supports_tensor_alloc(torch.device("cpu")) is False
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(RuntimeError, match=r"^group g of backend shm has no backend for device meta$"):
        group._get_backend(torch.device("meta"))
    assert group.options._timeout == SECONDS
    group.set_timeout(datetime.timedelta(seconds=3))
    assert group._channel.timeout == 3.0
    assert group.options._timeout == datetime.timedelta(seconds=3)
    group._set_default_timeout(datetime.timedelta(seconds=4))
    assert group._channel.timeout == 4.0
    assert group._get_sequence_number_for_group() == 0
    group.barrier(LATER)
    assert group._get_sequence_number_for_group() == 1
    for nothing in (group._set_sequence_number_for_group, group._wait_for_pending_works):
        assert nothing() is None
    assert group.eager_connect_single_device(None) is None
    group.get_group_store().set("key", "value")
    assert groups[1].get_group_store().get("key") == b"value"


def test_a_timeout_of_torchs_options_may_be_a_number() -> None:
    store = dist.HashStore()
    made = on_both(lambda rank: create(options(store, rank, 7), None))
    assert [group._channel.timeout for group in made] == [7.0, 7.0]
    for group in made:
        group._channel.leave(0)


def test_a_group_is_split_again_and_again(groups: list[ShmProcessGroup]) -> None:
    groups[0].setGroupDesc("whole")
    groups[1].setGroupDesc("whole")
    for nth in (1, 2):
        first, second = on_both(lambda rank: groups[rank].split_group([1, 0]))
        assert [first.rank(), second.rank()] == [0, 1]
        assert first.size() == second.size() == 2
        assert first.group_name == second.group_name == f"g:split:0_1:{nth}"
        assert first.group_desc == second.group_desc == f"whole:split:{nth}"
        assert first._channel.timeout == 20.0
        tensors = [torch.ones(1), torch.ones(1)]
        on_both(lambda rank, pair=(first, second), t=tensors: pair[rank].allreduce([t[rank]], NOW))
        assert tensors[0].item() == tensors[1].item() == 2
        for group in (first, second):
            group._channel.leave(0)
    assert groups[0].split_group([1]) is None
    alone = groups[1].splitGroup([1], datetime.timedelta(seconds=5), group_name="a", group_desc="b")
    assert (alone.rank(), alone.size(), alone.group_name, alone.group_desc) == (0, 1, "a", "b")
    assert alone._channel.timeout == 5.0
    alone._channel.leave(0)
    assert groups[1].split_group([1]).group_name == "g:split:1:2"


def test_a_call_is_complete_or_a_work(groups: list[ShmProcessGroup]) -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    works = [group.allreduce([tensor], LATER) for group, tensor in zip(groups, tensors, strict=True)]
    assert all(isinstance(work, ShmWork) for work in works)
    assert works[0].result()[0] is tensors[0]
    assert isinstance(groups[0].barrier(None), ShmWork)
    groups[1].barrier(None)
    for work in works:
        assert work.wait() is True
    done = on_both(lambda rank: groups[rank].allreduce([tensors[rank]], NOW))
    assert tensors[0].tolist() == tensors[1].tolist() == [4.0, 4.0]
    for work in done:
        assert work.wait() is work.is_completed() is work.is_success() is True
        assert work.get_future().wait() is None
        assert work.get_future().done()


def test_coalesced_calls_are_waited_for_as_one(groups: list[ShmProcessGroup]) -> None:
    cpu = torch.device("cpu")
    tensors = [torch.ones(2), torch.ones(3)]
    groups[0]._start_coalescing(cpu)
    for tensor in tensors:
        groups[0].allreduce([tensor], LATER)
    work = groups[0]._end_coalescing(cpu)
    assert not work.is_completed()
    groups[1].allreduce([torch.ones(2)], LATER)
    assert not work.is_completed()
    assert not work.is_success()
    groups[1].allreduce([torch.ones(3)], LATER)
    assert work.is_completed()
    assert work.is_success()
    assert [tensor.sum().item() for tensor in tensors] == [4.0, 6.0]
    groups[0].barrier(LATER)
    assert groups[0]._bundle is None
    assert groups[0]._end_coalescing(cpu).wait() is True


def test_many_tensors_of_several_dtypes_are_one_work(groups: list[ShmProcessGroup]) -> None:
    mine = [[torch.full((2,), rank + 1.0), torch.full((3,), rank + 1)] for rank in range(2)]
    works = [group.allreduce(tensors, LATER) for group, tensors in zip(groups, mine, strict=True)]
    assert [work.wait() for work in works] == [True, True]
    assert [tensor.tolist() for tensor in mine[0]] == [[3.0, 3.0], [3, 3, 3]]
    largest = SimpleNamespace(asyncOp=True, reduceOp=dist.ReduceOp.MAX)
    works = [
        group.allreduce_coalesced([torch.tensor([rank]), torch.tensor([-1.0 * rank])], largest)
        for rank, group in enumerate(groups)
    ]
    assert groups[0]._get_sequence_number_for_group() == 4
    for work in works:
        work.wait()
    outputs = [[torch.zeros(2), torch.zeros(2, dtype=torch.int64)] for _ in groups]
    for group, output, rank in zip(groups, outputs, range(2), strict=True):
        group.all_gather_single_coalesced(output, [torch.tensor([1.0 + rank]), torch.tensor([5 + rank])])
    assert groups[0]._get_sequence_number_for_group() == 6


def test_a_premultiplied_sum_scales_what_a_rank_adds(groups: list[ShmProcessGroup]) -> None:
    half = SimpleNamespace(asyncOp=True, reduceOp=dist._make_nccl_premul_sum(0.5), rootRank=1, rootTensor=0)
    tensors = [torch.full((2,), 4.0), torch.full((2,), 6.0)]
    works = [group.reduce([tensor], half) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[4.0, 4.0], [5.0, 5.0]]
    works = [group.allreduce([tensor], half) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[4.5, 4.5]] * 2
    outputs = [torch.zeros(1), torch.zeros(1)]
    for call in ("reduce_scatter_single", "reduce_scatter", "reduce_scatter_single_coalesced"):
        works = []
        for group, output, tensor in zip(groups, outputs, tensors, strict=True):
            output.zero_()
            given = {
                "reduce_scatter_single": (output, tensor),
                "reduce_scatter": ([output], [list(tensor.split(1))]),
                "reduce_scatter_single_coalesced": ([output], [tensor]),
            }[call]
            works.append(getattr(group, call)(*given, half))
        for work in works:
            work.wait()
        assert [output.item() for output in outputs] == [4.5, 4.5], call


def test_a_barrier_may_have_a_timeout_of_its_own(groups: list[ShmProcessGroup]) -> None:
    briefly = SimpleNamespace(asyncOp=False, timeout=datetime.timedelta(milliseconds=20))
    unset = SimpleNamespace(asyncOp=True, timeout=datetime.timedelta(milliseconds=20))
    work = groups[0].barrier(unset)
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeout, match=r"^barrier \(#2\) of group g timed out"):
        groups[0].barrier(briefly)
    groups[0]._channel.me.change_state(PRESENT)
    with pytest.raises(CollectiveTimeout, match=r"^monitored_barrier \(#3\) of group g timed out"):
        groups[0].monitored_barrier(datetime.timedelta(milliseconds=20))


def test_a_shut_down_group_has_left(groups: list[ShmProcessGroup]) -> None:
    groups[0].shutdown()
    assert groups[0]._channel.me.state == LEFT
    with pytest.raises(ShmError, match=r"barrier .*: this rank has left group g"):
        groups[0].barrier(LATER)


def test_all_groups_of_a_process_are_aborted_at_once(groups: list[ShmProcessGroup]) -> None:
    work = groups[0].barrier(LATER)
    abort_all()
    for group in groups:
        with pytest.raises(GroupAborted, match="this rank has aborted group g"):
            group.barrier(LATER)
    with pytest.raises(GroupAborted, match="this rank has aborted group g"):
        work.wait()


def test_a_broadcast_without_options_is_that_of_the_first_rank(groups: list[ShmProcessGroup]) -> None:
    tensors = [torch.ones(2), torch.zeros(2)]
    works = [group.broadcast([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait()
    assert tensors[1].tolist() == [1.0, 1.0]


def test_wrong_tensors_are_refused_before_they_are_sent(groups: list[ShmProcessGroup]) -> None:
    group, one, two = groups[0], torch.ones(1), torch.ones(2)
    apart, whole = torch.ones(1).expand(2), torch.ones(2, dtype=torch.int64)
    half = SimpleNamespace(asyncOp=True, reduceOp=dist.ReduceOp.BAND)
    for call, text in (
        (lambda: group.allreduce([apart]), "all_reduce: an output of shape .* is expanded"),
        (lambda: group.allreduce_coalesced([apart, two]), "all_reduce: an output of shape .* is expanded"),
        (lambda: group.allreduce_coalesced([one, two], half), "all_reduce: BAND needs"),
        (lambda: group.all_gather_single(apart, one), "all_gather_single: an output of shape .* is expanded"),
        (lambda: group.all_gather_single(two, two), "all_gather_single: a tensor of 2 elements is not 2"),
        (lambda: group.all_gather_single_coalesced([apart], [one]), "all_gather_single: an output of shape"),
        (lambda: group.all_gather_single_coalesced([whole], [one]), "all_gather_single: its tensors have"),
        (lambda: group.all_gather_single_coalesced([two, two], [one, two]), "2 elements is not 2 times"),
        (lambda: group.all_gather_single_coalesced([two], [one, one]), "shorter|longer"),
        (lambda: group.all_gather_single_coalesced([two], [one, whole]), "shorter|longer"),
        (lambda: group.allgather([[two, apart]], [two]), "all_gather: an output of shape .* is expanded"),
        (lambda: group.allgather([[two]], [two]), "all_gather: a list of 1 tensors"),
        (lambda: group.allgather([[one, two]], [two]), "all_gather: an output of 1 elements"),
        (lambda: group.allgather_coalesced([[one], [one, one]], [one]), "shorter|longer"),
        (lambda: group.allgather_coalesced([[one], [one]], [one, one]), "shorter|longer"),
        (
            lambda: group.reduce_scatter_single(one, one),
            "reduce_scatter_single: a tensor of 1 elements",
        ),
        (lambda: group.reduce_scatter_single(apart, torch.ones(4)), "reduce_scatter_single: an output of sh"),
        (lambda: group.reduce_scatter_single(one, two, half), "reduce_scatter_single: BAND needs"),
        (lambda: group.reduce_scatter_single_coalesced([one], [one]), "a tensor of 1 elements is not 2"),
        (lambda: group.reduce_scatter_single_coalesced([apart], [torch.ones(4)]), "an output of shape"),
        (lambda: group.reduce_scatter_single_coalesced([one], [two, two]), "shorter|longer"),
        (lambda: group.reduce_scatter_single_coalesced([one], [two, whole]), "shorter|longer"),
        (lambda: group.reduce_scatter_single_coalesced([one], [two], half), "reduce_scatter_single: BAND"),
        (lambda: group.reduce_scatter([apart], [[two, two]]), "reduce_scatter: an output of shape"),
        (lambda: group.reduce_scatter([one], [[one, one]], half), "reduce_scatter: BAND needs"),
        (lambda: group.all_to_all_single(apart, two, [], []), "all_to_all_single: an output of shape"),
        (lambda: group.all_to_all_single(one, two, [], []), "all_to_all_single: 1 rows cannot"),
        (lambda: group.all_to_all_single(two, one, [], []), "all_to_all_single: 1 rows cannot"),
        (lambda: group.alltoall([apart, one], [one, one]), "all_to_all: an output of shape"),
        (lambda: group.broadcast([two.to_sparse()]), "broadcast: backend shm is for dense tensors"),
        (lambda: groups[1].broadcast([apart]), "broadcast: an output of shape"),
        (lambda: group.recv([whole, two], 1), "recv: its tensors have different dtypes"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert group._get_sequence_number_for_group() == 0


def test_memory_of_a_group_and_views_of_peers(groups: list[ShmProcessGroup]) -> None:
    lent = groups[0].allocate(3, torch.int16)
    assert (lent.shape, lent.dtype) == ((3,), torch.int16)
    seen: dict[tuple[str, int], list[list[float]]] = {}
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]

    def reader(key: tuple[str, int]) -> Callable[[Any], None]:
        return lambda parts: seen.update({key: [part.tolist() for part in parts]})

    for call in ("all_gather_views", "reduce_scatter_views"):
        works = [getattr(groups[rank], call)(inputs[rank], reader((call, rank))) for rank in range(2)]
        for work in works:
            assert isinstance(work, ShmWork)
            assert work.result() == []
            work.wait()
    assert seen == {
        ("all_gather_views", 0): [[1.0, 2.0], [3.0, 4.0]],
        ("all_gather_views", 1): [[1.0, 2.0], [3.0, 4.0]],
        ("reduce_scatter_views", 0): [[1.0], [3.0]],
        ("reduce_scatter_views", 1): [[2.0], [4.0]],
    }
    groups[0].await_readers(lent)


def test_several_tensors_are_one_call_where_they_have_one_dtype(groups: list[ShmProcessGroup]) -> None:
    half = SimpleNamespace(asyncOp=True, reduceOp=dist._make_nccl_premul_sum(0.5))
    mine = [[torch.tensor([2.0 + rank]), torch.tensor([4.0, 6.0])] for rank in range(2)]
    works = [group.allreduce(tensors, half) for group, tensors in zip(groups, mine, strict=True)]
    assert all(work.wait() for work in works)
    assert [tensor.tolist() for tensor in mine[0]] == [[2.5], [4.0, 6.0]]
    outputs = [[torch.zeros(2), torch.zeros(4)] for _ in groups]
    works = [
        group.all_gather_single_coalesced(output, tensors, LATER)
        for group, output, tensors in zip(groups, outputs, mine, strict=True)
    ]
    assert all(work.wait() for work in works)
    assert [tensor.tolist() for tensor in outputs[1]] == [[2.5, 2.5], [4.0, 6.0, 4.0, 6.0]]
    works = [
        group.reduce_scatter_single_coalesced(tensors, output, LATER)
        for group, output, tensors in zip(groups, outputs, mine, strict=True)
    ]
    assert all(work.wait() for work in works)
    assert [tensor.tolist() for tensor in mine[1]] == [[5.0], [8.0, 12.0]]
    assert groups[0]._get_sequence_number_for_group() == 3
    lists = [[[torch.zeros(1), torch.zeros(2)] for _ in range(2)] for _ in groups]
    works = [
        group.allgather_coalesced(filled, tensors, LATER)
        for group, filled, tensors in zip(groups, lists, mine, strict=True)
    ]
    assert all(work.wait() for work in works)
    assert [[tensor.tolist() for tensor in of] for of in lists[0]] == [[[5.0], [8.0, 12.0]]] * 2
    works = [
        group.allgather([[of[0] for of in filled]], [tensors[0] + rank], LATER)
        for rank, (group, filled, tensors) in enumerate(zip(groups, lists, mine, strict=True))
    ]
    assert all(work.wait() for work in works)
    assert [of[0].item() for of in lists[1]] == [5.0, 6.0]


def test_a_work_has_the_tensors_that_it_fills(groups: list[ShmProcessGroup]) -> None:
    root = SimpleNamespace(asyncOp=True, rootRank=1, reduceOp=None)

    def made(rank: int) -> list[list[list[float]]]:
        group, (one, two) = groups[rank], (torch.tensor([rank + 1.0]), torch.tensor([rank + 5.0, rank + 7.0]))
        out, more = torch.zeros(1), torch.zeros(2)
        pair, filled, lists = (
            [out.clone(), out.clone()],
            [out.clone(), out.clone()],
            [out.clone(), out.clone()],
        )
        done = [
            (group.all_to_all_single(more, two, [], [], LATER), [more]),
            (group.alltoall(pair, list(two.split(1)), LATER), pair),
            (group.reduce_scatter([out], [list(two.split(1))], LATER), [out]),
            (group.reduce_scatter_single(wide := out.clone(), two, LATER), [wide]),
            (group.allgather([filled], [one], LATER), filled),
            (group.all_gather_single(both := more.clone(), one, LATER), [both]),
            (group.gather([lists] if rank else [], [one], root), lists if rank else []),
            (group.scatter([part := out.clone()], [list(two.split(1))] if rank else [], root), [part]),
            (group.broadcast([sent := one.clone()], root), [sent]),
            (group.broadcast([first := one.clone()]), [first]),
            (group.reduce([total := one.clone()], root), [total]),
            (group.allreduce([everywhere := one.clone()], LATER), [everywhere]),
        ]
        for work, tensors in done:
            work.wait()
            assert len(work.result()) == len(tensors)
            assert all(given is tensor for given, tensor in zip(work.result(), tensors, strict=True))
        return [[tensor.tolist() for tensor in tensors] for _, tensors in done]

    found = on_both(made)
    assert [each[:6] for each in found] == [
        [[[5.0, 6.0]], [[5.0], [6.0]], [[11.0]], [[11.0]], [[1.0], [2.0]], [[1.0, 2.0]]],
        [[[7.0, 8.0]], [[7.0], [8.0]], [[15.0]], [[15.0]], [[1.0], [2.0]], [[1.0, 2.0]]],
    ]
    assert [each[6:] for each in found] == [
        [[], [[6.0]], [[2.0]], [[1.0]], [[1.0]], [[3.0]]],
        [[[1.0], [2.0]], [[8.0]], [[2.0]], [[1.0]], [[3.0]], [[3.0]]],
    ]


def test_messages_of_a_group_are_works(groups: list[ShmProcessGroup]) -> None:
    got = [torch.zeros(1), torch.zeros(1)]
    receives = [groups[0].recv([got[0]], 1, 3), groups[0].recv_anysource([got[1]])]
    sends = [groups[1].send([torch.tensor([5.0])], 0), groups[1].send([torch.tensor([6.0])], 0, 3)]
    for work in (*receives, *sends):
        assert work.wait() is True
    assert [tensor.item() for tensor in got] == [6.0, 5.0]
    assert [work.source_rank() for work in receives] == [1, 1]
    assert receives[0].result()[0] is got[0]


def test_only_a_root_needs_a_list(groups: list[ShmProcessGroup]) -> None:
    root = SimpleNamespace(asyncOp=True, rootRank=0)
    one = torch.ones(2)
    for call, text in (
        (lambda: groups[0].gather([[one]], [one], root), "gather: a list of 1 tensors"),
        (lambda: groups[0].gather([[one, torch.ones(3)]], [one], root), "gather: an output of 3 elements"),
        (lambda: groups[0].scatter([one], [[one]], root), "scatter: a list of 1 tensors"),
        (lambda: groups[0].scatter([one], [[one, torch.ones(3)]], root), "scatter: an output of 3 elements"),
        (lambda: groups[0].alltoall([one], [one, one]), "all_to_all: a list of 1 tensors"),
        (lambda: groups[0].alltoall([one, one], [one]), "all_to_all: a list of 1 tensors"),
        (lambda: groups[0].reduce_scatter([one], [[one]]), "reduce_scatter: a list of 1 tensors"),
        (lambda: groups[0].reduce_scatter([one], [[torch.ones(3), one]]), "reduce_scatter: an output of 3"),
        (lambda: groups[0].send([one.bool().expand(2).conj(), one], 1), "send: its tensors have diff"),
        (lambda: groups[0].recv([torch.ones(1).expand(2)], 1), "recv: an output of shape .* is expanded"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert groups[0]._get_sequence_number_for_group() == 0
    filled = [torch.zeros(2), torch.zeros(2)]
    groups[1].gather([], [one * 3], root)
    groups[0].gather([filled], [one], root).wait()
    assert [tensor.tolist() for tensor in filled] == [[1.0, 1.0], [3.0, 3.0]]
    work = groups[1].scatter([filled[0]], [], root)
    groups[0].scatter([filled[1]], [[one, one * 5]], root).wait()
    work.wait()
    assert filled[0].tolist() == [5.0, 5.0]


def test_an_interception_runs_every_call_until_it_ends(groups: list[ShmProcessGroup]) -> None:
    seen: list[tuple[str, Mapping[str, Any]]] = []

    def replacement(name: str, given: Mapping[str, Any], start: Callable[..., Any]) -> Any:
        seen.append((name, given))
        return start(tensors=[twice]) if name == "allreduce_" else start()

    before = {name: vars(ShmProcessGroup)[name] for name in _METHODS}
    end = intercept(replacement)
    try:
        assert all(vars(ShmProcessGroup)[name] is not method for name, method in before.items())
        assert ShmProcessGroup.allreduce.__name__ == "allreduce"
        once, twice = torch.ones(1), torch.full((1,), 2.0)
        work = groups[0].allreduce([once], opts=LATER)
        assert work.result()[0] is twice
        groups[1].barrier()
    finally:
        end()
    assert {name: vars(ShmProcessGroup)[name] for name in _METHODS} == before
    first, second = seen
    assert (first[0], second[0]) == ("allreduce_", "barrier")
    assert set(first[1]) == {"self", "tensors", "opts"}
    assert first[1]["self"] is groups[0]
    assert first[1]["tensors"][0] is once
    assert second[1] == {"self": groups[1]}


@pytest.mark.parametrize("name", _METHODS)
def test_operators_that_are_intercepted_are_torchs(name: str) -> None:
    assert hasattr(torch.ops.c10d, _METHODS[name])
