"""The plugin of goldens: the fixture `golden` on ranks, and what the end of a run reports of their files."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.features.goldens.golden import Goldens


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption("--update-goldens", action="store_true", help="write the files of the fixture `golden`")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Goldens:
    """Hold a training run to a text file beside the test, which `--update-goldens` writes."""
    from lockstep.features.goldens.golden import Goldens

    return Goldens(request, session_of(request).world)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # last: below the list of all that failed
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, object, object]:
    result = yield
    reports = (report for found in terminalreporter.stats.values() for report in found)
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    if used := {str(value) for name, value in properties if name == "golden"}:
        from lockstep.features.goldens.summary import lines

        written = {str(value) for name, value in properties if name == "golden-written"}
        for line in lines(config, terminalreporter.stats, used, written):
            terminalreporter.write_line(line)
    return result
