"""Output of ranks that is shown while tests run, with the rank before each line."""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING

import pytest

from lockstep.rank.live import PrefixedStream

if TYPE_CHECKING:
    from suites.selftest.project import Project


@pytest.fixture(scope="module")
def live(shared_project: Project) -> list[str]:
    """The lines of a session in which pytest captures, with live logs, a log file and a list of set-ups."""
    shared_project.copy("live")
    logs = ("--log-cli-level=INFO", "--log-file=log.txt", "--log-file-level=DEBUG")
    return shared_project.run("-v", "--setup-show", *logs).splitlines()


@pytest.mark.parametrize("rank", [0, 1])
def test_live_logs_stand_before_the_outcome(live: list[str], rank: int) -> None:
    line = live.index(f"rank {rank}: INFO     mine:test_live.py:22 info by {rank}")
    passed = next(number for number, text in enumerate(live) if "test_a PASSED" in text)
    assert line < passed
    assert not any("debug" in text for text in live)


def test_live_logs_of_a_fake_world_name_its_rank(live: list[str]) -> None:
    assert any(line.startswith("rank 63: INFO") and line.endswith("info by 63") for line in live)


def test_a_forked_child_that_logs_goes_on(live: list[str]) -> None:
    assert any("test_in_a_fork PASSED" in line for line in live)


@pytest.mark.usefixtures("live")
def test_the_log_file_has_records_of_all_ranks(shared_project: Project) -> None:
    lines = (shared_project.path / "log.txt").read_text().splitlines()
    found = sorted(line for line in lines if "test_live.py" in line and line[5] in "01")
    assert found == [
        "rank 0: DEBUG    mine:test_live.py:23 debug",
        "rank 0: INFO     mine:test_live.py:22 info by 0",
        "rank 1: DEBUG    mine:test_live.py:23 debug",
        "rank 1: INFO     mine:test_live.py:22 info by 1",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_set_ups_are_shown(live: list[str], rank: int) -> None:
    shown = [line.strip() for line in live if line.startswith(f"rank {rank}: ") and "mine:" not in line]
    assert shown[:4] == [
        f"rank {rank}: SETUP    S world",
        f"rank {rank}:         SETUP    F thing (fixtures used: world)",
        f"rank {rank}:         test_live.py::test_a (fixtures used: request, thing, world)",
        f"rank {rank}:         TEARDOWN F thing",
    ]


def test_pytest_s_logging_can_be_left_out(project: Project) -> None:
    project.copy("live")
    output = project.run("-p", "no:logging", "test_live.py::test_a")
    assert "1 passed" in output


@pytest.mark.parametrize("option", ["-s", "--capture=tee-sys", "-pno:capture"])
def test_lines_that_ranks_print_have_their_number(project: Project, option: str) -> None:
    project.copy("live")
    output = project.run(option, "test_live.py::test_a")
    assert "1 passed" in output
    printed = [line.removeprefix("test_live.py ") for line in output.splitlines()]
    for rank in (0, 1):
        of_rank = [line for line in printed if line.startswith(f"rank {rank}: ")]
        assert of_rank == [f"rank {rank}: {text} {rank}" for text in ("first", "second", "to stderr")]


def test_a_line_that_is_flushed_in_parts_has_one_prefix() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    stream.write("half")
    assert below.getvalue() == ""
    stream.flush()
    stream.write(" and half\n\nwhole\n")
    stream.flush()
    assert below.getvalue() == "rank 3: half and half\nrank 3: \nrank 3: whole\n"


def test_a_line_that_a_test_leaves_unfinished_ends_with_it() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    for text in ("no end", "", "next\n"):
        stream.write(text)
        stream.end_line()
    assert below.getvalue() == "rank 3: no end\nrank 3: next\n"


def test_what_a_thread_prints_meanwhile_is_not_lost() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    other = threading.Thread(target=stream.write, args=["of the other\n"])

    class Interrupted(str):
        """A text at whose addition to what was printed another thread prints."""

        def __radd__(self, begun: str) -> str:
            other.start()
            other.join(0.2)
            return begun + str(self)

    stream.write("begun, ")
    stream.write(Interrupted("ended\n"))
    other.join()
    assert below.getvalue() == "rank 3: begun, ended\nrank 3: of the other\n"


FINALISERS = """
import gc, logging

records = []

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        if records:
            records.pop()
            Cycle()
            logging.getLogger("mine").info("of a finaliser")

def test_a(world):
    thresholds = gc.get_threshold()
    records.extend(range(40))
    Cycle()
    gc.set_threshold(1)
    try:
        for number in range(40):
            logging.getLogger("mine").info("of the test")
    finally:
        gc.set_threshold(*thresholds)
        records.clear()
"""


def test_a_finaliser_may_log_while_a_record_is_sent(project: Project) -> None:
    project.write(FINALISERS)
    output = project.run("--log-cli-level=INFO", "--world-timeout=15")
    assert "1 passed" in output
    for rank in (0, 1):
        shown = [line for line in output.splitlines() if line.startswith(f"rank {rank}: INFO")]
        assert len([line for line in shown if line.endswith("of the test")]) == 40
        assert any(line.endswith("of a finaliser") for line in shown)
