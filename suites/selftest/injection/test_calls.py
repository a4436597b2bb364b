"""Calls of collectives as disturbances see them, without a process group."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.features.injection import calls
from lockstep.features.injection.calls import Call, Interception, _owner, _read_call, _rebuilt, caller
from lockstep.features.injection.work import Watched

A, B, C = torch.ones(2), torch.ones(3, dtype=torch.int8), torch.ones(4)


def group(rank: int = 0) -> Any:
    return Mock(**{"rank.return_value": rank, "size.return_value": 2}, group_name="7")


def names_of(found: list[Tensor]) -> str:
    return "".join(
        next(name for name, own in (("A", A), ("B", B), ("C", C)) if own is each) for each in found
    )


CALLS: list[tuple[str, dict[str, Any], tuple[str, str, str, str, str]]] = [
    ("allreduce_", {"tensors": [A, B]}, ("all_reduce", "AB", "", "AB", "AB")),
    ("allreduce_coalesced_", {"tensors": [A]}, ("all_reduce_coalesced", "A", "", "A", "A")),
    ("allgather_", {"output_tensors": [[A, C]], "input_tensors": [B]}, ("all_gather", "AC", "B", "B", "AC")),
    (
        "alltoall_base_",
        {"output": A, "input": B, "output_split_sizes": [C], "input_split_sizes": []},
        ("all_to_all_single", "A", "B", "B", "A"),
    ),
    ("reduce_", {"tensors": [A], "root_rank": 0}, ("reduce", "A", "", "A", "A")),
    ("reduce_", {"tensors": [A], "root_rank": 1}, ("reduce", "", "", "", "A")),
    ("broadcast_", {"tensors": [A], "root_rank": 0}, ("broadcast", "", "A", "A", "A")),
    ("broadcast_", {"tensors": [A], "root_rank": 1}, ("broadcast", "A", "", "", "A")),
    ("broadcast_", {"tensors": [A], "opts": SimpleNamespace(rootRank=1)}, ("broadcast", "A", "", "", "A")),
    ("send", {"tensors": [A]}, ("send", "", "A", "A", "A")),
    ("recv_", {"tensors": [A]}, ("recv", "A", "", "", "A")),
    ("barrier", {"tensor": A}, ("barrier", "", "", "", "")),
]


@pytest.mark.parametrize(("name", "given", "expected"), CALLS)
def test_a_call_is_read_from_its_arguments(
    name: str, given: dict[str, Any], expected: tuple[str, str, str, str, str]
) -> None:
    call, (outputs, inputs) = _read_call(name, {"self": group(), **given})
    op, written, read, sent, result = expected
    assert call.about.op == op
    assert (names_of(call.written), names_of(call.read), names_of(call.result)) == (written, read, result)
    tensors = [{"A": A, "B": B, "C": C}[each] for each in sent]
    assert call.about.dtypes == tuple(each.dtype for each in tensors)
    assert call.about.shapes == tuple(tuple(each.shape) for each in tensors)
    assert call.about.nbytes == sum(each.numel() * each.itemsize for each in tensors)
    assert (call.about.group_size, call.about.group, call.about.index) == (2, "7", 0)
    assert call.in_place is (bool(sent) and sent == written)
    assert (bool(outputs), bool(inputs)) == (bool(written), bool(read))
    assert not call.about.in_backward
    assert not call.is_batched


def test_a_call_is_asynchronous_where_it_is_asked_to_be() -> None:
    def is_async(name: str = "barrier", **given: Any) -> bool:
        return _read_call(name, {"self": group(), **given})[0].is_async

    assert is_async()
    assert not is_async("monitored_barrier_")
    assert (is_async(async_op=True), is_async(async_op=False)) == (True, False)
    assert not is_async(opts=SimpleNamespace(asyncOp=False))
    assert is_async(opts=SimpleNamespace())


def test_tensors_are_put_into_lists_like_those_that_were_given() -> None:
    assert _rebuilt([[A, B], [], C], iter([1, 2, 3])) == [[1, 2], [], 3]  # type: ignore[arg-type]
    assert _rebuilt(A, iter([B])) is B


@pytest.mark.parametrize(("size", "inputs", "title"), [(1, [A], "float32[2], 1 rank"), (3, [], "3 ranks")])
def test_a_title_has_the_inputs_and_the_ranks(size: int, inputs: list[Tensor], title: str) -> None:
    of = group()
    of.size.return_value = size
    call, _ = _read_call("send", {"self": of, "tensors": inputs})
    assert call.title(4) == f"send #4 ({title})"


class Layers:
    """An interception without torch's kernels, and what happens at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.installed = 0
        self.done: list[str] = []
        self.shm = Mock()
        monkeypatch.setattr(calls, "replaced_kernels", self._replaced)
        monkeypatch.setitem(sys.modules, "lockstep.shm", self.shm)
        self.all = Interception()

    @contextlib.contextmanager
    def _replaced(self, replacement: object) -> Iterator[None]:
        assert replacement == self.all._run
        self.installed += 1
        yield
        self.installed -= 1

    def layer(self, name: str, is_innermost: bool = False, change: Tensor | None = None) -> Any:
        def layer(call: Call, run: Callable[..., Any]) -> Any:
            self.done.append(f"{name} {names_of(call.written)}")
            return run(call.written if change is None else [change], call.read)

        return self.all.layer(layer, is_innermost)

    def start(self, given: Mapping[str, Any] | None = None) -> Any:
        def start(**changed: Any) -> Any:
            self.done.append(f"starts {names_of(changed.get('tensors', []))}")
            return "work"

        return self.all._run("allreduce_", {"self": group(), "tensors": [A], **(given or {})}, start)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Layers:
    return Layers(monkeypatch)


def test_layers_run_from_the_outermost_one_on_tensors_of_those_around(layers: Layers) -> None:
    with layers.layer("first"), layers.layer("second", change=B):
        with layers.layer("innermost", is_innermost=True):
            assert layers.installed == 1
            assert layers.start() == "work"
        assert layers.done == ["second A", "first B", "innermost B", "starts B"]
        layers.done.clear()
        layers.start()
        assert layers.done == ["second A", "first B", "starts B"]
    assert layers.installed == 0
    layers.shm.intercept.assert_called_once_with(layers.all._run)
    layers.shm.intercept.return_value.assert_called_once_with()


def test_what_a_backend_calls_for_another_collective_is_not_disturbed(layers: Layers) -> None:
    def start(**_: object) -> Any:
        layers.done.append("starts")
        return layers.start()

    given = {"self": group(), "tensors": [A]}
    with layers.layer("layer"):
        layers.all._run("allreduce_", given, start)
        assert layers.done == ["layer A", "starts", "starts "]
        layers.done.clear()

        def fails(**_: object) -> Any:
            raise OSError("no")

        with pytest.raises(OSError, match="no"):
            layers.all._run("allreduce_", given, fails)
        layers.start()
        assert layers.done == ["layer A", "layer A", "starts A"]


def test_handles_are_held_until_no_layer_is_left(layers: Layers) -> None:
    made: list[Watched] = []

    def layer(call: Call, run: object) -> dist.Work:
        made.append(Watched(None, call.result))
        return made[-1]

    with layers.all.layer(layer):
        assert layers.start() is made[0]
        made[0].wait()
        layers.start()
        assert layers.all._works == made
        assert layers.all._holding == [made[1]]
        layers.all.forget()
        assert layers.all._works == made
    layers.all.forget()
    assert (layers.all._works, layers.all._holding) == ([], [])


class Phase(nn.Module):
    def forward(self, _: object) -> str:
        return _read_call("barrier", {"self": group()})[0].phase()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Phase())

    def forward(self, given: object) -> str:
        return str(self.inner(given))


class Engine:
    def __call__(self, of: Callable[[], object]) -> object:
        return of()


def test_a_phase_names_the_module_that_is_called() -> None:
    call, _ = _read_call("barrier", {"self": group()})
    assert call.phase() == ""
    assert Engine()(call.phase) == ""
    assert Named()(1) == " in forward of inner.0"
    assert Phase()(1) == " in forward of Phase"
    seen: list[str] = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda _: seen.append(_read_call("barrier", {"self": group()})[0].phase()))
    tensor.sum().backward()
    assert seen == [" in backward"]


def test_owners_of_files() -> None:
    harness = Path(calls.__file__).parents[2]
    stdlib = sysconfig.get_path("stdlib")
    owners = {
        __file__: "user",
        calls.__file__: "",
        f"{harness}/engine/units.py": "engine",
        f"{harness}/engines.py": "",
        torch.__file__: "",
        f"{stdlib}/threading.py": "",
        f"{stdlib}/site-packages/deepspeed/x.py": "engine",
        f"{stdlib}/site-packages/typing_extensions.py": "",
        "<frozen x>": "",
    }
    assert {file: _owner(file) for file in owners} == owners


def test_the_caller_is_the_users_line_and_the_engines_that_it_called(monkeypatch: pytest.MonkeyPatch) -> None:
    line = test_the_caller_is_the_users_line_and_the_engines_that_it_called.__code__.co_firstlineno
    monkeypatch.chdir(Path(__file__).parent)
    assert caller() == f"{Path(__file__).name}:{line + 3}"
    monkeypatch.chdir(Path(__file__).parents[1])
    assert caller() == f"injection/{Path(__file__).name}:{line + 5}"
    code = compile("\n\ndef call(of): return of()", "/engines/sub/engine.py", "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    of_engine = "/engines/sub/engine.py"
    monkeypatch.setattr(calls, "_owner", lambda file: {of_engine: "engine", __file__: "user"}.get(file, ""))
    found = space["call"](lambda: space["call"](caller))
    assert found == f"injection/{Path(__file__).name}:{line + 11} (sub/engine.py:3)"
    monkeypatch.setattr(calls, "_owner", lambda file: "engine" if file == of_engine else "")
    assert space["call"](caller) == "sub/engine.py:3"
    monkeypatch.setattr(calls, "_owner", lambda file: "")
    assert caller() == "a place without Python code"
