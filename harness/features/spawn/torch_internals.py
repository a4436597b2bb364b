"""Private names of torch.multiprocessing. Seen in torch 2.13. Used in the controller and by processes.

Where torch is loaded, its modules are looked up: the module `spawn` is hidden by the function of that name.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_MODULES = ("torch.multiprocessing", "torch.multiprocessing.spawn")


def replace_parent_death_signal(request: Callable[[int], None]) -> None:
    """Let processes of `spawn` request otherwise the signal that the end of their parent sends.

    If it moves: what `_wrap` in `torch/multiprocessing/spawn.py` calls first.
    """
    for name in _MODULES:
        if (module := sys.modules.get(name)) is not None:
            vars(module)["_prctl_pr_set_pdeathsig"] = request


def code_of_wrap() -> object:
    """Return the code that runs the function of `spawn`, and sends the exception that ends it."""
    module: Any = sys.modules.get("torch.multiprocessing.spawn")
    return module and module._wrap.__code__


def index_of(target: object, args: tuple[Any, ...]) -> int | None:
    """Return the number of a process among those of a call of `spawn`, None if it is of none.

    If it moves: what `start_processes` makes a process of.
    """
    module: Any = sys.modules.get("torch.multiprocessing.spawn")
    return args[1] if module is not None and target is module._wrap else None


def function_of(target: object, args: tuple[Any, ...]) -> object:
    """Return the function that a process runs, of the user's where it is one of `spawn`."""
    return target if index_of(target, args) is None else args[0]


@contextlib.contextmanager
def start_processes_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace `start_processes`, which `spawn` looks up when it is called, by what `wrap` makes of it."""
    loaded: list[Any] = [sys.modules[name] for name in _MODULES if name in sys.modules]
    with contextlib.ExitStack() as replaced:
        for module in loaded:
            replaced.enter_context(mock.patch.object(module, "start_processes", wrap(module.start_processes)))
        yield


@contextlib.contextmanager
def joins_preceded(before: Callable[[Any], None]) -> Iterator[None]:
    """Call a function with each `ProcessContext` before that waits, without a limit, for its processes.

    `start_processes` itself waits so.
    """
    module: Any = sys.modules.get("torch.multiprocessing.spawn")
    if module is None:
        yield
        return
    original = module.ProcessContext.join

    @functools.wraps(original)
    def join(context: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if timeout is None and context.sentinels:
            before(context)
        return original(context, timeout, *args, **kwargs)

    with mock.patch.object(module.ProcessContext, "join", join):
        yield


def exited_exception(index: int, pid: int, code: int) -> Exception:
    """Return what `spawn` raises where a process has ended without an exception that it could send."""
    module: Any = sys.modules["torch.multiprocessing.spawn"]
    place = {"error_index": index, "error_pid": pid, "exit_code": code}
    if code >= 0:
        raised = module.ProcessExitedException(f"process {index} terminated with exit code {code}", **place)
    else:
        name = _name_of(-code)
        sentence = f"process {index} terminated with signal {name}"
        raised = module.ProcessExitedException(sentence, **place, signal_name=name)
    return raised  # type: ignore[no-any-return]


def raised_exception(index: int, pid: int, traceback: str) -> Exception:
    """Return what `spawn` raises where the function has raised an Exception, with the text of that."""
    module: Any = sys.modules["torch.multiprocessing.spawn"]
    text = f"\n\n-- Process {index} terminated with the following error:\n{traceback}"
    raised: Exception = module.ProcessRaisedException(text, index, pid)
    return raised


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"<Unknown signal {number}>"
