"""The report of a test that spawns: where a spawned function fails, that of its ranks. Controller's side."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.features.spawn.hang import REPORT
from lockstep.features.spawn.processes import TestProcesses
from lockstep.features.spawn.worlds import PRINTED
from lockstep.reporting.pytest_internals import ExceptionChainRepr


def complete_report(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, processes: TestProcesses
) -> None:
    """Give the report of a phase what ranks have printed in it, and their failure where it fails by that."""
    if printed := item.stash.get(PRINTED, None):
        report.sections += printed
        item.stash[PRINTED] = []
    if call.excinfo is None or not report.failed:
        return
    of_ranks = next(
        filter(None, (_report_of(item, each, processes) for each in _chain(call.excinfo.value))), None
    )
    if of_ranks is None or not isinstance(of_ranks.longrepr, ExceptionChainRepr):
        return
    called = "\n".join(_users_lines(item, call.excinfo))
    report.longrepr = of_ranks.longrepr
    report.longrepr.addsection("called", called, "-")
    report.user_properties += [
        pair for pair in of_ranks.user_properties if pair not in report.user_properties
    ]


def _report_of(item: pytest.Item, error: BaseException, processes: TestProcesses) -> pytest.TestReport | None:
    """Return the report of the ranks, or the processes, that an exception of `spawn` is about."""
    found: pytest.TestReport | None = getattr(error, REPORT, None)
    pid = getattr(error, "error_pid", None)
    if found is None and isinstance(pid, int):
        return processes.report_of(item, pid)
    return found


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it came from."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _users_lines(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> Iterator[str]:
    """Yield the lines by which the test came to the call, without those of installed packages."""
    root = item.config.rootpath
    for entry in excinfo.traceback:
        path = str(entry.path)
        if "site-packages" not in path and path.startswith(str(root)):
            yield f"{path.removeprefix(f'{root}/')}:{entry.lineno + 1} in {entry.name}"
    yield (
        f"{excinfo.typename}: {str(excinfo.value).strip().splitlines()[0]}"
        if str(excinfo.value).strip()
        else ""
    )
