"""The launchers that start a process on each of several hosts, by the variables that they set.

Runs on every host, and in a pytest that such a launcher has started.
Must not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from lockstep.exceptions import LaunchError


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of this process among those that a launcher has started, or the user by hand."""

    node: int
    nodes: int
    launcher: str = ""
    """Name of the launcher; empty where the user gives the place."""
    local_size: int = 1
    """Number of processes that it has started on this host, or on another one that has more."""
    job: str = ""
    """Name of the job, the same on all hosts."""
    store: tuple[str, int] | None = None
    """Address of the TCPStore of torchrun."""
    has_agent_store: bool = True
    """True if torchrun serves that store itself, False if the process of node 0 does."""

    def __str__(self) -> str:
        return f"node {self.node} of {self.nodes}"


@dataclass(frozen=True, slots=True)
class _Launcher:
    name: str
    sign: str
    """A variable that only its processes have."""
    rank: str
    size: str
    local_size: str
    jobs: tuple[str, ...]
    """Variables with the name of the job: the first one that is set."""
    one_each: str
    """Words to type so that it starts one process a host."""
    prefixes: tuple[str, ...]
    """Prefixes of the variables that its processes have."""


_TORCHRUN = _Launcher(
    "torchrun",
    sign="TORCHELASTIC_RUN_ID",
    rank="RANK",
    size="WORLD_SIZE",
    local_size="LOCAL_WORLD_SIZE",
    jobs=("TORCHELASTIC_RUN_ID",),
    one_each="torchrun --nnodes N --nproc-per-node 1 ... -m",
    prefixes=(
        *("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_ADDR", "MASTER_PORT"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
)
# In this order: torchrun and mpirun are started by srun themselves, and mpirun leaves PMI's variables.
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher(
        "mpirun",
        sign="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        jobs=("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID"),
        one_each="mpirun -npernode 1 python -m",
        prefixes=("OMPI_", "PMIX_", "PMI_", "PRTE_"),
    ),
    _Launcher(
        "mpiexec",
        sign="PMI_SIZE",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_size="MPI_LOCALNRANKS",
        jobs=("PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
        one_each="mpiexec -ppn 1 python -m",
        prefixes=("PMI_", "MPI_LOCAL", "HYDI_", "HYDRA_"),
    ),
    _Launcher(
        "srun",
        sign="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_size="SLURM_STEP_TASKS_PER_NODE",
        jobs=("SLURM_JOB_ID",),
        one_each="srun --ntasks-per-node=1 python -m",
        prefixes=("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "PMI_", "PMIX_"),
    ),
)


def place_of(environ: Mapping[str, str]) -> NodePlace | None:
    """Return the place that a launcher says; None where none has started this process.

    Raises:
        LaunchError: its variables contradict each other.
    """
    launcher = _launcher_of(environ)
    if launcher is None:
        return None
    node, nodes = _number(environ, launcher.rank), _number(environ, launcher.size)
    if not 0 <= node < nodes:
        raise LaunchError(f"{launcher.name} says {launcher.rank}={node}, {launcher.size}={nodes}")
    step = environ.get("SLURM_STEP_ID", "") if launcher.name == "srun" else ""
    job = next((environ[name] for name in launcher.jobs if name in environ), "")
    place = NodePlace(node, nodes, launcher.name, _local_size(environ, launcher), f"{job}.{step}".rstrip("."))
    if launcher is not _TORCHRUN or place.local_size > 1:  # which is refused
        return place
    return replace(
        place,
        store=(environ.get("MASTER_ADDR", ""), _number(environ, "MASTER_PORT")),
        has_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def place_by_hand(text: str) -> NodePlace:
    """Read the place of `--node`, such as "0/2".

    Raises:
        LaunchError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise LaunchError(
            f"--node {text}: give the host's number, from 0, and how many there are: --node 0/2"
        )
    return NodePlace(int(match[1]), int(match[2]))


def check_one_each(place: NodePlace) -> None:
    """Refuse a launcher that has started several processes on a host.

    Raises:
        LaunchError: it says how to start one on each.
    """
    if place.local_size > 1:
        (launcher,) = (each for each in _LAUNCHERS if each.name == place.launcher)
        raise LaunchError(
            f"{place.launcher} has started {place.local_size} processes on a host, and one is enough, which "
            f"starts the ranks, --ranks-per-host of them: {launcher.one_each} lockstep hosts -- ARGUMENTS"
        )


def refuse_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse tests on ranks in one of several processes of a launcher: each would run all of them.

    Raises:
        pytest.UsageError: it says what to type.
    """
    launcher = _launcher_of(environ)
    if (
        launcher is None
        or not environ[launcher.size].isdecimal()
        or (size := int(environ[launcher.size])) == 1
    ):
        return
    has_hosts = _local_size(environ, launcher) < size
    remedy = f"{launcher.one_each} lockstep hosts -- ARGUMENTS" if has_hosts else "pytest ARGUMENTS, alone"
    raise pytest.UsageError(
        f"{launcher.name} has started {size} processes, and each would run every test on ranks of its own; "
        f"pytest starts the ranks itself: {remedy}. "
        f"If no other of them runs pytest: env -u {launcher.size} pytest"
    )


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables by which a launcher places its process."""
    left = dict(environ)
    while launcher := _launcher_of(left):  # srun may have started torchrun
        left = {name: value for name, value in left.items() if not name.startswith(launcher.prefixes)}
    return left


def _launcher_of(environ: Mapping[str, str]) -> _Launcher | None:
    def has_started(each: _Launcher) -> bool:
        # All of them: Slurm's PMI sets those of mpiexec but for the number on a host.
        return {each.sign, each.rank, each.size, each.local_size} <= environ.keys()

    return next(filter(has_started, _LAUNCHERS), None)


def _local_size(environ: Mapping[str, str], launcher: _Launcher) -> int:
    """Return the number of processes on the host that has most: Slurm says "2(x3),1"."""
    text = re.sub(r"\(x\d+\)", "", environ.get(launcher.local_size, "1"))
    return max((int(each) for each in text.split(",") if each.isdecimal()), default=1)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise LaunchError(f"{name}={text!r} is no number, though a launcher has set it")
    return int(text)
