"""Private names of torch that a rank uses, each with what to look for when it moves. Seen in torch 2.13.

Runs inside a rank; imports torch, and messages.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lockstep.protocol import BuildLock

# The state of torch.distributed in this process: its groups, their names and members, of which torch has no
# public list. If it moves: what `dist.new_group` writes to.
_c10d: Any = dist.distributed_c10d


def process_groups() -> list[dist.ProcessGroup]:
    """Return the living process groups that this rank is a member of, the default one included."""
    return list(_c10d._world.pg_map)


def group_members() -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
    """Return the global ranks of each group of this rank, in the order of the group."""
    # A key that is a number stands for a group that this rank is no member of.
    groups = list(_c10d._world.pg_group_ranks.items())
    return [
        (group, tuple(sorted(ranks, key=ranks.get)))
        for group, ranks in groups
        if isinstance(group, dist.ProcessGroup)
    ]


def count_groups() -> int:
    """Return how many groups this process has ever made: it names the next, so ranks must agree on it."""
    return int(_c10d._world.group_count)


def set_default_store(store: dist.Store) -> None:
    """Let groups that are made from now on meet in `store`."""
    group = dist.group.WORLD
    _c10d._world.pg_map[group] = (_c10d._world.pg_map[group][0], store)


def count_collectives() -> int:
    """Return how many collectives the default group has begun, -1 if it is gone or does not count."""
    group: Any = dist.group.WORLD
    if group is None:
        return -1
    with contextlib.suppress(RuntimeError):
        return int(group._get_sequence_number_for_group())
    return -1


# What torch knows of its groups: attributes of `_world`. If one moves: what
# `dist.destroy_process_group()` clears.
_MAPS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "pg_to_tag",
    "tags_to_pg",
    "pg_coalesce_state",
)


@dataclass(frozen=True, slots=True)
class TakenGroups:
    """All that torch knew of the process groups of this process at one moment."""

    default: dist.ProcessGroup | None
    count: int
    maps: dict[str, dict[Any, Any]]

    def put_back(self) -> None:
        """Make these the groups of this process; torch forgets those it has now."""
        forget_groups()
        for name, known in self.maps.items():
            getattr(_c10d._world, name, {}).update(known)
        for group, name in self.maps["pg_names"].items():
            _c10d._register_process_group(name, group)
        _c10d._world.group_count = self.count
        _c10d._update_default_pg(self.default)

    def lend_default(self, store: dist.Store) -> dist.ProcessGroup:
        """Make torch know the default group alone, over another store; return it."""
        group, world = self.default, _c10d._world
        assert group is not None
        for name in set(_MAPS) - {"tags_to_pg"}:
            if group in self.maps[name]:
                getattr(world, name)[group] = self.maps[name][group]
        for tag, groups in self.maps["tags_to_pg"].items():
            if group in groups:
                world.tags_to_pg.setdefault(tag, []).append(group)
        world.pg_map[group] = (self.maps["pg_map"][group][0], store)
        _c10d._register_process_group(self.maps["pg_names"][group], group)
        return group

    def shut_down(self) -> None:
        """Shut down those that torch does not know now, the last ones first, as `destroy_process_group()`."""
        for group in reversed(self.maps["pg_map"]):
            if group not in _c10d._world.pg_map:
                group.shutdown()


def take_groups() -> TakenGroups:
    """Make torch forget all groups of this process, and return what it takes to put them back."""
    world = _c10d._world
    maps = {name: dict(getattr(world, name, {})) for name in _MAPS}
    taken = TakenGroups(dist.group.WORLD, world.group_count, maps)
    forget_groups()
    return taken


def forget_groups() -> None:
    """Make torch forget all groups of this process without destroying them."""
    _c10d._update_default_pg(None)
    world = _c10d._world
    for name in _MAPS:
        getattr(world, name, {}).clear()
    _c10d._unregister_all_process_groups()
    world.group_count = 0


def set_cudnn_flags(deterministic: bool, benchmark: bool) -> None:
    """Set two flags of `torch.backends.cudnn`, also where `torch.backends.disable_global_flags()` forbids it.

    torch's own modules for tests, in `torch.testing._internal`, have called that when they are imported.
    """
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_cudnn_benchmark(benchmark)


def replace_group_maker(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let `init_process_group` and `new_group` make groups by `make`; return what made them until now.

    If it moves: what both call with size, rank, ranks, backend, store, name, and options by keyword.
    """
    before: Callable[..., Any] = _c10d._new_process_group_helper
    _c10d._new_process_group_helper = make
    return before


def is_default_timeout(timeout: object, backend: str) -> bool:
    """Return whether a timeout is the one that groups of a backend have unless a test says otherwise."""
    return timeout is None or timeout == _c10d._get_default_timeout(_c10d.Backend(backend))


def replace_store_maker(make: Callable[..., dist.Store]) -> Callable[..., dist.Store]:
    """Let `env://` and `tcp://` make their stores by `make`; return what made them until now.

    If it moves: what the handlers in torch.distributed.rendezvous call for a host and a port.
    """
    module: Any = sys.modules["torch.distributed.rendezvous"]  # the package has a function of that name
    before: Callable[..., dist.Store] = module._create_c10d_store
    module._create_c10d_store = make
    return before


def wrap_init_process_group(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace `init_process_group` in the two modules that have it by what `wrap` makes of it."""
    dist.init_process_group = _c10d.init_process_group = wrap(_c10d.init_process_group)


def wrap_destroy_process_group(wrap: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Replace `destroy_process_group` in the two modules that have it by what `wrap` makes of it."""
    dist.destroy_process_group = _c10d.destroy_process_group = wrap(_c10d.destroy_process_group)


# What torch raises where it is given a group, or the name of one, that was destroyed.
_NO_GROUP = re.compile(
    "Invalid process group|resolve the process group|is not (registered|initialized in the world group)"
)


def is_for_want_of_a_group(error: BaseException) -> bool:
    """Return whether torch has raised an error as it does not know a process group, or no more."""
    return isinstance(error, RuntimeError | ValueError) and _NO_GROUP.search(str(error)) is not None


def open_lasting_pipe() -> None:
    """Open the pipe that the first server of a TCPStore opens, for good: it is no test's.

    libuv makes it once in a process. If it moves: `ranks_leaks = error` fails the first test with a TCPStore.
    """
    with contextlib.suppress(RuntimeError):  # no loopback: then no test has a server there
        timeout = datetime.timedelta(seconds=1)
        dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout, wait_for_workers=False)


_KEYS = {"pg_id", "process_group", "time_created_ns", "collective_seq_id", "is_p2p", "retired"}


def recorded_collectives() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder; none where their format is not the one known here.

    Each backend has a recorder of its own. If it moves: `torch.distributed.flight_recorder` reads the same.
    """
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json")
    try:
        entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
    except ValueError:  # without entries a report has stacks alone
        return []
    return [entry for entry in entries if entry.keys() >= _KEYS]


def recorded_calls() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder with the Python stack of each, as `recorded_collectives`.

    torch takes the stacks in any case; naming their lines takes 10 microseconds an entry. For the pickle
    that it returns them in, see `torch.distributed.flight_recorder.components.loader`.
    """
    nccl = dist.is_initialized() and "nccl" in dist.get_backend()
    name = "_dump_nccl_trace" if nccl else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    if dump is None:
        return recorded_collectives()
    try:
        with _without_inductor():
            entries: list[dict[str, Any]] = pickle.loads(dump(True, True, False)).get("entries", [])
    except (ValueError, EOFError, pickle.UnpicklingError):  # of a name that is no text: without stacks then
        return recorded_collectives()
    return [entry for entry in entries if entry.keys() >= _KEYS]


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """Keep torch from importing its compiler, for seconds, only to ask which code that has made.

    As it names the lines of stacks, torch looks for `torch._inductor.codecache`, and the first part of that
    name is a lazy import. If it moves: a stack of a rank that is asked for its flight record shows imports.
    """
    absent = object()
    if "torch._inductor" not in sys.modules:
        vars(torch).setdefault("_inductor", absent)
    try:
        yield
    finally:
        if vars(torch).get("_inductor") is absent:
            del torch._inductor


def phases_by_code() -> dict[tuple[str, str], str]:
    """Return by file and function, as stacks have them, the phase of a training step that it runs.

    The functions are public; those that torch wraps or renames are found by their code.
    """
    step = torch.optim.Optimizer.profile_hook_step(lambda *_: None)  # what wraps `step` of all optimizers
    found: dict[Callable[..., Any], str] = {
        torch.autograd.backward: "backward",
        torch.autograd.grad: "backward",
        step: "optimizer",
        torch.nn.Module.__call__: "forward",
    }
    codes = {function.__code__: phase for function, phase in found.items()}
    return {(code.co_filename, code.co_name): phase for code, phase in codes.items()}


def build_locks() -> tuple[BuildLock, ...]:
    """Return the locks of `torch.utils.cpp_extension` that are held or waited for in this process.

    Each is in a local variable of torch's, on a thread that runs: only the collector can name it. If it
    moves: what `cpp_extension._jit_compile` acquires before it builds.
    """
    if (module := sys.modules.get("torch.utils.file_baton")) is None:
        return ()
    batons = [each for each in gc.get_objects() if type(each) is module.FileBaton]
    paths = {str(each.lock_file_path): each.fd is not None for each in batons}
    return tuple(BuildLock(path, is_held) for path, is_held in paths.items() if os.path.exists(path))


def show_freed_tensors() -> None:
    """Let the repr of a tensor whose memory was given back say so.

    torch's reads it and ends the process, and pytest shows the arguments of each frame of a failure: FSDP
    frees unsharded parameters with `resize_(0)`. If it moves: what `repr(torch.empty(2))` calls.
    """
    plain: Any = torch.Tensor.__repr__

    @functools.wraps(plain)
    def show(tensor: torch.Tensor, **kwargs: Any) -> str:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_freed(tensor):
            return f"tensor(<freed>, size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        return str(plain(tensor, **kwargs))

    torch.Tensor.__repr__ = show  # type: ignore[assignment]


def _is_freed(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return False
    with contextlib.suppress(RuntimeError):  # of one inside of a transform, which has no memory of its own
        return tensor.untyped_storage().nbytes() == 0
    return False
