"""Private names of torch by which compilations are watched, each with what to look for when it moves.

Inside a rank. Seen in torch 2.13. Nothing here imports torch's compiler: most tests never do.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

TRACE = logging.getLogger("torch.__trace")
"""The logger of structured traces, whose handlers get `metadata` and `payload` of each record. If it moves:
`trace_structured` writes to it, in torch/_logging/_internal.py."""


def loaded(module: str, path: str) -> Any:
    """Return what a path stands for in a module of torch; None if that is not imported, or has no such."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def hide_trace_from_root() -> None:
    """Take the logger of traces out of the tree of loggers.

    pytest adds its handlers to each logger that does not propagate. With a handler torch composes all records
    of each compilation, all graphs in all forms, and pytest keeps hundreds of empty lines for a report.
    If it moves: what pytest's `catching_logs` attaches to.
    """
    TRACE.parent, TRACE.propagate = None, True


def on_compile(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call functions before and after this process compiles, up to the next `torch.compiler.reset`.

    If it moves: what `torch._dynamo.callback` is for.
    """
    handler = loaded("torch._dynamo.callback", "callback_handler")
    if handler is not None and begin not in handler.start_callbacks:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)


def is_without_compiler(error: BaseException | None) -> bool:
    """Return whether inductor has raised an error as there is no C++ compiler.

    If it moves: what `cpp_compiler_search` in torch/_inductor/cpp_builder.py raises, and what dynamo makes of
    errors of a backend.
    """
    kind = loaded("torch._inductor.exc", "InvalidCxxCompiler")
    while error is not None and not isinstance(error, kind or ()):
        error = getattr(error, "inner_exception", None) or error.__cause__
    return error is not None


def tensor_data_variable() -> dict[str, str]:
    """Return the environment variable that inductor sets in this process as it loads C++ code.

    If it moves: `CppPythonBindingsCodeCache` in torch/_inductor/codecache.py.
    """
    pointer = loaded("torch._C._dynamo.guards", "_torchinductor_pyobject_tensor_data_ptr")
    return {} if pointer is None else {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": str(pointer)}


def name_compile_threads(name: str) -> None:
    """Name the threads in which inductor compiles kernels, which stay to the end of the process.

    If it moves: `AsyncCompile.pool` in torch/_inductor/async_compile.py, and the threads of an executor.
    """
    pool = loaded("torch._inductor.async_compile", "AsyncCompile.pool")
    if pool is not None and pool.cache_info().currsize:
        for thread in getattr(pool(), "_threads", ()):
            thread.name = name


def remember_probes(remembered: Callable[[str, Callable[[], bool]], bool]) -> None:
    """Ask `remembered` before inductor compiles, loads and runs a program to see what this CPU can do.

    Args:
        remembered: gets a text that names a probe, and the probe.

    If it moves: `VecISA.check_build` in torch/_inductor/cpu_vec_isa.py.
    """
    check = loaded("torch._inductor.cpu_vec_isa", "VecISA.check_build")
    flags_of = loaded("torch._inductor.cpu_vec_isa", "_get_isa_dry_compile_fingerprint")
    if check is None or flags_of is None:
        return

    def check_build(isa: Any, code: str) -> bool:
        name = f"{isa} {flags_of(isa.build_arch_flags())} {code}"
        return remembered(name, lambda: bool(check(isa, code)))

    loaded("torch._inductor.cpu_vec_isa", "VecISA").check_build = check_build


# Graphs on their way to a backend

WRAPPED = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Attributes of wrappers that have the module which was wrapped. If one moves: the names of parameters of a
model that was compiled, wrapped by FSDP, or by `checkpoint_wrapper`."""
_STEP = re.compile(r"(?:\._(?:modules|parameters|buffers))?\[['\"]?(\w+)['\"]?\]")


@contextmanager
def through_backends(compile_by: Callable[[Any, GraphModule, list[Any]], Any]) -> Iterator[None]:
    """Hand each graph with its backend to `compile_by`, which returns what is called in its place.

    It is where torch itself compares compiled code with the graph, once, as it compiles that. If it moves:
    what `torch._dynamo.config.verify_correctness` turns on.
    """
    from torch._dynamo import config, output_graph

    module: Any = output_graph
    theirs = output_graph.WrapperBackend
    module.WrapperBackend = lambda backend: lambda graph, inputs: compile_by(backend, graph, inputs)
    try:
        with config.patch(verify_correctness=True):
            yield
    finally:
        module.WrapperBackend = theirs


def name_of_backend(backend: Any) -> str:
    """Return the name by which `torch.compile` was asked for a backend, or that of its function.

    If it moves: what `torch._dynamo.optimize` wraps around a backend, and `DDPOptimizer` around that.
    """
    backend = getattr(getattr(backend, "__self__", None), "backend_compile_fn", backend)
    names = (getattr(backend, name, None) for name in ("_compiler_name", "compiler_name", "__name__"))
    return next((name for name in names if isinstance(name, str)), type(backend).__name__)


def same_graph(module: GraphModule) -> GraphModule:
    """Return another module with the same operations, also those of checkpoints, and the same parameters."""
    copy = GraphModule(module, deepcopy(module.graph))
    for name, inner in module.named_children():
        if isinstance(inner, GraphModule) and hasattr(copy, name):
            setattr(copy, name, same_graph(inner))
    return copy


def module_stack(node: Node) -> tuple[str, ...]:
    """Return the paths of the modules in which an operation was traced, from the outermost to the innermost.

    They begin below the module that is compiled. If it moves: `nn_module_stack` in the metadata of a node.
    """
    stack = node.meta.get("nn_module_stack") or {}
    paths = (".".join(_steps(entry[0])[1:]) for entry in stack.values())
    return tuple(path for path in paths if path)


def source_of(node: Node) -> str:
    """Return what an input of a graph is, "`blocks.0.weight`" say.

    If it moves: dynamo's `Source` of an input, by which its guards name that.
    """
    name = getattr(getattr(node, "_dynamo_source", None), "name", None)
    name = name() if callable(name) else name
    if not name:
        return f"input `{node.name}`"
    root, *steps = _steps(name)
    return f"`{'.'.join(steps if root == 'self' and steps else [root, *steps])}`"


def _steps(source: str) -> list[str]:
    """Return "self", "blocks", "0" of L['self']._modules['blocks']._modules['0'], or L['self'].blocks.0."""
    _, *steps = _STEP.sub(r".\1", source).split(".")
    return steps or [source]


def copy_of_storage(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
    """Return a tensor with the shape and strides of another one, on a copy of its memory.

    Args:
        storages: copies so far, by the address of what they are of.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    storage: Any = tensor.untyped_storage()
    if storage.data_ptr() not in storages:
        storages[storage.data_ptr()] = storage.clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())
