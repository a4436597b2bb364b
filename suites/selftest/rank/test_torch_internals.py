"""The private state of torch that a rank reads and replaces, with a torch whose groups have no processes."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from lockstep.protocol import BuildLock
from lockstep.rank import torch_internals as module
from lockstep.rank.torch_internals import TakenGroups


class Group:
    """A process group that counts its collectives, or cannot."""

    def __init__(self, name: str, calls: Mock) -> None:
        self.name, self.calls = name, calls
        self.count: int | None = 3

    def _get_sequence_number_for_group(self) -> int:
        if self.count is None:
            raise RuntimeError("it does not count")
        return self.count

    def shutdown(self) -> None:
        self.calls.shutdown(self.name)


class Torch:
    """The state of torch.distributed with a default group and another one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = calls = Mock()
        self.default, self.other = Group("default", calls), Group("other", calls)
        both = (self.default, self.other)
        self.world = SimpleNamespace(
            pg_map={group: ("gloo", f"store of {group.name}") for group in both},
            pg_names={group: group.name for group in both},
            pg_group_ranks={self.default: {1: 1, 0: 0}, self.other: {5: 1, 9: 0}, 7: {0: 0}},
            pg_backend_config=dict.fromkeys(both, "gloo"),
            pg_to_tag={self.default: "", self.other: "ptd"},
            tags_to_pg={"": [self.default], "ptd": [self.other]},
            group_count=5,
        )
        calls._update_default_pg.side_effect = lambda group: setattr(self.group, "WORLD", group)
        self.group = SimpleNamespace(WORLD=self.default)
        self.c10d = calls
        calls._world = self.world
        dist = SimpleNamespace(group=self.group, ProcessGroup=Group, TCPStore=calls.TCPStore)
        dist.is_initialized = lambda: self.group.WORLD is not None
        dist.get_backend = lambda: self.backend
        self.backend = "gloo"
        self.dist = dist
        monkeypatch.setattr(module, "_c10d", calls)
        monkeypatch.setattr(module, "dist", dist)

    def maps(self) -> dict[str, Any]:
        return {name: dict(value) for name, value in vars(self.world).items() if isinstance(value, dict)}

    def new_calls(self) -> list[Any]:
        calls = [*self.calls.mock_calls]
        self.calls.reset_mock()
        return calls


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


# Groups


def test_groups_are_listed_with_their_ranks_in_order(fake: Torch) -> None:
    assert module.process_groups() == [fake.default, fake.other]
    assert module.group_members() == [(fake.default, (0, 1)), (fake.other, (9, 5))]
    assert module.count_groups() == 5


def test_collectives_are_counted_where_the_default_group_does(fake: Torch) -> None:
    assert module.count_collectives() == 3
    fake.default.count = None
    assert module.count_collectives() == -1
    fake.group.WORLD = None
    assert module.count_collectives() == -1


def test_groups_meet_in_another_store(fake: Torch) -> None:
    before = dict(fake.world.pg_map)
    module.set_default_store("another")  # type: ignore[arg-type]
    assert fake.world.pg_map == {**before, fake.default: ("gloo", "another")}


def test_groups_that_are_taken_can_be_put_back(fake: Torch) -> None:
    before = fake.maps()
    taken = module.take_groups()
    assert (taken.default, taken.count) == (fake.default, 5)
    assert fake.maps() == {name: {} for name in before}
    assert (fake.group.WORLD, fake.world.group_count) == (None, 0)
    assert fake.new_calls() == [call._update_default_pg(None), call._unregister_all_process_groups()]
    fake.world.pg_map["of a test"] = fake.world.pg_names["of a test"] = "x"
    fake.world.group_count = 2
    taken.put_back()
    assert fake.maps() == before
    assert (fake.group.WORLD, fake.world.group_count) == (fake.default, 5)
    assert fake.new_calls() == [
        call._update_default_pg(None),
        call._unregister_all_process_groups(),
        call._register_process_group("default", fake.default),
        call._register_process_group("other", fake.other),
        call._update_default_pg(fake.default),
    ]


def test_the_default_group_is_lent_alone_over_another_store(fake: Torch) -> None:
    before = fake.maps()
    taken = module.take_groups()
    del taken.maps["pg_to_tag"][fake.default]
    fake.new_calls()
    store: Any = "of a test"
    assert taken.lend_default(store) is fake.default  # type: ignore[comparison-overlap]
    of_default = {fake.default: before["pg_group_ranks"][fake.default]}
    assert fake.maps() == {
        "pg_map": {fake.default: ("gloo", "of a test")},
        "pg_names": {fake.default: "default"},
        "pg_group_ranks": of_default,
        "pg_backend_config": {fake.default: "gloo"},
        "pg_to_tag": {},
        "tags_to_pg": {"": [fake.default]},
    }
    assert fake.new_calls() == [call._register_process_group("default", fake.default)]


def test_unknown_groups_are_shut_down_from_the_last(fake: Torch) -> None:
    third, fourth = Group("third", fake.calls), Group("fourth", fake.calls)
    known: dict[Any, Any] = dict.fromkeys([third, fake.other, fourth])
    TakenGroups(None, 0, {"pg_map": known}).shut_down()
    assert fake.new_calls() == [call.shutdown("fourth"), call.shutdown("third")]


# What is replaced


def test_what_makes_groups_is_replaced(fake: Torch) -> None:
    before = fake.calls._new_process_group_helper
    assert module.replace_group_maker("mine") is before  # type: ignore[arg-type]
    assert fake.calls._new_process_group_helper == "mine"


def test_what_makes_stores_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = SimpleNamespace(_create_c10d_store="torch's")
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", rendezvous)  # type: ignore[arg-type]
    assert module.replace_store_maker("mine") == "torch's"  # type: ignore[arg-type, comparison-overlap]
    assert rendezvous._create_c10d_store == "mine"


@pytest.mark.parametrize("name", ["init", "destroy"])
def test_functions_are_wrapped_in_both_modules(fake: Torch, name: str) -> None:
    function = f"{name}_process_group"
    setattr(fake.calls, function, "torch's")
    getattr(module, f"wrap_{function}")(lambda given: f"wrapped {given}")
    assert getattr(fake.calls, function) == getattr(fake.dist, function) == "wrapped torch's"


def test_a_timeout_is_the_usual_one_of_its_backend(fake: Torch) -> None:
    fake.calls.Backend.side_effect = lambda name: name
    fake.calls._get_default_timeout.side_effect = {"gloo": 30, "nccl": 10}.get
    assert module.is_default_timeout(None, "gloo")
    assert module.is_default_timeout(30, "gloo")
    assert not module.is_default_timeout(30, "nccl")
    assert not module.is_default_timeout(0, "nccl")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("Invalid process group specified"), True),
        (RuntimeError("Could not resolve the process group 0"), True),
        (ValueError("Group x is not registered, please"), True),
        (ValueError("Group x is not initialized in the world group map"), True),
        (ValueError("Group x is not known"), False),
        (KeyError("Invalid process group specified"), False),
    ],
)
def test_errors_for_want_of_a_group_are_known(error: BaseException, expected: bool) -> None:
    assert module.is_for_want_of_a_group(error) is expected


def test_the_lasting_pipe_is_that_of_a_short_server(fake: Torch) -> None:
    fake.calls.TCPStore.side_effect = RuntimeError("no loopback")
    module.open_lasting_pipe()
    (server,) = fake.new_calls()
    timeout = server.kwargs.pop("timeout")
    assert server == call.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    assert timeout.total_seconds() == 1


# Flight records


class Dumps:
    """The functions that dump torch's flight recorders, by what they return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, tuple[bool, ...]]] = []
        self.found: dict[str, bytes | str] = {}
        for name in ("_dump_nccl_trace", "_dump_fr_trace", "_dump_nccl_trace_json", "_dump_fr_trace_json"):
            monkeypatch.setattr(torch._C._distributed_c10d, name, self.dump(name), raising=False)

    def dump(self, name: str) -> Any:
        def called(*given: bool) -> bytes | str:
            self.asked.append((name, given))
            return self.found[name]

        return called


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> Dumps:
    return Dumps(monkeypatch)


WHOLE = {**dict.fromkeys(module._KEYS, 1), "more": 2}
PART = {name: 1 for name in module._KEYS if name != "retired"}
BARE = dict.fromkeys(module._KEYS, 1)
ENTRIES = {"entries": [WHOLE, PART, BARE]}


@pytest.mark.parametrize("backend", ["gloo", "nccl", None, "cpu:gloo,cuda:nccl"])
def test_records_are_those_of_the_backend(fake: Torch, dumps: Dumps, backend: str | None) -> None:
    fake.backend = backend or "nccl"
    if backend is None:
        fake.group.WORLD = None
    name = "_dump_nccl_trace" if "nccl" in (backend or "") else "_dump_fr_trace"
    dumps.found = {name: pickle.dumps(ENTRIES), f"{name}_json": json.dumps(ENTRIES)}
    assert module.recorded_collectives() == [WHOLE, BARE]
    assert module.recorded_calls() == [WHOLE, BARE]
    assert dumps.asked == [(f"{name}_json", (True, False)), (name, (True, True, False))]


@pytest.mark.parametrize("dumped", ["no json", "{}"])
def test_a_record_that_is_not_known_has_no_entries(fake: Torch, dumps: Dumps, dumped: str) -> None:
    dumps.found = {"_dump_fr_trace_json": dumped, "_dump_fr_trace": pickle.dumps({})}
    assert module.recorded_collectives() == []
    assert module.recorded_calls() == []
    assert len(dumps.asked) == 2


@pytest.mark.parametrize("dumped", [b"", b"no pickle", None])
def test_without_stacks_there_are_collectives(
    fake: Torch, dumps: Dumps, monkeypatch: pytest.MonkeyPatch, dumped: bytes | None
) -> None:
    dumps.found = {"_dump_fr_trace_json": json.dumps(ENTRIES), "_dump_fr_trace": dumped or b""}
    if dumped is None:
        monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace")
    assert module.recorded_calls() == [WHOLE, BARE]


def test_a_compiler_that_is_imported_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler: Any = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch._inductor", compiler)
    monkeypatch.delitem(vars(torch), "_inductor", raising=False)
    with module._without_inductor():
        assert "_inductor" not in vars(torch)
    monkeypatch.setitem(vars(torch), "_inductor", compiler)
    with module._without_inductor():
        assert vars(torch)["_inductor"] is compiler
    monkeypatch.delitem(sys.modules, "torch._inductor")
    with module._without_inductor():
        assert vars(torch)["_inductor"] is compiler
    assert vars(torch)["_inductor"] is compiler


# Locks and tensors


def test_locks_of_builds_are_those_whose_files_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FileBaton:
        def __init__(self, path: Path, fd: int | None) -> None:
            self.lock_file_path, self.fd = path, fd

    class Other(FileBaton):
        """No baton of torch's."""

    monkeypatch.delitem(sys.modules, "torch.utils.file_baton", raising=False)
    assert module.build_locks() == ()
    file_baton: Any = SimpleNamespace(FileBaton=FileBaton)
    monkeypatch.setitem(sys.modules, "torch.utils.file_baton", file_baton)
    held, awaited, gone = (tmp_path / name for name in ("held", "awaited", "gone"))
    held.touch()
    awaited.touch()
    batons = [FileBaton(held, 3), FileBaton(awaited, None), FileBaton(gone, 4), Other(tmp_path, 5)]
    expected = {BuildLock(str(held), is_held=True), BuildLock(str(awaited), is_held=False)}
    assert {*module.build_locks()} == expected
    del batons


def test_a_freed_tensor_is_shown_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "__repr__", torch.Tensor.__repr__)
    freed, kept = torch.ones(2, 3), torch.ones(1)
    parameter = torch.nn.Parameter(torch.ones(2))
    for tensor in (freed, parameter):
        tensor.untyped_storage().resize_(0)
    assert module._is_freed(freed)  # else its repr ends this process
    plain = repr(kept)
    module.show_freed_tensors()
    assert repr(freed) == "tensor(<freed>, size=(2, 3), dtype=torch.float32)"
    assert repr(parameter) == "Parameter containing:\ntensor(<freed>, size=(2,), dtype=torch.float32)"
    assert repr(kept) == plain
    assert torch.Tensor.__repr__(kept, tensor_contents="no numbers") == "tensor(no numbers)"
    assert "__wrapped__" in vars(torch.Tensor.__repr__)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(0), torch.empty(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2)],
    ids=["empty", "meta", "sparse", "kept"],
)
def test_a_tensor_without_memory_to_lose_is_not_freed(tensor: torch.Tensor) -> None:
    assert module._is_freed(tensor) is False


def test_a_tensor_inside_of_a_transform_is_not_freed() -> None:
    found: list[bool] = []

    def f(tensor: torch.Tensor) -> torch.Tensor:
        found.append(module._is_freed(tensor))
        return tensor

    torch.vmap(f)(torch.ones(2, 2))
    assert found == [False]


def test_flags_of_cudnn_are_set_by_their_places() -> None:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        for flags in ((True, False), (False, True)):
            module.set_cudnn_flags(*flags)
            assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == flags
    finally:
        module.set_cudnn_flags(*before)


def test_phases_are_found_by_the_code_of_public_functions() -> None:
    phases = module.phases_by_code()
    backward, grad = torch.autograd.backward.__code__, torch.autograd.grad.__code__
    assert phases[backward.co_filename, "backward"] == phases[grad.co_filename, "grad"] == "backward"
    assert sorted(phases.values()) == ["backward", "backward", "forward", "optimizer"]
