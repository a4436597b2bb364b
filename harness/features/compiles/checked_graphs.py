"""Compiled graphs that run a second time as dynamo has traced them: the first that computes something else.

Runs in a rank, in a run of a test that looks for the module in which compiled code goes wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions.closeness import EXACT, differences
from lockstep.features.compiles.finding import Finding, in_module
from lockstep.features.compiles.torch_internals import (
    WRAPPED,
    copy_of_storage,
    module_stack,
    name_of_backend,
    same_graph,
    source_of,
    through_backends,
)

Compiled = Callable[..., Any]
Backend = Callable[[GraphModule, list[Any]], Compiled]

_MOST_LINES = 3


class GraphChecks:
    """Compares what each compiled graph computes with what the graph says, on copies of its inputs.

    All calls are compared, also after the first difference: graphs with collectives must run equally often on
    all ranks.

    Args:
        found: called with the finding whenever it changes: the test may not end.

    Attributes:
        finding: the first difference so far.
    """

    def __init__(self, found: Callable[[Finding], None]) -> None:
        self.finding = Finding()
        self._found = found
        self._calls = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Compare the graphs that are compiled inside."""
        with through_backends(self._compile):
            yield

    def _compile(self, backend: Backend, module: GraphModule, inputs: list[Any]) -> Compiled:
        names = [source_of(node) for node in module.graph.find_nodes(op="placeholder")]
        traced = same_graph(module)  # a backend may change its own
        graph = Graph(traced, backend(module, inputs), backend, names)
        if not self.finding.backend:
            self._set(backend=name_of_backend(backend))

        def run(*inputs: Any) -> Any:
            self._check(graph, inputs)
            return graph.compiled(*inputs)

        return run

    def _set(self, **changes: Any) -> None:
        self.finding = replace(self.finding, **changes)
        self._found(self.finding)

    def _check(self, graph: Graph, inputs: Sequence[Any]) -> None:
        self._calls += 1
        try:
            found, bits = graph.differences(inputs)
            if self.finding.call:
                return
            if found:
                self._find(graph, inputs, found)
            elif bits and not self.finding.lines:
                where = in_module(name_of(graph.only_module))
                self._set(lines=(f"first different bits{where}: {bits[0]}",))
        except Exception as error:  # of a graph that does not run on copies
            if not self.finding.unknown:
                self._set(unknown=f"a graph did not run on copies of its inputs: {_first(error)}")

    def _find(self, graph: Graph, inputs: Sequence[Any], found: Sequence[str]) -> None:
        """Keep the difference of a graph; where it is of several modules, compile them one by one."""
        module = name_of(graph.only_module)
        why = "" if module else "one graph has several"
        self._set(call=self._calls, module=module, lines=tuple(found[:_MOST_LINES]), unknown=why)
        if module:
            return
        try:
            part = first_part(graph, inputs)
        except Exception as error:
            self._set(unknown=f"{why}, which do not compile one by one: {_first(error)}")
            return
        if part is None:
            self._set(unknown=f"{why}, and compiled one by one they agree")
        else:
            self._set(module=name_of(part[0]), lines=tuple(part[1][:_MOST_LINES]), unknown="")


@dataclass(frozen=True)
class Graph:
    """A graph that was compiled.

    Attributes:
        traced: the graph as dynamo has traced it.
        compiled: what the backend has made of it.
        backend: compiles it.
        names: what its inputs are.
    """

    traced: GraphModule
    compiled: Compiled
    backend: Backend
    names: Sequence[str]

    @property
    def only_module(self) -> str:
        """Path, in the module that is compiled, of the one that all of it belongs to; empty for several."""
        modules = {*_modules_of_nodes(self.traced).values()}
        return modules.pop() if len(modules) == 1 else ""

    def differences(self, inputs: Sequence[Any]) -> tuple[list[str], list[str]]:
        """Return lines on what differs beyond the tolerance of its dtype, and on what differs at all.

        Outputs are compared, their gradients by all inputs for random gradients of the outputs, and what the
        graph has written to its inputs.
        """
        expected, actual = (computed(each, inputs, self.names) for each in (self.traced, self.compiled))
        if not expected:
            return [], []
        bits = differences(actual, expected, EXACT)
        return (differences(actual, expected) if bits else []), bits


def computed(function: Compiled, inputs: Sequence[Any], names: Sequence[str]) -> dict[str, Tensor | None]:
    """Call a graph on copies of inputs; return outputs, gradients, and what the copies are afterwards."""
    copies = _copies(inputs)
    devices = {each.device for each in inputs if isinstance(each, Tensor) and each.device.type != "cpu"}
    kind = next((each.type for each in devices), "cuda")
    indices = [each.index or 0 for each in devices if each.type == kind]
    # Not with the hooks of activation checkpointing, which would count what is saved here.
    with torch.random.fork_rng(indices, device_type=kind), saved_tensors_hooks(_same, _same):
        returned = function(*copies)
        listed = returned if isinstance(returned, tuple | list) else [returned]
        outputs = [each for each in listed if isinstance(each, Tensor)]
        found: dict[str, Tensor | None] = {
            f"output {number}" if len(outputs) > 1 else "the output": each.detach().clone()
            for number, each in enumerate(outputs)
        }
        found |= {f"gradient of {name}": each for name, each in _gradients(outputs, copies, names).items()}
    tensors = ((name, each) for name, each in zip(names, copies, strict=True) if isinstance(each, Tensor))
    return found | {f"{name} after the call": each.detach() for name, each in tensors}


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Any], names: Sequence[str]
) -> dict[str, Tensor | None]:
    """Return the gradients of inputs for random ones of the outputs, those of one direction in both runs."""
    roots = [each for each in outputs if each.requires_grad and torch.is_grad_enabled()]
    leaves = {
        name: each
        for name, each in zip(names, inputs, strict=True)
        if isinstance(each, Tensor) and each.requires_grad
    }
    if not (roots and leaves):
        return {}
    generator = torch.Generator().manual_seed(0)

    def direction(of: Tensor) -> Tensor:
        is_plain = type(of) is Tensor
        return torch.randn(of.shape, generator=generator).to(of) if is_plain else torch.ones_like(of)

    directions = [direction(each) for each in roots]
    found = torch.autograd.grad(roots, [*leaves.values()], directions, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Return leaves with the values, strides and shared memory of tensors; other inputs as they are."""
    storages: dict[int, Any] = {}

    def copy(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return copy_of_storage(each, storages).requires_grad_(each.requires_grad)

    return [copy(each) for each in inputs]


def _same(tensor: Any) -> Any:
    return tensor


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# Parts of a graph


def first_part(graph: Graph, inputs: Sequence[Any]) -> tuple[str, list[str]] | None:
    """Return the first module that differs when only its part of a graph is compiled, and lines."""
    whole = same_graph(graph.traced)
    modules = _modules_of_nodes(whole)
    parts: list[str] = []

    def part_of(node: Node) -> int:
        module = modules.get(node, parts[-1] if parts else "")
        if not parts or parts[-1] != module:
            parts.append(module)
        return len(parts) - 1

    split = split_module(whole, graph.traced, part_of, keep_original_order=True)
    runs = Parts(split, graph.backend)
    runs.run(*_copies(inputs))
    return None if runs.first is None else (parts[runs.first[0]], runs.first[1])


class Parts(Interpreter):
    """Runs a split graph uncompiled, and compares each part with its compiled form until one differs.

    Attributes:
        first: number of the part that differs, and lines.
    """

    def __init__(self, split: GraphModule, backend: Backend) -> None:
        super().__init__(split)
        self.first: tuple[int, list[str]] | None = None
        self._backend = backend

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        part = self.fetch_attr(target)
        if self.first is None:
            compiled = self._backend(same_graph(part), _copies(args))
            names = [f"input {number}" for number in range(len(args))]
            found, _ = Graph(part, compiled, self._backend, names).differences(args)
            if found:
                self.first = int(target.rpartition("_")[2]), found
        return super().call_module(target, args, kwargs)


def _modules_of_nodes(module: GraphModule) -> Mapping[Node, str]:
    """Return the module of each operation: the outermost ones that are not around all of them."""
    operations = [each for each in module.graph.nodes if each.op.startswith("call")]
    stacks = {each: module_stack(each) for each in operations}
    depth = 0
    while len({stack[depth : depth + 1] for stack in stacks.values()}) == 1 and all(
        len(stack) > depth for stack in stacks.values()
    ):
        depth += 1
    return {node: ("", *stack)[min(len(stack), depth + 1)] for node, stack in stacks.items()}


# Names


def name_of(path: str) -> str:
    """Return the name of a module in the outermost one that runs; its path is given in the innermost one."""
    running = _running_modules()
    if not running:
        return path
    try:
        return path_in(running[-1], running[0].get_submodule(path))
    except AttributeError:  # what is compiled is a method of something else
        return path


def _running_modules() -> list[nn.Module]:
    """Return the modules of which a method runs, from the innermost one."""
    modules: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, GraphModule):
            modules.append(module)
        frame = frame.f_back
    return modules


def path_in(model: nn.Module, module: nn.Module) -> str:
    """Return the path of a module in a model, without what DDP, FSDP, checkpoints and compilation add."""
    full = next((name for name, each in model.named_modules() if each is module), "")
    steps, here = [], model
    for step in full.split(".") if full else []:
        if step not in WRAPPED and not (step == "module" and isinstance(here, DistributedDataParallel)):
            steps.append(step)
        here = here.get_submodule(step)
    return ".".join(steps)
