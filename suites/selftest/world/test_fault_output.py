"""Output of a rank in amounts, on streams and in bytes that nobody expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

FAULTS = r"""
import os, sys
import pytest
if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

MEGABYTE = ("y" * 99 + "\n") * 10_000

def test_much_fails(world):
    for _ in range(100 * world.rank):
        os.write(1, MEGABYTE.encode())
    assert world.rank == 0, "after much"

def test_much_dies(world):
    for _ in range(100 * world.rank):
        os.write(2, MEGABYTE.encode())
    if world.rank == 1:
        os._exit(5)

def test_stdout_closed(world):
    if world.rank == 1:
        sys.stdout.close()

def test_stdout_closed_and_failed(world):
    if world.rank == 1:
        sys.stdout.close()
        raise ValueError("after closing")

def test_stderr_closed_and_aborted(world):
    if world.rank == 1:
        sys.stderr.close()
        os.abort()

def test_descriptors_closed(world):
    if world.rank == 1:
        for stream in (0, 1, 2):
            os.close(stream)

def test_descriptors_closed_and_failed(world):
    if world.rank == 1:
        os.close(1)
        os.close(2)
        raise ValueError("after closing")

def test_descriptors_closed_and_aborted(world):
    if world.rank == 1:
        os.close(1)
        os.close(2)
        os.abort()

def test_descriptors_redirected(world, tmp_path):
    if world.rank == 1:
        file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        print("elsewhere", flush=True)
        raise ValueError("after redirecting")

def test_streams_replaced(world, tmp_path):
    if world.rank == 1:
        sys.stdout = sys.stderr = open(tmp_path / "file", "w")
        raise ValueError("after replacing")

def test_streams_gone(world):
    if world.rank == 1:
        sys.stdout = sys.stderr = None
        raise ValueError("without streams")

def test_full_device(world):
    if world.rank == 1:
        file = os.open("/dev/full", os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        print("into nothing")
        raise ValueError("after filling")

def test_bytes(world):
    if world.rank == 1:
        os.write(1, b"zero \x00 escape \x1b[31m no text \xff\xfe\n")
        print("lone \udcff")
        raise ValueError("after bytes")

def test_input(world):
    if world.rank == 1:
        input()
    dist.barrier()
"""


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()


def test_much_output_hides_no_verdict(session: FaultSession) -> None:
    assert session["test_much_fails"].head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "AssertionError: after much" in session["test_much_fails"].message
    assert session["test_much_dies"].head()[:2] == ["rank 1 of 2 exited with code 5", "rank 0: passed"]


@pytest.mark.parametrize("name", ["test_much_fails", "test_much_dies"])
def test_much_output_does_not_fill_the_controller(session: FaultSession, name: str) -> None:
    assert session[name].megabytes < 100  # of the 100 that the rank wrote, times what each copy takes


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("test_stdout_closed_and_failed", "ValueError: after closing"),
        ("test_descriptors_closed_and_failed", "ValueError: after closing"),
        ("test_descriptors_redirected", "ValueError: after redirecting"),
        ("test_streams_replaced", "ValueError: after replacing"),
        ("test_streams_gone", "ValueError: without streams"),
        ("test_full_device", "ValueError: after filling"),
        ("test_bytes", "ValueError: after bytes"),
    ],
)
def test_a_failure_without_streams_is_told_like_any(session: FaultSession, name: str, what: str) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert verdict.message == f"rank 1: {what}"


@pytest.mark.parametrize("name", ["test_stderr_closed_and_aborted", "test_descriptors_closed_and_aborted"])
def test_a_death_without_streams_shows_its_line(session: FaultSession, name: str) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith("rank 1 of 2 died: SIGABRT")
    assert f"in {name}" in verdict.text


def test_closed_descriptors_alone_are_no_failure(session: FaultSession) -> None:
    assert session["test_descriptors_closed"].outcomes == ["passed"]


def test_a_closed_stdout_is_told_and_does_not_stop_pytest(session: FaultSession) -> None:
    assert session["test_stdout_closed"].outcomes == ["passed"]
    assert "sys.stdout closed" in session.output


def test_a_rank_that_reads_from_the_terminal_is_told_that_there_is_none(session: FaultSession) -> None:
    verdict = session["test_input"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "reading from stdin while output is captured" in verdict.message


def test_output_that_is_no_text_is_shown(session: FaultSession) -> None:
    assert "Captured stdout call (rank 1)" in session.output
    assert "lone" in session.output
