"""The secret of a run stays out of the environment that ranks and the programs of tests get."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.join_info import SECRET_VARIABLE, JoinInfo, SharedFile, WithoutSecret
from lockstep.features.hosts.launchers import NodePlace
from suites.selftest.hosts.bed import SECRET, Bed, behind_dashes, command

LOOKS = f"""
import os, pathlib, subprocess, sys, pytest

CODE = "import os; print({SECRET_VARIABLE!r} in os.environ)"


def look():
    assert {SECRET_VARIABLE!r} not in os.environ
    assert {SECRET!r}.encode() not in pathlib.Path("/proc/self/environ").read_bytes()
    assert subprocess.check_output([sys.executable, "-c", CODE], text=True) == "False\\n"


@pytest.mark.ranks(2, hosts=2)
def test_on_ranks(world):
    look()


def test_on_node_0():
    assert {SECRET_VARIABLE!r} not in os.environ
    assert subprocess.check_output([sys.executable, "-c", CODE], text=True) == "False\\n"
"""


@pytest.mark.parametrize("launcher", ["by hand", "torchrun"])
def test_tests_and_their_programs_do_not_see_it(bed: Bed, launcher: str) -> None:
    bed.write("test_looks.py", LOOKS)
    address, where = bed.addresses[0], f"{bed.addresses[0]}:{bed.port}"
    processes = []
    for host in range(2):
        if launcher == "by hand":
            line = command(host, bed, "--node", f"{host}/2", "--meet", where)
        else:
            run = ("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={host}")
            there = ("--master-addr", address, "--master-port", str(bed.port))
            line = (sys.executable, *run, *there, *command(host, bed)[1:])
        environ = {SECRET_VARIABLE: SECRET}
        processes.append(bed.start(host, *line, *behind_dashes(("-q",)), **environ))
    ended = bed.end(*processes)
    assert ended.count() == "2 passed"


def test_a_secret_that_the_user_gives_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not help to read the join info, or to leave another one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    place = NodePlace(0, 2, "srun", job="7.0")
    given = WithoutSecret(SharedFile(place), SECRET.encode())
    given.publish(JoinInfo("10.0.0.1", 4000, SECRET.encode()), 0)
    (path,) = tmp_path.rglob("hosts-srun-7.0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == ["10.0.0.1", 4000, ""]
    assert given.find(0).secret == SECRET.encode()
    with pytest.raises(LaunchError, match=f"this host was not: set {SECRET_VARIABLE}, or give --secret-file"):
        WithoutSecret(SharedFile(place), None).find(0)
    path.write_text(JoinInfo("10.0.0.9", 4000, b"the secret of a stranger").pack())
    assert given.find(0).secret == SECRET.encode()
