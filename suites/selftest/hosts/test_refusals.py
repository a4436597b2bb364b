"""A wrong option is refused in one sentence, with what to do and an exit status; nothing hangs."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import addresses
from lockstep.features.hosts.hosts_file import HOSTS, read_hosts_file
from lockstep.features.hosts.join_info import SECRET_VARIABLE, SHORTEST_SECRET, JoinInfo, take_secret, unpack
from lockstep.features.hosts.launchers import place_of
from suites.selftest.project import Project

SECRET = {SECRET_VARIABLE: "a secret of tests, and of nothing else"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def hosts(*arguments: str, **environ: str) -> tuple[int, str]:
    """Return the exit status of a host's part, and what it has printed."""
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "hosts", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def wait(seconds: str) -> tuple[list[str], str]:
    arguments = ["--node", "1/2", "--meet", "127.0.0.1:9", "--wait", seconds]
    return arguments, f"--wait {seconds}: give seconds from 0 to 1e+06: --wait 300"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        *(
            (
                ["--node", "0/2", "--meet", f"127.0.0.1:{port}"],
                f"--meet 127.0.0.1:{port}: give an address of node 0 and a free port there (1 to 65535): "
                "--meet 10.0.0.1:29400",
            )
            for port in ("99999", "0", "²", "٣")
        ),
        *map(wait, ("nan", "inf", "-1", "1e+300")),
        (["--node", "0/2"], "--node needs --meet ADDRESS:PORT: where node 0 waits for the others"),
        (
            [],
            "no launcher says which host this is: start it by torchrun, srun or mpirun, or give --node 0/2 "
            "--meet ADDRESS:PORT, and --node 1/2 on the other host",
        ),
        (
            ["--node", "1/2", "--meet", "127.0.0.1:9", "--wait", "1", "--address", "192.0.2.1"],
            "--address 192.0.2.1 is no address of this host",
        ),
        (
            ["--node", "0/3000000", "--meet", "127.0.0.1:9"],
            "node 0 of 3000000: a run has at most 1024 hosts; start fewer",
        ),
        (
            ["--node", "0/²", "--meet", "127.0.0.1:9"],
            "--node 0/²: give the host's number, from 0, and how many there are: --node 0/2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], sentence: str) -> None:
    assert hosts(*arguments, **SECRET) == (4, f"hosts: {sentence}\n")


def test_an_option_is_not_shortened() -> None:
    arguments = ("--node", "0/2", "--mee", "127.0.0.1:9")
    assert hosts(*arguments, **SECRET) == (
        4,
        "hosts: unknown arguments: --mee; those of pytest come behind --\n",
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError("timed out"), "no answer in time"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "no answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (OSError("no route"), "no route"),
    ],
)
def test_an_error_of_a_connection_is_named_in_words(error: OSError, words: str) -> None:
    assert addresses.words(error) == words


def test_an_address_that_other_hosts_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%eth0", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(LaunchError, match=r"^the host 'six' has no IPv4 address here, and ranks of several"):
        addresses.resolve("six")
    found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0)))  # type: ignore[arg-type]
    assert addresses.resolve("six") == "10.0.0.7"


def test_a_host_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    with pytest.raises(LaunchError, match=r"^the host 'x' is not known here: Name or service not known$"):
        addresses.resolve("x")


def test_a_host_to_which_no_interface_leads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENETUNREACH, "Network is unreachable")
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=error))
    assert addresses.address_towards("127.0.0.1") == "127.0.0.1"
    message = "no interface of this host leads to 192.0.2.1: Network is unreachable"
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        addresses.address_towards("192.0.2.1")


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    environ = {SECRET_VARIABLE: f" {'x' * (SHORTEST_SECRET - 1)} "}
    with pytest.raises(LaunchError, match=f"^the secret in {SECRET_VARIABLE} has less than "):
        take_secret(None, environ)
    assert environ == {}
    assert take_secret(None, {SECRET_VARIABLE: "x" * SHORTEST_SECRET}) == b"x" * SHORTEST_SECRET
    secret = tmp_path / "secret"
    with pytest.raises(LaunchError, match=f"^cannot read the secret {secret}: No such file or directory$"):
        take_secret(secret, {})


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        ([], "it names no host"),
        ([{"name": "a", "address": 7, "gpus": []}], "address is 7, no str"),
        ([{"name": "a", "address": "10.0.0.1", "gpus": [], "cpus": "4"}], "cpus is '4', no int"),
    ],
    ids=["none", "address", "cpus"],
)
def test_a_file_of_hosts_that_is_none_is_refused(
    listed: list[object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"hosts": listed, "secret": "00", "run": "00", "environ": {}, "command": []}))
    monkeypatch.setenv(HOSTS, str(path))
    message = f"{path}, which the variable {HOSTS} names, is no file of hosts ({problem}): unset {HOSTS}; "
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}"):
        read_hosts_file()


def test_a_secret_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"\xff" * 40)
    secret.chmod(0o600)
    place = ("--node", "1/2", "--meet", "127.0.0.1:9")
    status, output = hosts(*place, "--secret-file", str(secret))
    assert (status, output.count("\n")) == (4, 1)
    assert output.startswith(f"hosts: the secret in {secret} is no text (UTF-8): (umask 077; python -c ")
    status, output = hosts(*place, **{SECRET_VARIABLE: "\udcff" * 40})
    assert (status, output.count("\n")) == (4, 1)
    assert output.startswith(f"hosts: the secret in {SECRET_VARIABLE} is no text (UTF-8): ")


def test_a_store_of_torchrun_that_is_not_there_is_waited_for_as_long_as_asked() -> None:
    status, output = hosts("--wait", "1", **TORCHRUN)
    assert (status, output.count("\n")) == (4, 1)
    assert output.startswith("hosts: the store of torchrun at 127.0.0.1:9 handed over no invitation: ")
    assert "timed out after 1000ms" in output or "timed out after 9" in output
    assert output.endswith(". Was torchrun started on all hosts, and can they reach that?\n")


def test_a_rank_that_a_launcher_does_not_have_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"^torchrun says RANK=2, WORLD_SIZE=2$"):
        place_of({**TORCHRUN, "RANK": "2"})


def test_a_number_of_a_launcher_that_is_none_is_refused() -> None:
    with pytest.raises(LaunchError, match="RANK='²' is no number, though a launcher has set it"):
        place_of({**TORCHRUN, "RANK": "²"})


@pytest.mark.parametrize("text", ["", "[]", '["x", 1, "00"]', '["10.0.0.1", 1, "no digits"]', "{"])
def test_something_else_than_join_info_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="what the launcher hands over is no invitation"):
        unpack(text)
    join_info = JoinInfo("10.0.0.1", 1, b"secret")
    assert unpack(join_info.pack()) == join_info


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--ranks-hosts", "0", "write a whole number above 0"),
        ("--ranks-per-host", "-3", "write a whole number above 0"),
        ("--shared-dir", "nosuch", "no such directory; make it where all hosts see it"),
    ],
)
def test_an_option_about_hosts_is_checked_where_there_is_one_host(
    project: Project, option: str, value: str, remedy: str
) -> None:
    project.write("def test_it(): pass\n")
    assert f"ERROR: {option} {value}: {remedy}\n" in project.run(option, value)
