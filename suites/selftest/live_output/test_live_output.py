"""Output of ranks that is shown while tests run, with the rank before each line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from lockstep.features.live_output import FEATURE
from lockstep.features.live_output.rank import SentLines

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


def test_a_line_is_sent_as_it_ends_or_is_flushed() -> None:
    sent: list[str] = []
    wire = SimpleNamespace(send=lambda part: sent.append((part.feature, part.data.rank, part.data.text)))
    lines = SentLines(SimpleNamespace(world=SimpleNamespace(rank=1), wire=wire))  # type: ignore[arg-type]
    assert lines.write("a\n\nb\nbeg") == 8
    lines.flush()
    lines.write(" ")
    lines.flush()
    assert lines.write("c\n") == 2
    assert sent == [(FEATURE, 1, "a\nb"), (FEATURE, 1, "beg"), (FEATURE, 1, " c")]
