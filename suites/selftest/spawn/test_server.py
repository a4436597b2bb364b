"""The server that adopted processes come from starts once, and early where a file says that it is needed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.spawn.starter import Starter

if TYPE_CHECKING:
    from suites.selftest.project import Project

STARTS = "import torch.multiprocessing\ndef on_two(run): torch.multiprocessing.spawn(run, nprocs=2)\n"
TESTS = """
import torch.distributed.tensor
from starts import on_two
def run(rank): pass
def test_one(): on_two(run)
"""
COUNT = "open('servers.txt', 'a').write('server ')\n"


def calls_and_servers(project: Project, word: str, **environ: str) -> tuple[str, int]:
    """Run a file that mentions a word; return the count of calls, and that of servers."""
    (project.path / "starts.py").write_text(STARTS)
    (project.path / "counted.py").write_text(COUNT)
    (project.path / "test_a.py").write_text(f"# {word}{TESTS}")
    project.write_ini("ranks_adopt = spawn\nranks_preload = counted\npythonpath = .")
    output = project.run("test_a.py", "--ranks-adopt-report", environ=environ)
    counted = [line for line in output.splitlines() if "of spawn" in line]
    return "; ".join(counted), len((project.path / "servers.txt").read_text().split())


@pytest.mark.parametrize("word", ["ranks that spawn", "none"])
def test_one_server_serves_a_file_that_is_an_argument(project: Project, word: str) -> None:
    assert calls_and_servers(project, word) == ("1 call of spawn on warm ranks", 1)


def test_a_server_that_seemed_needless_is_followed_by_another(project: Project) -> None:
    # "ranks" may mean that tests ask for them: none does, and the server ends before the first test.
    # The variable is one that interpreters read as they start, which these do: that of the second server is
    # compared with the test's.
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    assert calls_and_servers(project, "ranks", **environ)[0] == "1 call of spawn on warm ranks"


def test_the_pipe_that_ends_with_a_process_can_be_closed_before() -> None:
    server: Any = SimpleNamespace()
    starter = Starter(server)
    lifeline = starter.descriptors()[2]
    os.fstat(lifeline)
    starter.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(lifeline)
