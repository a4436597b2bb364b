"""Private names of torch by which compilations are watched, each with what to look for when it moves.

Inside a rank. Seen in torch 2.13. Nothing here imports torch's compiler: most tests never do.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

TRACE = logging.getLogger("torch.__trace")
"""The logger of structured traces, whose handlers get `metadata` and `payload` of each record. If it moves:
`trace_structured` writes to it, in torch/_logging/_internal.py."""


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
    callback: Any = sys.modules.get("torch._dynamo.callback")
    if callback is not None and begin not in callback.callback_handler.start_callbacks:
        callback.callback_handler.register_start_callback(begin)
        callback.callback_handler.register_end_callback(end)


def tensor_data_variable() -> dict[str, str]:
    """Return the environment variable that inductor sets in this process as it loads C++ code.

    If it moves: `CppPythonBindingsCodeCache` in torch/_inductor/codecache.py.
    """
    guards: Any = getattr(torch._C._dynamo, "guards", None)
    pointer = getattr(guards, "_torchinductor_pyobject_tensor_data_ptr", None)
    return {} if pointer is None else {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": str(pointer)}


def name_compile_threads(name: str) -> None:
    """Name the threads in which inductor compiles kernels, which stay to the end of the process.

    If it moves: `AsyncCompile.pool` in torch/_inductor/async_compile.py, and the threads of an executor.
    """
    module: Any = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(module, "AsyncCompile", None), "pool", None)
    if pool is not None and pool.cache_info().currsize:
        for thread in getattr(pool(), "_threads", ()):
            thread.name = name


def remember_probes(remembered: Callable[[str, Callable[[], bool]], bool]) -> None:
    """Ask `remembered` before inductor compiles, loads and runs a program to see what this CPU can do.

    Args:
        remembered: gets a text that names a probe, and the probe.

    If it moves: `VecISA.check_build` in torch/_inductor/cpu_vec_isa.py.
    """
    module: Any = sys.modules.get("torch._inductor.cpu_vec_isa")
    kind: Any = getattr(module, "VecISA", None)
    check: Any = getattr(kind, "check_build", None)
    flags_of: Any = getattr(module, "_get_isa_dry_compile_fingerprint", None)
    if check is None or flags_of is None:
        return

    def check_build(isa: Any, code: str) -> bool:
        name = f"{isa} {flags_of(isa.build_arch_flags())} {code}"
        return remembered(name, lambda: bool(check(isa, code)))

    kind.check_build = check_build
