"""The loss of a host, by its cable or its agent: a cause of its own, reported soon; it may come back."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from suites.selftest.hosts.bed import Bed, two_hosts
from suites.selftest.project import Run, processes_with, wait_for

GONE_WITHIN = 3.0
"""Seconds until the kernel gives up a host that is silent."""
MACHINE_IS_BUSY = 30.0
"""Seconds more that it may take, with a deadline of 60 s for a test that nothing ends."""


@dataclass
class Loser:
    """Loses host b, and brings it back, where the tests of the project say that they have come so far."""

    bed: Bed
    node_0: subprocess.Popen[str]
    other: subprocess.Popen[str]

    by_cable: bool = False

    def lose(self, place: str, *, by_cable: bool = False) -> None:
        """Lose it by its agent or, if that can be done here, by its cable."""
        self._wait(place)
        self.by_cable = by_cable and bool(self.bed.namespaces)
        if self.by_cable:
            self.bed.set_cable("down")
        else:
            self.other.kill()
            # Its ranks end after it: until then a test on them may pass, and rightly.
            theirs = str(self.bed.directory(1) / "tmp")
            wait_for(lambda: not processes_with(theirs), "no process of host b is left", 60)
        self._go_on(place)

    def bring_back(self, place: str) -> None:
        self._wait(place)
        if self.by_cable:
            self.other.wait(60)  # it has noticed that node 0 is gone
            self.bed.set_cable("up")
        self.other = self.bed.by_hand(1)
        wait_for(lambda: "serves ranks to a" in self.bed.output(self.other), "host b is taken in again", 60)
        self._go_on(place)

    def _wait(self, place: str) -> None:
        sign = self.bed.directory(0) / f"{place}.reached"
        wait_for(lambda: sign.exists() or self.node_0.poll() is not None, f"a test has come to {place}", 120)

    def _go_on(self, place: str) -> None:
        for host in range(2):
            (self.bed.directory(host) / place).touch()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One session in which host b is lost three times, and is back twice."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path), warm=True) as bed:
        bed.copy("hosts_lost")
        other = bed.by_hand(1)
        node_0 = bed.by_hand(0, "--junitxml=report.xml", "-o", "junit_family=xunit1")
        loser = Loser(bed, node_0, other)
        loser.lose("lost in a collective", by_cable=True)
        loser.bring_back("back")
        loser.lose("lost between tests")
        loser.bring_back("back again")
        loser.lose("lost as it starts", by_cable=True)
        ended = bed.end(node_0)
        yield Run(bed.directory(0), ended.statuses[0], ended.output)
        if bed.namespaces:
            bed.set_cable("up")
        loser.other.wait(60)
        bed.assert_nothing_is_left()


def text(run: Run, name: str) -> str:
    (failed,) = [child for child in run.case(name) if child.tag in ("failure", "error")]
    return failed.text or ""


def test_the_loss_of_a_host_in_a_collective_is_the_cause(run: Run) -> None:
    lines = text(run, "test_lost_in_a_collective").splitlines()
    assert lines[0] == "host b is gone: ranks 2, 3"
    assert re.fullmatch("rank [23] of 4 .host b. was lost: host b is gone", lines[1])
    assert run.outcome("test_lost_in_a_collective") == "failure"
    assert float(run.case("test_lost_in_a_collective").attrib["time"]) < GONE_WITHIN + MACHINE_IS_BUSY


def test_tests_on_other_hosts_go_on(run: Run) -> None:
    assert run.outcome("test_on_one_host") == "passed"
    assert run.outcome("test_on_one_host_at_the_end") == "passed"


def test_a_test_that_needs_the_lost_host_fails_with_that_sentence(run: Run) -> None:
    assert "host b is gone" in text(run, "test_needs_the_lost_host")
    assert "host b is gone" in text(run, "test_on_a_warm_world_of_the_lost_host")
    assert float(run.case("test_needs_the_lost_host").attrib["time"]) < GONE_WITHIN + MACHINE_IS_BUSY


def test_a_host_lost_as_a_world_starts_is_named(run: Run) -> None:
    assert "host b is gone" in text(run, "test_lost_while_its_world_starts")


def test_a_host_that_is_back_is_taken_in_again(run: Run) -> None:
    assert run.outcome("test_on_the_host_that_is_back") == "passed"
    assert run.outcome("test_on_the_host_that_is_back_again") == "passed"
