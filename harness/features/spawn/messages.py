"""Messages between the two halves of `spawn` on warm worlds. Both sides; must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.features.spawn.child import Server

FEATURE = "spawn"
TRACEBACK = "traceback"
"""Key of a failure's text, as `traceback.format_exc` gives it, from the spawned function on."""
EXIT_CODE = "exitcode"
"""Key of the exit code of a process that is ended by what the function raised; None for an Exception."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of `torch.multiprocessing.spawn`, for a rank."""

    name: str
    """Name of the function."""
    data: bytes
    """The function and its arguments, pickled."""
    environ: dict[str, str]
    argv: list[str]
    path: list[str]
    """`sys.path` of the process that has called."""
    directory: str
    server: Server
    """The server that forks the processes which the function starts itself."""
