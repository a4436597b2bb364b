"""The parts of runs on several hosts that need no second one: who comes where, and what is refused."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller.requests import Refusal
from lockstep.exceptions import LaunchError
from lockstep.features.hosts import command, join_info
from lockstep.features.hosts.controller import HostsController, check_options
from lockstep.features.hosts.hosts_file import (
    HOSTS,
    HostInfo,
    HostsFile,
    _gpus,
    read_hosts_file,
    this_host,
    write_hosts_file,
)
from lockstep.features.hosts.join_info import JoinInfo, SharedFile, rendezvous_point, take_secret
from lockstep.features.hosts.launchers import (
    NodePlace,
    check_one_each,
    place_by_hand,
    place_of,
    refuse_launcher,
    without_launcher,
)
from lockstep.features.hosts.wire import Credentials
from lockstep.marker import MarkError, RanksMark
from lockstep.specification import WorldKey

CREDENTIALS = Credentials(b"secret", b"run")
FIRST = HostInfo("a", "10.0.0.1", 0, 2, ("0", "1"), "/w", "/p", {"torch": "2"})
SECOND = replace(FIRST, name="b", address="10.0.0.2", port=7)


@pytest.fixture
def two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostsFile:
    hosts_file = HostsFile(CREDENTIALS, (FIRST, SECOND), {"A": "\udcff"}, ("python", "-m", "lockstep"))
    write_hosts_file(tmp_path / "hosts.json", hosts_file)
    monkeypatch.setenv(HOSTS, str(tmp_path / "hosts.json"))
    return hosts_file


def config_of(**given: Any) -> Any:
    options = {"ranks_hosts": None, "ranks_per_host": None, "ranks_shared_dir": None} | given
    return SimpleNamespace(getoption=options.get)


def spread(mark: RanksMark, backend: str = "gloo", size: int = 2, **given: Any) -> Any:
    return HostsController(config_of(**given)).pytest_ranks_spread(mark, WorldKey(size, backend, "cpu"))


# The controller


@pytest.mark.parametrize("hosts", [True, "2", 0, 2.0])
def test_a_mark_has_a_whole_number_of_hosts(hosts: Any) -> None:
    why = re.escape(f"ranks(hosts={hosts!r}): hosts is a whole number above 0")
    with pytest.raises(MarkError, match=f"^{why}$"):
        spread(RanksMark((2,), hosts=hosts))
    with pytest.raises(MarkError, match=re.escape("ranks(2, hosts=3): there are fewer ranks than hosts")):
        spread(RanksMark((2,), hosts=3))


def test_ranks_are_spread_as_the_mark_says_or_else_the_option(two_hosts: HostsFile) -> None:
    assert spread(RanksMark((2,), hosts=2)) == ((0, 1), (1, 1))
    assert spread(RanksMark((2,), hosts=1), ranks_hosts=2) == ()
    assert spread(RanksMark((2,)), ranks_hosts=2) == ((0, 1), (1, 1))
    assert spread(RanksMark((1,)), size=1, ranks_hosts=3) == ()
    assert spread(RanksMark((2,)), ranks_per_host=1) == ((0, 1), (1, 1))
    assert spread(RanksMark((3,)), "nccl", 3) == ((0, 2), (1, 1))
    lack = "5 ranks need a GPU each, the hosts of this run have 2, 2"
    assert spread(RanksMark((5,)), "nccl", 5) == Refusal("skipped", lack)
    within = Refusal("skipped", "the backend shm works within one host")
    assert spread(RanksMark((2,), hosts=2), "shm") == within
    assert spread(RanksMark((2,)), "shm") == ()


def test_hosts_without_gpus_are_filled_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (replace(FIRST, gpus=()), replace(SECOND, gpus=("0",)), replace(SECOND, gpus=("0", "1")))
    write_hosts_file(tmp_path / "hosts.json", HostsFile(CREDENTIALS, hosts, {}))
    monkeypatch.setenv(HOSTS, str(tmp_path / "hosts.json"))
    assert spread(RanksMark((3,)), "nccl", 3) == ((1, 1), (2, 2))
    assert spread(RanksMark((1,)), "nccl", 1) == ((1, 1),)


def test_a_run_without_hosts_spreads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOSTS, raising=False)
    assert spread(RanksMark((2,))) == spread(RanksMark((2,), hosts=1)) == ()
    assert spread(RanksMark((2,), hosts=2)) == Refusal("skipped", "the test needs 2 hosts, this run has 1")
    controller = HostsController(config_of())
    assert controller.pytest_ranks_command() is None
    assert controller.pytest_ranks_launcher(None, None) is None  # type: ignore[arg-type]


def test_the_command_of_a_run_on_hosts_is_repeated(two_hosts: HostsFile) -> None:
    assert HostsController(config_of()).pytest_ranks_command() == ("python", "-m", "lockstep")


def test_each_controller_shares_a_directory_of_its_own(tmp_path: Path) -> None:
    controllers = [HostsController(config_of(ranks_shared_dir=str(tmp_path))) for _ in range(2)]
    request: Any = SimpleNamespace(key=WorldKey(2, "gloo", "cpu", spread=((0, 1), (1, 1))))
    folders = [Path(each.pytest_ranks_shared_directory(request) or "") for each in controllers]
    assert [each.parent for each in folders] == [tmp_path] * 2
    assert len({*folders}) == 2
    for each in folders:
        (each / "x").mkdir(parents=True)
    controllers[0].pytest_unconfigure()
    assert [each.exists() for each in folders] == [False, True]
    request.key = WorldKey(2, "gloo", "cpu", spread=((1, 2),))
    assert controllers[0].pytest_ranks_shared_directory(request) is None
    request.key = WorldKey(2, "gloo", "cpu", spread=((0, 1), (1, 1)))
    assert HostsController(config_of()).pytest_ranks_shared_directory(request) == ""


@pytest.mark.parametrize(
    ("needs", "line"),
    [
        ([2], "1 test skipped: 2 hosts needed (python -m lockstep hosts)"),
        ([2, 2], "2 tests skipped: 2 hosts needed (python -m lockstep hosts)"),
        ([4, 2, 3], "3 tests skipped: 2 to 4 hosts needed (python -m lockstep hosts)"),
        ([], None),
    ],
)
def test_tests_that_need_more_hosts_are_counted(needs: list[int], line: str | None) -> None:
    written: list[str] = []
    reasons = [f"Skipped: the test needs {each} hosts, this run has 1" for each in needs] + ["Skipped: x"]
    skipped = [SimpleNamespace(longrepr=("x.py", 1, reason)) for reason in reasons]
    terminal: Any = SimpleNamespace(stats={"skipped": skipped}, write_line=written.append)
    summary = HostsController(config_of()).pytest_terminal_summary(terminal)
    next(summary)
    with pytest.raises(StopIteration) as over:
        summary.send("result")
    assert (over.value.value, written) == ("result", [] if line is None else [line])


def test_options_about_hosts_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOSTS, raising=False)
    check_options(config_of(ranks_hosts=1, ranks_per_host=1, ranks_shared_dir=str(tmp_path)))
    for name, option in (("ranks_hosts", "--ranks-hosts"), ("ranks_per_host", "--ranks-per-host")):
        with pytest.raises(pytest.UsageError, match=f"^{option} 0: write a whole number above 0$"):
            check_options(config_of(**{name: 0}))
    (tmp_path / "file").touch()
    with pytest.raises(pytest.UsageError, match=r"file: no such directory; make it where all hosts see it$"):
        check_options(config_of(ranks_shared_dir=str(tmp_path / "file")))
    monkeypatch.setenv(HOSTS, str(tmp_path / "gone"))
    with pytest.raises(pytest.UsageError, match="No such file"):
        check_options(config_of())


# The file of hosts


def test_a_file_of_hosts_is_read_back(two_hosts: HostsFile, tmp_path: Path) -> None:
    assert read_hosts_file() == two_hosts
    assert [each.name for each in tmp_path.iterdir()] == ["hosts.json"]
    assert (tmp_path / "hosts.json").stat().st_mode & 0o777 == 0o600


def test_a_pipe_is_no_file_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(HOSTS, str(tmp_path / "pipe"))
    with pytest.raises(LaunchError, match=re.escape("is no file of hosts (it is no regular file): unset")):
        read_hosts_file()


def test_a_host_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 1,")
    host = this_host("a", "10.0.0.1", 7, {"torch": "2"})
    assert asdict(host) | {"prefix": ""} == {
        "name": "a",
        "address": "10.0.0.1",
        "port": 7,
        "gpus": ("3", "1"),
        "cwd": os.getcwd(),
        "prefix": "",
        "versions": {"torch": "2"},
        "cpus": len(os.sched_getaffinity(0)),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _gpus() == ()


# Launchers, and what is handed over


def test_a_place_by_hand_is_below_the_number_of_hosts() -> None:
    assert place_by_hand("1/2") == NodePlace(1, 2)
    for text in ("2/2", "1", "-1/2", "1/2 ", "1/1234567890"):
        with pytest.raises(
            LaunchError, match=re.escape(f"--node {text}: give the host's number, from 0, and")
        ):
            place_by_hand(text)


def test_srun_names_the_step_of_its_job() -> None:
    environ = {
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_PROCID": "5",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3),3",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "4",
    }
    place = place_of(environ)
    assert place == NodePlace(5, 6, "srun", 3, "77.4")
    assert str(place) == "node 5 of 6"
    del environ["SLURM_STEP_ID"]
    assert place_of(environ) == NodePlace(5, 6, "srun", 3, "77")
    with pytest.raises(LaunchError, match=r"^srun has started 3 processes on a host, and one is enough"):
        check_one_each(NodePlace(5, 6, "srun", 3))
    check_one_each(NodePlace(5, 6, "srun", 1))


def test_torchrun_serves_its_store_or_node_0_does() -> None:
    environ = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    alone = NodePlace(0, 4, "torchrun", job="x", store=("h", 9), has_agent_store=False)
    assert place_of(environ) == alone
    assert place_of(environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == replace(
        alone, has_agent_store=True
    )
    del environ["MASTER_PORT"]
    with pytest.raises(LaunchError, match=r"^MASTER_PORT='' is no number, though a launcher has set it$"):
        place_of(environ)
    several = place_of(environ | {"LOCAL_WORLD_SIZE": "2"})
    assert several is not None
    assert several == NodePlace(0, 4, "torchrun", local_size=2, job="x")
    started = (
        "torchrun has started 2 processes on a host, and one is enough, which starts the ranks, "
        "--ranks-per-host of them: torchrun --nnodes N --nproc-per-node 1 ... -m lockstep hosts -- ARGUMENTS"
    )
    with pytest.raises(LaunchError, match=f"^{re.escape(started)}$"):
        check_one_each(several)
    check_one_each(replace(several, local_size=1))


def test_a_launcher_with_several_processes_is_refused_by_its_name() -> None:
    environ = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_MCA_ess_base_jobid": "7",
        "SLURM_JOB_ID": "8",
    }
    assert place_of(environ) == NodePlace(0, 4, "mpirun", 2, "7")
    said = (
        "mpirun has started 4 processes, and each would run every test on ranks of its own; pytest starts "
        "the ranks itself: {}. If no other of them runs pytest: env -u OMPI_COMM_WORLD_SIZE pytest"
    )
    for local, remedy in (
        ("2", "mpirun -npernode 1 python -m lockstep hosts -- ARGUMENTS"),
        ("4", "pytest ARGUMENTS, alone"),
    ):
        with pytest.raises(pytest.UsageError, match=f"^{re.escape(said.format(remedy))}$"):
            refuse_launcher(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": local})
    refuse_launcher(environ | {"OMPI_COMM_WORLD_SIZE": "x"})
    assert without_launcher(environ | {"A": "1", "PMIX_RANK": "0"}) == {"A": "1", "SLURM_JOB_ID": "8"}


@pytest.mark.parametrize("meet", ["10.0.0.1", ":1", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "a:1x"])
def test_a_point_to_meet_at_is_an_address_and_a_port(meet: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(f"--meet {meet}: give an address of node 0 and a free")):
        rendezvous_point(meet)
    assert rendezvous_point("127.0.0.1:65535") == ("127.0.0.1", 65535)
    assert rendezvous_point("127.0.0.1:1") == ("127.0.0.1", 1)


def test_a_secret_is_read_from_a_file_of_its_owner(tmp_path: Path) -> None:
    path, environ = tmp_path / "secret", {join_info.SECRET_VARIABLE: "y" * 64, "A": "1"}
    path.write_text(f" {'x' * join_info.SHORTEST_SECRET}\n")
    path.chmod(0o600)
    assert take_secret(path, environ) == b"x" * join_info.SHORTEST_SECRET
    assert environ == {"A": "1"}
    assert take_secret(None, {}) is None
    for mode in (0o640, 0o604):
        path.chmod(mode)
        said = rf"^the secret {path} can be read by others than you \(mode {mode:o}\): chmod 600 {path}$"
        with pytest.raises(LaunchError, match=said):
            take_secret(path, {})
    with pytest.raises(LaunchError, match="is no regular file: write it to one, or set"):
        take_secret(tmp_path, {})
    path.chmod(0o600)
    path.write_text("x" * (join_info.SHORTEST_SECRET - 1) + " ")
    with pytest.raises(LaunchError, match=f"^the secret in {path} has less than"):
        take_secret(path, {})


def test_a_file_at_home_hands_the_join_info_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place, info = NodePlace(0, 2, "srun", job="7/x.1"), JoinInfo("10.0.0.1", 5, b"s")
    one, other = SharedFile(place), SharedFile(place)
    with pytest.raises(LaunchError, match=r"^node 0 has not come: no invitation in .*hosts-srun-7-x.1; "):
        other.find(0.0)
    one.publish(info, 0.0)
    assert other.find(0.0) == info
    (path,) = (tmp_path / ".cache" / "lockstep").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    other.close()
    assert path.exists()
    one.close()
    assert not path.exists()
    with pytest.raises(LaunchError, match=r"^srun gives its job no name by which hosts could find"):
        SharedFile(replace(place, job=""))
    (tmp_path / ".cache" / "lockstep").rmdir()
    (tmp_path / ".cache" / "lockstep").touch()
    with pytest.raises(LaunchError, match=r"^cannot leave the invitation in .*; give --meet and"):
        one.publish(info, 0.0)


# The command


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"node": None, "meet": None, "address": "", "name": "", "wait": 300.0} | given
    )


def test_a_place_needs_a_launcher_or_a_point_to_meet_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "place_of", lambda environ: None)
    with pytest.raises(LaunchError, match=r"^no launcher says which host this is: start it by torchrun"):
        command._place(options())
    with pytest.raises(LaunchError, match=r"^--node needs --meet ADDRESS:PORT: where node 0 waits"):
        command._place(options(node="0/2"))
    with pytest.raises(LaunchError, match=r"^node 0 of 1025: a run has at most 1024 hosts; start fewer$"):
        command._place(options(node="0/1025", meet="x"))
    assert command._place(options(node="0/1024", meet="x", wait=0.0)) == NodePlace(0, 1024)
    for wait in (-1.0, 1e7, float("nan")):
        with pytest.raises(LaunchError, match=r"^--wait .*: give seconds from 0 to 1e\+06: --wait 300$"):
            command._place(options(node="0/2", meet="x", wait=wait))
    assert command._place(options(node="0/2", meet="x", wait=1e6)).nodes == 2
    monkeypatch.setattr(command, "place_of", lambda environ: NodePlace(1, 2, "srun"))
    assert command._place(options()) == NodePlace(1, 2, "srun")


def test_a_point_to_meet_at_needs_a_secret_and_an_address_of_node_0() -> None:
    assert command._by_hand(options(), b"s") is None
    assert command._by_hand(options(meet="127.0.0.1:9"), b"s") == JoinInfo("127.0.0.1", 9, b"s")
    with pytest.raises(LaunchError, match=r"^--meet needs a secret that all hosts have: on one host "):
        command._by_hand(options(meet="127.0.0.1:9"), None)
    why = r"^--meet 192.0.2.1:9: 192.0.2.1 is no address of this host, which is node 0$"
    with pytest.raises(LaunchError, match=why):
        command._lead(NodePlace(0, 2), options(meet="192.0.2.1:9"), b"s")
    with pytest.raises(LaunchError, match=r"^--address 192.0.2.1 is no address of this host$"):
        command._serve(NodePlace(1, 2), options(meet="127.0.0.1:9", address="192.0.2.1"), b"s")


def test_node_0_waits_at_the_address_that_leads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "address_towards", lambda address: f"towards {address}")
    found = {"one": "10.0.0.9", "store": "10.0.0.1", "loop": "127.0.1.1"}

    def resolve(name: str) -> str:
        if name not in found:
            raise LaunchError("unknown")
        return found[name]

    monkeypatch.setattr(command, "resolve", resolve)
    place = NodePlace(0, 2)
    assert command._own_address(place, "one") == "10.0.0.9"
    assert command._own_address(replace(place, store=("store", 1)), "") == "towards 10.0.0.1"
    for name, address in (("one", "10.0.0.9"), ("loop", "towards 192.0.2.1"), ("no", "towards 192.0.2.1")):
        monkeypatch.setattr(command.socket, "gethostname", lambda name=name: name)
        assert command._own_address(place, "") == address


def test_a_host_is_named_after_its_option_its_name_or_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "versions", dict)
    named = "node-7.cluster"
    monkeypatch.setattr(command.socket, "gethostname", lambda: named)
    assert command._this_host("x", "10.0.0.1", 3).name == "x"
    assert command._this_host("", "10.0.0.1", 3).name == "node-7"
    named = ""
    host = command._this_host("", "10.0.0.1", 3)
    assert (host.name, host.address, host.port) == ("10.0.0.1", "10.0.0.1", 3)
