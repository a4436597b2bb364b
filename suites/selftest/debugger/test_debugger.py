"""`--rank-pdb RANK`: a debugger in one rank, on the user's terminal, while the other ranks wait for it."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import PROJECTS, WITHOUT_PLUGINS, copy_project, processes_with, wait_for
from suites.selftest.warm_pytest import WarmPopen, run_module

if TYPE_CHECKING:
    from lockstep.rank.world_fixture import RankWorld
    from suites.selftest.project import Project

PROMPT = "(Pdb) "
STARTER = PROJECTS / "debugger" / "start.py"
STOPS_AT_BREAKPOINT = sys.version_info >= (3, 13)
"""Whether `breakpoint()` stops at its own line, and not at the next one."""
HOLD = 0.8
"""Seconds at a prompt: more than the deadline of the tests, and than other ranks get after a failure."""


@dataclass
class Conversation:
    """A pytest run on a terminal of its own, and what the user reads there and types."""

    path: Path
    terminal: int
    process: subprocess.Popen[bytes]
    text: str = ""
    answers: dict[str, str] = field(default_factory=dict)

    def read_until(self, sign: str, seconds: float = 40) -> str:
        """Return what appears until `sign` does, which is at the end of it."""
        until = time.monotonic() + seconds
        begin = len(self.text)
        while not self.text[begin:].endswith(sign):
            ready, _, _ = select.select([self.terminal], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no {sign!r} within {seconds} s of:\n{self.text}"
            self.text += os.read(self.terminal, 1).decode(errors="replace")
        return self.text[begin:]

    def ask(self, line: str) -> str:
        """Type a line; return the answer that stands before the next prompt."""
        os.write(self.terminal, f"{line}\n".encode())
        answer = self.read_until(PROMPT).removesuffix(PROMPT)
        return answer.replace("\r", "").partition(f"{line}\n")[2].strip()

    def read_to_the_end(self) -> None:
        while True:
            try:
                said = os.read(self.terminal, 4096)
            except OSError:  # the other end is closed
                return
            self.text += said.decode(errors="replace")


def start(path: Path, *args: str) -> Conversation:
    """Run pytest as the leader of a session whose terminal is a new one."""
    master, slave = os.openpty()
    command = [sys.executable, str(STARTER), os.ttyname(slave), "-p", "no:cacheprovider", "--color=no"]
    process = subprocess.Popen(
        [*command, *args],
        cwd=path,
        env={**os.environ, "TERM": "dumb", "TMPDIR": str(path / "tmp")},
        stdin=slave,
        start_new_session=True,
    )
    os.close(slave)
    return Conversation(path, master, process)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversation]:
    path = tmp_path_factory.mktemp("talk")
    copy_project("debugger", path)
    (path / "tmp").mkdir()
    talk = start(path, "--rank-pdb", "1")
    echo = termios.tcgetattr(talk.terminal)
    try:
        hold_a_conversation(talk)
        assert termios.tcgetattr(talk.terminal) == echo
        yield talk
    finally:
        talk.process.kill()
        talk.process.wait(10)
        os.close(talk.terminal)


def stop(talk: Conversation) -> str:
    """Continue to the next breakpoint, and to the line behind it, where Python before 3.13 stops at once."""
    at = talk.ask("c")
    return talk.ask("n") if STOPS_AT_BREAKPOINT else at


def hold_a_conversation(talk: Conversation) -> None:
    answers = talk.answers
    answers["opening"] = talk.read_until(PROMPT)
    time.sleep(HOLD)
    answers["rank"] = talk.ask("p world.rank, word")
    os.write(talk.terminal, b"p 'half a li\x03")
    answers["interrupt"] = talk.read_until(PROMPT)
    answers["peers"] = talk.ask("p meet()")
    answers["set-up"] = talk.ask("c")
    answers["fixture"] = talk.ask("p inside")
    answers["call"] = talk.ask("c")
    answers["tear-down"] = talk.ask("c")
    time.sleep(HOLD)
    answers["go"] = talk.ask("p open('go', 'w').close()")
    time.sleep(HOLD)
    answers["breakpoint"] = stop(talk)
    time.sleep(HOLD)
    answers["step"] = talk.ask("n")
    answers["set_trace"] = stop(talk)
    answers["ranks"] = talk.ask("p ranks")
    answers["case"] = talk.ask("c")
    answers["n"] = talk.ask("p n, world.rank")
    answers["last"] = talk.ask("c")
    time.sleep(HOLD)
    answers["patience"] = talk.ask("p world.rank")
    os.write(talk.terminal, b"q\n")
    talk.read_to_the_end()
    talk.process.wait(20)


def report_of(talk: Conversation, name: str) -> list[str]:
    """The lines that stand under a test's name in the final report."""
    final = talk.text.replace("\r", "").partition("= ERRORS =")[2]
    pieces = re.split(r"^_{3,} (.*) _{3,}$", final, flags=re.MULTILINE)
    return pieces[pieces.index(name) + 1].strip().splitlines()


def test_a_failure_opens_the_debugger_where_it_was_raised(talk: Conversation) -> None:
    assert '-> assert world.rank == 0, "the news"' in talk.answers["opening"]
    assert "AssertionError: the news" in talk.answers["opening"]
    assert "captured stdout >" in talk.answers["opening"]
    assert talk.answers["rank"] == "(1, 'said')"


def test_the_other_rank_waits_with_its_connections_whole(talk: Conversation) -> None:
    assert talk.answers["peers"] == "2.0"
    assert report_of(talk, "test_failure")[:2] == ["rank 1 of 2 failed", "rank 0: passed"]


def test_failures_end_no_rank_while_the_debugger_is_open(talk: Conversation) -> None:
    assert talk.answers["patience"] == "1"
    assert report_of(talk, "ERROR at teardown of test_tear_down")[:2] == [
        "rank 1 of 2 failed",
        "rank 0: passed",
    ]
    assert "E       AssertionError: the other rank failed long ago" in report_of(talk, "test_quit")


def test_ctrl_c_at_the_prompt_goes_to_the_debugger(talk: Conversation) -> None:
    assert talk.answers["interrupt"].replace("\r", "").endswith("--KeyboardInterrupt--\n(Pdb) ")


def test_a_debugged_failure_is_reported_and_the_next_test_passes(talk: Conversation) -> None:
    report = report_of(talk, "test_failure")
    assert "E       AssertionError: the news" in report
    assert report[-3:] == [
        "pytest test_it.py::test_failure -p no:cacheprovider",
        "------------------------ Captured stdout call (rank 1) -------------------------",
        "said",
    ]
    assert "\nF.\n" in talk.answers["set-up"]


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        ("set-up", '-> raise ValueError("in set-up")'),
        ("tear-down", '-> assert world.rank == 0, "in tear-down"'),
    ],
)
def test_failures_of_set_up_and_tear_down_open_the_debugger(
    talk: Conversation, phase: str, line: str
) -> None:
    assert talk.answers[phase].endswith(line)
    assert talk.answers["fixture"] == "['the', 'fixture']"


def test_breakpoints_stop_the_chosen_rank_alone(talk: Conversation) -> None:
    assert talk.answers["breakpoint"].endswith("-> ranks += meet()")
    assert talk.answers["step"].endswith("-> pytest.set_trace()  # skipped")
    assert talk.answers["set_trace"].endswith("-> assert ranks == 2")
    assert talk.answers["ranks"] == "2.0"
    assert "\n.x\n" in talk.answers["case"]  # it passed, and an expected failure opened nothing


def test_a_case_opens_the_debugger_if_it_failed_on_its_rank(talk: Conversation) -> None:
    assert talk.answers["n"] == "(10, 1)"
    assert report_of(talk, "test_cases [n=10]")[0] == "rank 1 of 2 failed"
    assert report_of(talk, "test_cases [n=0]")[0] == "rank 0 of 2 failed"


def test_a_world_without_the_debugged_rank_runs_as_always(talk: Conversation) -> None:
    assert "\nuuFF\n" in talk.answers["last"]
    assert report_of(talk, "test_world_without_that_rank")[0] == "rank 0 of 1 failed"


def test_quitting_ends_the_run_and_reports_the_test(talk: Conversation) -> None:
    assert "the user quit the debugger, which ends the run" in report_of(talk, "test_quit")
    assert "Exit: Quitting debugger" in talk.text
    assert "7 failed, 2 passed, 1 xfailed, 2 errors, 1 subtests passed in " in talk.text
    assert talk.process.returncode == pytest.ExitCode.INTERRUPTED
    assert [entry.name for entry in (talk.path / "tmp").iterdir() if "pytest-of-" not in entry.name] == []
    assert processes_with(str(talk.path / "tmp")) == []


# Commands from a pipe


def test_commands_come_from_a_pipe_and_ctrl_c_ends_the_test(tmp_path: Path) -> None:
    copy_project("debugger_from_a_pipe", tmp_path)
    process = WarmPopen(
        ["-m", "pytest", "--rank-pdb", "1", "--pdbcls", "clumsy:Clumsy"],
        cwd=tmp_path,
        env={**os.environ, **WITHOUT_PLUGINS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    steps = "n\n" * (3 if STOPS_AT_BREAKPOINT else 2)
    process.stdin.write(
        f"p 'first'\nslip\np 'second'\nc\n{steps}"
    )  # each world has to leave the others theirs
    process.stdin.flush()
    wait_for((tmp_path / "runs-1.txt").exists, "the test runs", 40)
    time.sleep(0.2)  # for the debugger to get from that line to the next
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert output.index("(Pdb) 'first'") < output.index("(Pdb) 'second'") < output.index("-> time.sleep(60)")
    assert "KeyboardInterrupt" in output.splitlines()[-2]
    slip = output.partition("- The debugger failed itself (rank 1) -")[2]
    assert "ZeroDivisionError: slipped" in slip


# Other backends

STOPS = """
import pytest, torch
import torch.distributed as dist

@pytest.mark.ranks({mark}, timeout=0.5)
def test_it(world):
    ranks = torch.ones(1)
    breakpoint()
    dist.all_reduce(ranks)
"""
PLACES = {"2, backend='shm'": (0, 2), "1024, backend='fake', as_rank=511": (511, 1024)}
"""The rank that `--rank-pdb 0` debugs, and the size of its world, by the mark of the test."""


def test_the_rank_is_debugged_on_other_backends(tmp_path: Path) -> None:
    for number, mark in enumerate(PLACES):
        (tmp_path / f"test_{number}.py").write_text(STOPS.format(mark=mark))
    steps = f"p dist.get_rank(), world.size\n__import__('time').sleep({HOLD})\nc\n"
    process = WarmPopen(
        ["-m", "pytest", "--rank-pdb", "0"],
        cwd=tmp_path,
        env={**os.environ, **WITHOUT_PLUGINS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(steps * len(PLACES), timeout=180)
    finally:
        process.kill()  # it still runs where the time was too short
    assert re.findall(r"\(Pdb\) (\(\d+, \d+\))", output) == list(map(str, PLACES.values()))
    assert process.returncode == pytest.ExitCode.OK, output


def test_a_fake_world_has_one_process_to_debug(project: Project) -> None:
    (project.path / "test_it.py").write_text(STOPS.format(mark="8, backend='fake', as_rank=5"))
    fails, refused = (project.run(*args) for args in ((), ("--rank-pdb", "5")))
    remedy = "breakpoint in rank 5 of 8: ranks have no terminal of their own; run the test with --rank-pdb 0"
    assert remedy in fails
    assert "--rank-pdb 5: there is no such rank" in refused
    assert "A fake world is one process: --rank-pdb 0 debugs it, whichever rank it stands for" in refused


# Where there is no debugger


@pytest.mark.ranks(2)
def test_a_breakpoint_without_rank_pdb_fails_with_a_remedy(world: RankWorld) -> None:
    if world.rank == 0:
        return
    with pytest.raises(pytest.fail.Exception) as caught:
        breakpoint()
    said = "breakpoint in rank 1 of 2: ranks have no terminal of their own; run the test with --rank-pdb 1"
    assert str(caught.value) == f"{os.path.relpath(__file__)}:{caught.traceback[0].lineno + 1}: {said}"
    assert not caught.value.pytrace  # the report is this line


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--rank-pdb", "-1"], "--rank-pdb -1: ranks count from 0"),
        (["--rank-pdb", "1", "--pdbcls", "pdb:Pbd"], "--pdbcls pdb:Pbd: module 'pdb' has no attribute 'Pbd'"),
    ],
)
def test_invalid_options_of_the_debugger_are_usage_errors(
    pytester: pytest.Pytester, args: list[str], error: str
) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(error)}$"):
        pytester.parseconfigure(*args)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--rank-pdb", "2"], "--rank-pdb 2: there is no such rank: the largest world has the ranks 0 to 1"),
        (
            ["--rank-pdb", "1", "-n2"],
            "--rank-pdb needs the terminal, which the processes of pytest -n do not have; leave out -n",
        ),
    ],
)
def test_a_debugger_that_no_test_can_reach_is_a_usage_error(
    tmp_path: Path, args: list[str], error: str
) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\n@pytest.mark.ranks(2)\ndef test_it(world): pass\n")
    done = run_module("pytest", *args, cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert done.stderr.strip().splitlines()[-1] == f"ERROR: {error}"
