"""The kinds of test classes that are converted, and the facts about torch's and DeepSpeed's bases of them.

Names and facts of torch 2.13 (`torch/testing/_internal`, private: look there when a base moves) and of
DeepSpeed 0.19 (`tests/unit/common.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class LauncherKind:
    """A base class with a launcher of its own.

    Attributes:
        name: name of the base class.
        size: the world size where a class sets none; None: it depends on the number of GPUs.
        asked: what to ask the user about the size, if it depends on GPUs.
        spawns: whether its own `setUp` starts the processes.
        attributes: attributes that it gives to a test, with what replaces them; `{}` is the world.
        calls: replacements of methods without arguments that matter.
        needs_gpus: whether its launcher skips where there are fewer accelerators than ranks.
    """

    name: str
    size: int | None = 4
    asked: str = ""
    spawns: bool = True
    attributes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    calls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    needs_gpus: bool = False

    @property
    def is_deepspeed(self) -> bool:
        return self.name == "DistributedTest"

    @property
    def joins(self) -> bool:
        """True if the launcher joins the process group, and not the test."""
        return self.name.startswith("FSDPTest") or self.is_continuous

    @property
    def is_continuous(self) -> bool:
        return "Continuous" in self.name or "Continous" in self.name


_RANK = {"rank": "{}.rank", "world_size": "{}.size"}
_PER_GPU = "torch takes one rank for each GPU here"
_FSDP = {**_RANK, "process_group": "{}.group"}
_DTENSOR = {**_RANK, "device_type": "{}.device.type", "backend": "{}.backend"}
_MESH = {"build_device_mesh": "{}.mesh()"}
_FOUR = "torch takes 4 ranks, or one for each GPU where there are fewer"

KINDS: Mapping[str, LauncherKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            LauncherKind("MultiProcessTestCase", spawns=False, attributes=_RANK),
            LauncherKind("DistributedTestBase", attributes=_RANK),
            LauncherKind("FSDPTest", None, _PER_GPU, attributes=_FSDP, needs_gpus=True),
            LauncherKind("DTensorTestBase", 4, _FOUR, attributes=_DTENSOR, calls=_MESH),
            LauncherKind("MultiProcContinuousTest", None, _PER_GPU, attributes={**_RANK, "pg": "{}.group"}),
            LauncherKind("MultiProcContinousTest", None, _PER_GPU, attributes={**_RANK, "pg": "{}.group"}),
            LauncherKind(
                "FSDPTestContinuous",
                None,
                _PER_GPU,
                attributes={**_FSDP, "pg": "{}.group"},
                needs_gpus=True,
            ),
            LauncherKind(
                "DTensorContinuousTestBase",
                4,
                _FOUR,
                attributes={**_DTENSOR, "pg": "{}.group"},
                calls=_MESH,
            ),
            LauncherKind("DistributedTest", 2, attributes={"world_size": "{}.size"}),
        )
    }
)

THREADED = frozenset({"MultiThreadedTestCase", "FSDPTestMultiThread", "DTensorOpTestBase"})
"""Bases with threads of one process as ranks: they stay with torch."""

LAUNCHER_METHODS = frozenset(
    {
        *("__init__", "__new__", "run", "run_test", "join_or_run", "_run", "_event_listener"),
        *(
            "_spawn_processes",
            "_fork_processes",
            "_start_processes",
            "_join_processes",
            "_check_return_codes",
        ),
        *("_check_no_test_errors", "_worker_loop", "_run_test_given_id", "_init_pg", "_current_test_name"),
        *("__call__", "_launch_procs", "_dist_run", "_launch_with_file_store"),
    }
)
"""Methods that make a class a launcher of its own. (`_init_pg` is one in MultiProcContinuousTest only.)"""

DROPPED_MEMBERS = frozenset(
    {"destroy_pg_upon_exit", "world_size", "backend_str", "reuse_dist_env"}
    | {"non_daemonic_procs", "exec_timeout", "requires_cuda_env", "init_distributed", "set_dist_env"}
)
"""Members that configure the launcher, and mean nothing to a test on ranks."""

GROUP_OPTIONS = frozenset({"opts", "timeout"})
"""Members of MultiProcContinuousTest that configure its process group."""
