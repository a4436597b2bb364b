"""Unit tests of compiled graphs that are compared with what was traced: no compiler is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from lockstep.features.compiles.checked_graphs import (
    Graph,
    GraphChecks,
    _copies,
    computed,
    first_part,
    name_of,
    path_in,
)
from lockstep.features.compiles.finding import Finding
from lockstep.features.compiles.torch_internals import (
    copy_of_storage,
    name_of_backend,
    same_graph,
    source_of,
)


def graph_of(function: Callable[..., Any], *stacks: Sequence[str]) -> GraphModule:
    """Return the graph of a function, whose operations are traced in these modules, one after the other."""
    graph = symbolic_trace(function)
    operations = [node for node in graph.graph.nodes if node.op.startswith("call")]
    for node, stack in zip(operations, stacks, strict=False):
        node.meta["nn_module_stack"] = {path: (f"L['self'].{path}", object) for path in stack}
    return graph


def three(x: Tensor) -> Tensor:
    return ((x * 2) + 1).relu()


BLOCKS = (["blocks", "blocks.0"], ["blocks", "blocks.1", "blocks.1.inner"], ["blocks", "blocks.1"])


def exact(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return graph.forward


def wrong_sum(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph so that it computes something else if it has an addition."""
    has_sum = "add" in {getattr(node.target, "__name__", "") for node in graph.graph.nodes}

    def run(*inputs: Any) -> Any:
        returned = graph(*inputs)
        if not has_sum:
            return returned
        return (returned[0] + 1,) if isinstance(returned, tuple) else returned + 1

    return run


def off_by_a_bit(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return lambda *inputs: graph(*inputs) * (1 + 2**-23)


class Checks:
    """Checks of graphs, and the findings that were announced."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self.checks = GraphChecks(self.found.append)

    def compile(self, graph: GraphModule, backend: Any) -> Callable[..., Any]:
        return self.checks._compile(backend, graph, [])


WRONG = "the output: Mismatched elements: 2 / 2 (100.0%)"


def test_a_graph_of_one_module_that_differs_names_it() -> None:
    each = Checks()
    right = each.compile(graph_of(three, *[["blocks"]] * 3), exact)
    wrong = each.compile(graph_of(three, *[["blocks"]] * 3), wrong_sum)
    assert right(torch.ones(2)).tolist() == [3.0, 3.0]
    assert each.found == [Finding(backend="exact")]
    assert wrong(torch.ones(2)).tolist() == [4.0, 4.0]
    finding = each.found[-1]
    assert (len(each.found), finding.call, finding.module, finding.unknown) == (2, 2, "blocks", "")
    assert finding.lines[0].startswith(WRONG)
    assert len(finding.lines) == 1
    wrong(torch.ones(2))
    assert each.checks.finding is finding
    assert len(each.found) == 2


def test_a_graph_of_several_modules_is_compiled_module_by_module() -> None:
    each = Checks()
    each.compile(graph_of(three, *BLOCKS), wrong_sum)(torch.ones(2))
    assert [(found.call, found.module, found.unknown) for found in each.found] == [
        (0, "", ""),
        (1, "", "one graph has several"),
        (1, "blocks.1", ""),
    ]


def test_modules_that_agree_one_by_one_are_said_to_do_so() -> None:
    def only_whole(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        is_whole = sum(node.op.startswith("call") for node in graph.graph.nodes) == 3
        return wrong_sum(graph, inputs) if is_whole else graph.forward

    def only_once(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if sum(node.op.startswith("call") for node in graph.graph.nodes) < 3:
            raise RuntimeError("no parts\nat all")
        return wrong_sum(graph, inputs)

    for backend, why in (
        (only_whole, "one graph has several, and compiled one by one they agree"),
        (only_once, "one graph has several, which do not compile one by one: RuntimeError: no parts"),
    ):
        each = Checks()
        each.compile(graph_of(three, *BLOCKS), backend)(torch.ones(2))
        assert (each.checks.finding.unknown, each.checks.finding.module) == (why, "")
        assert each.checks.finding.lines[0].startswith(WRONG)


def test_a_graph_that_does_not_run_on_copies_is_the_reason_once() -> None:
    def broken(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            raise RuntimeError("\n  no\nmore")

        return run

    each = Checks()
    run = each.compile(graph_of(three), broken)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            run(torch.ones(2))
    why = "a graph did not run on copies of its inputs: RuntimeError: no"
    assert each.found == [Finding(backend="broken"), Finding(backend="broken", unknown=why)]


def test_the_first_different_bits_are_kept_until_something_differs_by_more() -> None:
    each = Checks()
    bits = each.compile(graph_of(three, *[["blocks"]] * 3), off_by_a_bit)
    bits(torch.ones(2))
    bits(torch.ones(2))
    assert len(each.found) == 2
    (line,) = each.found[1].lines
    assert line.startswith(f"first different bits in module `blocks`: {WRONG}")
    assert each.found[1].call == 0
    each.compile(graph_of(three, *[["other"]] * 3), wrong_sum)(torch.ones(2))
    assert (each.checks.finding.call, each.checks.finding.module) == (3, "other")
    assert each.checks.finding.lines[0].startswith(WRONG)
    bits(torch.ones(2))
    assert len(each.found) == 3


def test_the_first_wrong_part_is_that_of_the_first_module() -> None:
    whole = Graph(graph_of(three, *BLOCKS), three, wrong_sum, ["x"])
    assert whole.only_module == ""
    part = first_part(whole, [torch.ones(2)])
    assert part is not None
    assert part[0] == "blocks.1"
    assert part[1][0].startswith(WRONG)
    assert first_part(Graph(whole.traced, three, exact, ["x"]), [torch.ones(2)]) is None
    again = graph_of(lambda x: (x + 1) * 2 + 1, ["a"], ["b"], ["c"])
    part = first_part(Graph(again, three, wrong_sum, ["x"]), [torch.ones(2)])
    assert part is not None
    assert part[0] == "a"


@pytest.mark.parametrize(
    ("stacks", "module"),
    [
        ([["a"], ["a"], ["a"]], "a"),
        ([["a", "a.b"], ["a", "a.b"], ["a", "a.b"]], "a.b"),
        ([["a", "a.b"], ["a", "a.b"], ["a"]], ""),
        ([["a"], ["b"], ["a"]], ""),
        ([], ""),
    ],
)
def test_all_of_a_graph_belongs_to_the_innermost_module_around_it(stacks: Any, module: str) -> None:
    assert Graph(graph_of(three, *stacks), three, exact, ["x"]).only_module == module


def test_outputs_gradients_and_what_is_written_are_computed_on_copies() -> None:
    def function(x: Tensor, weight: Tensor, number: int) -> tuple[Tensor, Tensor, int]:
        x.add_(1)
        return x * weight, x.sum(), number

    inputs = torch.ones(2), torch.full((2,), 3.0, requires_grad=True), 5
    names = ["`x`", "`weight`", "`number`"]
    found = computed(function, inputs, names)
    assert [*found] == [
        *("output 0", "output 1", "gradient of `weight`", "`x` after the call", "`weight` after the call")
    ]
    values = {name: each.tolist() for name, each in found.items() if each is not None}
    assert values["output 0"] == [6.0, 6.0]
    assert values["output 1"] == 4.0
    assert (values["`x` after the call"], inputs[0].tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert values["`weight` after the call"] == [3.0, 3.0]
    direction = torch.randn(2, generator=torch.Generator().manual_seed(0))
    assert values["gradient of `weight`"] == (2 * direction).tolist()
    assert not any(each is not None and each.requires_grad for each in found.values())
    assert inputs[1].grad is None
    with torch.no_grad():
        assert "gradient of `weight`" not in computed(function, inputs, names)


def test_a_graph_draws_the_same_numbers_twice_and_leaves_the_generator() -> None:
    state = torch.get_rng_state()
    first, second = (computed(lambda x: torch.rand(3), [torch.ones(1)], ["x"]) for _ in range(2))
    assert torch.get_rng_state().equal(state)
    assert first["the output"] is not None
    assert second["the output"] is not None
    assert first["the output"].equal(second["the output"])


def test_inputs_that_share_memory_share_it_in_their_copies() -> None:
    whole = torch.arange(6.0).view(2, 3)
    storages: dict[int, Any] = {}
    one, other, third = (copy_of_storage(each, storages) for each in (whole, whole.t()[1:], torch.ones(2)))
    assert one.equal(whole)
    assert other.equal(whole.t()[1:])
    assert other.stride() == (1, 3)
    assert other.storage_offset() == 1
    one[0, 1] = 9
    assert (other[0, 0].item(), whole[0, 1].item(), len(storages)) == (9.0, 1.0, 2)
    assert third.tolist() == [1.0, 1.0]
    sparse = torch.eye(2).to_sparse()
    copied = copy_of_storage(sparse, storages)
    assert copied is not sparse
    assert copied.to_dense().equal(torch.eye(2))
    assert len(storages) == 2


def test_copies_of_inputs_are_leaves_that_require_what_inputs_do() -> None:
    inputs = [torch.ones(2, requires_grad=True), torch.ones(2), 3]
    leaf, plain, number = _copies(inputs)
    assert (leaf.is_leaf, leaf.requires_grad, plain.requires_grad, number) == (True, True, False, 3)
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2.0, 2.0]
    assert inputs[0].grad is None
    [sparse] = _copies([torch.eye(2).to_sparse().requires_grad_()])
    assert (sparse.is_leaf, sparse.requires_grad) == (True, True)


def test_a_graph_without_outputs_to_compare_differs_in_nothing() -> None:
    graph = graph_of(lambda x: x + 1)
    assert Graph(graph, graph.forward, exact, ["x"]).differences([1]) == ([], [])


def test_a_graph_is_compared_within_the_tolerance_and_by_its_bits() -> None:
    graph = graph_of(three)
    inputs = [torch.ones(2)]
    assert Graph(graph, exact(graph, []), exact, ["x"]).differences(inputs) == ([], [])
    found, bits = Graph(graph, off_by_a_bit(graph, []), exact, ["x"]).differences(inputs)
    assert (found, len(bits)) == ([], 1)
    found, bits = Graph(graph, wrong_sum(graph, []), exact, ["x"]).differences(inputs)
    assert (len(found), len(bits)) == (1, 1)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(1, 1), nn.ReLU())

    def named(self, path: str) -> str:
        return name_of(path)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def named(self, path: str) -> str:
        return self.inner.named(path)


def test_a_module_is_named_in_the_outermost_one_that_runs() -> None:
    assert name_of("blocks.0") == "blocks.0"
    assert Inner().named("blocks.0") == "blocks.0"
    assert Outer().named("blocks.0") == "inner.blocks.0"
    assert Outer().named("missing.0") == "missing.0"
    assert Outer().named("") == "inner"


def test_a_path_lacks_what_wrappers_add() -> None:
    model, leaf = nn.Module(), nn.Linear(1, 1)
    model.module = nn.Module()
    model.module._orig_mod = nn.Module()
    model.module._orig_mod._checkpoint_wrapped_module = nn.Module()
    model.module._orig_mod._checkpoint_wrapped_module.leaf = leaf
    assert path_in(model, leaf) == "module.leaf"
    assert path_in(model.module._orig_mod, leaf) == "leaf"
    assert path_in(model, model) == ""
    assert path_in(model, nn.Linear(1, 1)) == ""


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['blocks']._modules['0']._parameters['weight']", "`blocks.0.weight`"),
        ("L['self'].blocks.0.scale", "`blocks.0.scale`"),
        ("L['self']", "`self`"),
        ("L['x']", "`x`"),
        ("L['batch']['x']", "`batch.x`"),
        ("G", "`G`"),
        ("", "input `l_x`"),
        (None, "input `l_x`"),
    ],
)
def test_an_input_is_named_as_the_code_names_it(source: str | None, name: str) -> None:
    for given in (source, lambda: source):
        of = None if source is None else SimpleNamespace(name=given)
        node: Any = SimpleNamespace(name="l_x", _dynamo_source=of)
        assert source_of(node) == name


def test_a_backend_is_named_as_it_was_asked_for() -> None:
    class Wrapper:
        backend_compile_fn = SimpleNamespace(_compiler_name="inductor", compiler_name="other")

        def compile(self) -> None: ...

    assert name_of_backend(Wrapper().compile) == "inductor"
    assert name_of_backend(SimpleNamespace(_compiler_name=None, compiler_name="aot")) == "aot"
    assert name_of_backend(exact) == "exact"
    assert name_of_backend(SimpleNamespace(__name__=3)) == "SimpleNamespace"


def test_a_graph_that_is_changed_leaves_its_copy() -> None:
    graph = graph_of(three, *BLOCKS)
    copy = same_graph(graph)
    for node in graph.graph.nodes:
        if getattr(node.target, "__name__", "") == "mul":
            node.args = (node.args[0], 5)
    graph.recompile()
    assert (graph(torch.ones(1)).item(), copy(torch.ones(1)).item()) == (6.0, 3.0)
    outer = nn.Module()
    outer.inner = graph
    outer.plain = nn.ReLU()
    around = GraphModule(outer, symbolic_trace(nn.Sequential()).graph)
    around.inner, around.plain = graph, outer.plain
    node = next(iter(around.graph.nodes))
    with around.graph.inserting_after(node):
        around.graph.call_module("inner", (node,))
        around.graph.call_module("plain", (node,))
    copied = same_graph(around)
    assert copied.inner is not graph
    assert copied.plain is outer.plain
