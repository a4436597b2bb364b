"""Hosts meet, by a launcher or by hand; node 0 runs pytest, and the others end with its status."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import lockstep
from lockstep.exceptions import LaunchError
from lockstep.features.hosts.addresses import resolve
from lockstep.features.hosts.launchers import (
    NodePlace,
    place_by_hand,
    place_of,
    refuse_launcher,
    without_launcher,
)
from lockstep.features.hosts.rendezvous import versions
from suites.selftest.hosts.bed import Bed, behind_dashes, command
from suites.selftest.project import wait_for

PROJECT = "hosts_rendezvous"
SERVES = "hosts: b, node 1 of 2, serves ranks to a\nhosts: b: pytest has ended on a with status "


def torchrun(bed: Bed, host: int, *options: str) -> subprocess.Popen[str]:
    """Start a host's part under torchrun, as its documentation has it."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *options)
    ours = command(host, bed)[1:]
    return bed.start(host, *launcher, *ours, *behind_dashes(("-q",)))


def test_by_hand_node_0_runs_pytest_and_the_other_ends_with_its_status(bed: Bed) -> None:
    bed.copy(PROJECT)
    ended = bed.run("-q", f"--junitxml={bed.path}/report.xml")
    addresses = ", ".join(f"{name} ({address})" for name, address in zip("ab", bed.addresses, strict=True))
    assert f"hosts: 2 hosts: {addresses}\n" in ended.outputs[0]
    assert ended.count() == "1 failed, 1 passed"
    assert ended.outputs[1] == f"{SERVES}1\n"
    assert ended.statuses == (1, 1)
    assert (bed.path / "report.xml").exists()


def test_torchrun_places_the_hosts_and_hands_the_secret_over(bed: Bed) -> None:
    """Under c10d, where torchrun also decides which host is node 0."""
    bed.copy(PROJECT)
    # Each says whether it serves the store: by its host name torchrun would not find that out here.
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={bed.addresses[0]}:{bed.port}", "--rdzv-id=tests")
    processes = [
        torchrun(
            *(bed, host, *meeting, "--rdzv-conf", f"is_host={1 - host}"),
            f"--local-addr={bed.addresses[host]}",
        )
        for host in range(2)
    ]
    outputs = bed.end(*processes).outputs
    first = 0 if "passed" in outputs[0] else 1
    assert "1 failed, 1 passed" in outputs[first]
    assert f"serves ranks to {'ab'[first]}" in outputs[1 - first]


SLURM = ("SLURM_JOB_ID=7", "SLURM_STEP_ID=0", "SLURM_STEP_NUM_TASKS=2", "SLURM_STEP_TASKS_PER_NODE=1(x2)")
OPEN_MPI = ("OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "PMIX_NAMESPACE=prterun-a-17@1")
HYDRA = ("PMI_SIZE=2", "MPI_LOCALNRANKS=1")
OTHERS = {
    "srun": (SLURM, "SLURM_PROCID"),
    "mpirun": (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
    "mpiexec": (HYDRA, "PMI_RANK"),
}


def variables(launcher: str, rank: int) -> dict[str, str]:
    given, name = OTHERS[launcher]
    return dict(each.split("=", 1) for each in (*given, f"{name}={rank}"))


def test_other_launchers_place_the_hosts_and_a_file_hands_the_secret_over(bed: Bed) -> None:
    bed.copy(PROJECT)
    other = bed.hosts(1, "-q", **variables("srun", 1))
    ended = bed.end(bed.hosts(0, "-q", **variables("srun", 0)), other)
    assert ended.count() == "1 failed, 1 passed"
    assert ended.outputs[1] == f"{SERVES}1\n"
    assert [*(bed.path / "home").rglob("hosts-*")] == []


def test_a_host_may_come_late_or_early(bed: Bed) -> None:
    bed.copy(PROJECT)
    first = bed.by_hand(0, "-q", "-k", "passes")
    wait_for(lambda: "waiting for node 1 of 2" in bed.output(first), "node 0 says that it waits", 60)
    assert f"node 0, a, waits at {bed.addresses[0]}:{bed.port}" in bed.output(first)
    assert bed.end(first, bed.by_hand(1)).statuses == (0, 0)


def test_a_host_that_never_comes_is_named(bed: Bed) -> None:
    ended = bed.end(bed.by_hand(0, "-q", options=("--wait", "0.5")))
    where = f"node 0, a, waits at {bed.addresses[0]}:{bed.port}"
    said = f"hosts: node 1 of 2 has not come within 0.5 s; {where}. Was it started there, and can it reach "
    assert ended.output == f"{said}this?\n"
    assert ended.statuses == (4,)


def test_a_host_that_is_terminated_while_it_waits_leaves_nothing(bed: Bed) -> None:
    first = bed.by_hand(0, "-q")
    wait_for(lambda: "waiting for node 1 of 2" in bed.output(first), "node 0 says that it waits", 60)
    first.terminate()
    assert bed.end(first).statuses == (130,)
    bed.assert_nothing_is_left()


def test_a_node_0_that_never_comes_is_named(bed: Bed) -> None:
    ended = bed.end(bed.by_hand(1, options=("--wait", "0.5")))
    assert f"hosts: node 0 cannot be reached at {bed.addresses[0]}:{bed.port}: " in ended.output
    assert ended.statuses == (4,)


def test_a_host_with_another_secret_gets_no_answer_and_node_0_goes_on_waiting(bed: Bed) -> None:
    bed.copy(PROJECT)
    first = bed.by_hand(0, "-q", "-k", "passes")
    other = bed.path / "other"
    other.write_text("another secret of tests")
    other.chmod(0o600)
    place = ("--node", "1/2", "--meet", f"{bed.addresses[0]}:{bed.port}", "--wait", "60")
    refused = bed.end(bed.hosts(1, options=(*place, "--secret-file", str(other))))
    where = f"{bed.addresses[0]}:{bed.port}"
    assert (
        refused.output
        == f"hosts: {where} has another secret, or is no host of Lockstep that listens at that address\n"
    )
    assert refused.statuses == (4,)
    assert bed.end(first, bed.by_hand(1)).statuses == (0, 0)


def test_a_secret_that_others_can_read_is_refused(bed: Bed) -> None:
    (bed.path / "secret").chmod(0o644)
    ended = bed.end(bed.by_hand(0, "-q"))
    assert (
        f"the secret {bed.path}/secret can be read by others than you (mode 644): chmod 600" in ended.output
    )
    assert ended.statuses == (4,)


def test_by_hand_a_secret_is_needed_and_a_way_to_make_one_is_said(bed: Bed) -> None:
    place = ("--node", "0/2", "--meet", f"{bed.addresses[0]}:{bed.port}")
    ended = bed.end(bed.hosts(0, "-q", options=place))
    assert ended.output.startswith(
        "hosts: --meet needs a secret that all hosts have: on one host (umask 077; "
    )
    assert ended.statuses == (4,)


def test_two_hosts_with_one_number_are_named(bed: Bed) -> None:
    bed.write(
        "test_waits.py",
        "import pathlib, time\n\ndef test_it():\n"
        "    while not pathlib.Path('go').exists():\n        time.sleep(0.02)\n",
    )
    first, second = bed.by_hand(0, "-q"), bed.by_hand(1)
    wait_for(lambda: "serves" in bed.output(second), "the second host has met the first", 60)
    third = bed.end(bed.by_hand(1))
    (bed.directory(0) / "go").touch()
    assert "hosts: node 1 is b (" in third.output
    assert "already: b (" in third.output
    assert third.statuses == (4,)
    assert bed.end(first, second).statuses == (0, 0)


def test_another_version_of_lockstep_is_refused_on_both(bed: Bed, tmp_path: Path) -> None:
    """A host that has another torch, say: by a module that changes what a host says of itself."""
    code = "from lockstep.features.hosts import rendezvous\nrendezvous._version = '{} 0.0'.format\n"
    (bed.directory(1) / "sitecustomize.py").write_text(code)
    other = bed.by_hand(1, PYTHONPATH=str(bed.directory(1)))
    ended = bed.end(bed.by_hand(0, "-q"), other)
    for output in ended.outputs:
        assert "hosts: b has torch torch 0.0, and node 0, a, has " in output
        assert output.endswith(": install the same on both\n")
    assert ended.statuses == (4, 4)


def test_every_file_of_lockstep_counts_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    versions()
    assert {*read} == {*Path(str(lockstep.__file__)).parent.rglob("*.py")}


# What the variables say


def test_torchrun_says_the_place_and_its_store() -> None:
    environ = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **variables("srun", 0),  # srun has started torchrun
    }
    assert place_of(environ) == NodePlace(1, 3, "torchrun", job="x", store=("10.0.0.1", 29500))


@pytest.mark.parametrize(
    ("launcher", "job"), [("srun", "7.0"), ("mpirun", "prterun-a-17@1"), ("mpiexec", "")]
)
def test_other_launchers_say_the_place_and_the_job(launcher: str, job: str) -> None:
    assert place_of(variables(launcher, 1)) == NodePlace(1, 2, launcher, job=job)


def test_pytest_gets_no_variable_of_a_launcher_that_another_one_has_started() -> None:
    environ = variables("srun", 0) | variables("mpirun", 0) | {"HOME": "/home/me", "SLURM_JOB_ID": "7"}
    assert place_of(without_launcher(environ)) is None
    assert {"HOME", "SLURM_JOB_ID"} <= without_launcher(environ).keys()


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_no_host_listens_at_all_interfaces(address: str) -> None:
    with pytest.raises(LaunchError, match="stands for all interfaces"):
        resolve(address)


@pytest.mark.parametrize("name", ["a..b", "é" * 300, "\udcff"])
def test_a_name_that_no_host_can_have_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match="is no name that a host can have: give its address"):
        resolve(name)


def test_no_launcher_has_started_a_process_without_their_variables() -> None:
    assert (
        place_of({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None
    )  # in a batch script
    assert place_of({"RANK": "0", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "a/b", "0/0"])
def test_a_wrong_node_is_refused(text: str) -> None:
    with pytest.raises(
        LaunchError, match="give the host's number, from 0, and how many there are: --node 0/2"
    ):
        place_by_hand(text)


@pytest.mark.parametrize(
    ("environ", "remedy"),
    [
        (
            variables("srun", 0),
            "srun has started 2 .*: srun --ntasks-per-node=1 python -m lockstep hosts -- ARG",
        ),
        (
            variables("mpirun", 1),
            "mpirun has started 2 .*: mpirun -npernode 1 python -m lockstep hosts -- ARG",
        ),
        (variables("mpiexec", 1), "mpiexec has started 2 .*: mpiexec -ppn 1 python -m lockstep hosts -- ARG"),
        (
            variables("srun", 0) | {"SLURM_STEP_TASKS_PER_NODE": "2"},
            "pytest starts the ranks itself: pytest ARG",
        ),
    ],
)
def test_tests_on_ranks_are_refused_in_each_process_of_a_launcher(
    environ: Mapping[str, str], remedy: str
) -> None:
    with pytest.raises(pytest.UsageError, match=remedy):
        refuse_launcher(environ)


def test_one_process_of_a_launcher_is_as_good_as_none() -> None:
    refuse_launcher(variables("srun", 0) | {"SLURM_STEP_NUM_TASKS": "1"})
    refuse_launcher({})


def test_torchrun_with_several_processes_a_host_is_refused_with_the_line_to_type(project) -> None:  # type: ignore[no-untyped-def]
    project.write("def test_it(world): pass\n")
    ranks = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    output = project.run("-q", environ=ranks)
    assert (
        output.count("torchrun has started 4 processes, and each would run every test on ranks of its own")
        == 1
    )
    assert "torchrun --nnodes N --nproc-per-node 1 ... -m lockstep hosts -- ARGUMENTS" in output
    hosts = subprocess.run(
        [sys.executable, "-m", "lockstep", "hosts"],
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        check=False,
    )
    assert hosts.returncode == 4
    assert "torchrun has started 2 processes on a host, and one is enough" in hosts.stderr


def test_the_join_info_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.features.hosts.join_info import JoinInfo, SharedFile

    monkeypatch.setenv("HOME", str(tmp_path))
    way = SharedFile(NodePlace(0, 2, "srun", job="7.0"))
    way.publish(JoinInfo("10.0.0.1", 4000, b"secret"), until=0)
    (path,) = tmp_path.rglob("hosts-srun-7.0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SharedFile(NodePlace(1, 2, "srun", job="7.0")).find(0) == JoinInfo("10.0.0.1", 4000, b"secret")
    way.close()
    assert not path.exists()
