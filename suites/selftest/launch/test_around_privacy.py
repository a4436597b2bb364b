"""Privacy of runs: others on the machine can reach nothing of them, and two in one checkout do not meet."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suites.selftest.project import Project

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def sockets_of(pids: list[int]) -> set[str]:
    """Return the inodes of all sockets that these processes hold."""
    links = [os.readlink(file) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def test_two_runs_in_one_checkout_do_not_meet(project: Project) -> None:
    project.copy("meeting")
    (project.path / "conftest.py").write_text("import os\nos.umask(0)\n")
    runs = [project.start(environ={"RUN": run}) for run in ("first", "second")]
    project.wait_for(
        lambda: len(project.pids("met")) == len(project.pids("met", rank=1)) == 2, "both run tests"
    )
    mine = sockets_of(project.processes())

    tables = [
        Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp", "udp6")
    ]
    bound = [line.split()[1].split(":")[0] for table in tables for line in table if line.split()[9] in mine]
    assert len(bound) >= 4  # gloo's of every rank
    assert {*bound} <= LOOPBACK
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = [words[7] for words in unix if words[6] in mine and len(words) > 7]
    assert len(names) >= 2  # the servers'
    assert {name.rsplit("/", 2)[0] for name in names} == {str(project.path / "tmp")}
    private = [entry for entry in (project.path / "tmp").iterdir() if entry.name in project.temporary_files()]
    assert len(private) == 2
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in private} == {0o700}

    (project.path / "go").touch()
    for run in runs:
        assert "1 passed" in run.communicate(timeout=120)[0]
    assert len({*project.pids("met"), *project.pids("met", rank=1)}) == 4
    project.assert_nothing_is_left()
