"""The hang of processes that a test has started, from the stacks of each. Runs in the controller."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lockstep.protocol import RankStatus
from lockstep.tracebacks import is_installed, parse
from lockstep.world.diagnosis import Diagnosis, named, place_of

REPORT = "ranks_report"
"""Attribute of an exception: the report of the ranks that it comes from."""
_OF_COLLECTIVES = "/torch/distributed/distributed_c10d.py"


def failed_by_hang(report: pytest.TestReport | None) -> BaseException:
    """Return what fails a test that hangs: no `Exception`, so that no test takes it for one of `spawn`."""
    text = "" if report is None else report.longreprtext
    error = pytest.fail.Exception(text.partition("\n")[0] or "the processes hang")
    vars(error)[REPORT] = report
    return error


def collective_in(stacks: str) -> str:
    """Return the function of torch.distributed that the user's innermost line has called; "" for none."""
    threads = parse(stacks)
    found = ""
    for frame in threads[-1].stack if threads else ():
        if frame.file.endswith(_OF_COLLECTIVES):
            found = frame.function
        if not is_installed(frame.file):
            return found
    return ""


def diagnose(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Return which processes wait in torch.distributed, and where others are; None if none is elsewhere."""
    waiting = [rank for rank, status in statuses.items() if status.call]
    others = [rank for rank, status in statuses.items() if not status.call]
    if not waiting or not others:
        return None
    waits, are = "waits" if len(waiting) == 1 else "wait", "is" if len(others) == 1 else "are"
    where = f"{named(others)} {are} at {statuses[others[0]].where}"
    sentence = f"{named(waiting)} {waits} in {place_of(statuses[waiting[0]])}, and {where}"
    return Diagnosis(sentence, frozenset(others), is_hopeless=False)
