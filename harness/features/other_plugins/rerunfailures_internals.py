"""pytest-rerunfailures on ranks: its own loop, with our run of an item in the place of pytest's.

Private names of it, seen in 14.0 to 16.7. A plugin of the controller, where pytest-rerunfailures is one; must
not import torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from lockstep.features.other_plugins import FEATURE, Raised
from lockstep.protocol import REPORT_PARTS


def pytest_ranks_run_and_log(
    item: pytest.Item, nextitem: pytest.Item | None, run: Callable[[], list[pytest.TestReport]]
) -> bool:
    """Run an item as often as pytest-rerunfailures says; return False if it has no say in this one.

    The plugin logs reports, waits and counts as for other items. If it moves: its `pytest_runtest_protocol`
    calls `_pytest.runner.runtestprotocol`, and decides by what its `pytest_runtest_makereport` has noted.
    """
    plugin: Any = sys.modules["pytest_rerunfailures"]

    def run_once(*_: object, **__: object) -> list[pytest.TestReport]:
        reports = []
        for report in run():
            if type(report) is not pytest.TestReport:  # a subtest's: pytest logs it during the test
                item.ihook.pytest_runtest_logreport(report=report)
            else:
                reports.append(_note(plugin, item, report))
        return reports

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "runtestprotocol", run_once)
        return bool(plugin.pytest_runtest_protocol(item=item, nextitem=nextitem))


def _note(plugin: Any, item: pytest.Item, report: pytest.TestReport) -> pytest.TestReport:
    """Let the plugin note what was raised, as where pytest makes a report."""
    error = _error_of(report) if report.failed else None
    excinfo = None if error is None else SimpleNamespace(type=type(error), value=error)
    call = SimpleNamespace(when=report.when, excinfo=excinfo)  # of which it reads no more
    makes = plugin.pytest_runtest_makereport
    is_old = makes.pytest_impl["hookwrapper"]  # before 16.5: it is sent a result that holds the report
    wrapper = makes(item=item, call=call)
    next(wrapper)
    with contextlib.suppress(StopIteration):
        wrapper.send(pluggy.Result.from_call(lambda: report) if is_old else report)
    return report


def _error_of(report: pytest.TestReport) -> BaseException:
    """Return a stand-in for what was raised on the rank to blame: with its text, and its class if known."""
    raised: tuple[Raised, ...] = vars(report).pop(REPORT_PARTS, {}).get(FEATURE, ())
    if not raised:  # a death, or a hang
        crash = getattr(report.longrepr, "reprcrash", None)
        raised = (((("lockstep.exceptions", "WorldError"),), str(crash.message if crash else ""), False),)
    errors = [_stand_in(each) for each in raised]
    for outer, inner, (_, _, has_cause) in zip(errors, errors[1:], raised, strict=False):
        if has_cause:
            outer.__cause__ = inner
        else:
            outer.__context__ = inner
    return errors[0]


def _stand_in(raised: Raised) -> BaseException:
    classes, text, _ = raised
    module, name = classes[0]
    members = {"__str__": lambda _: text, "__module__": module}
    base = next(filter(None, (_find_class(*each) for each in classes)), Exception)
    with contextlib.suppress(Exception):  # it may refuse subclasses, or want arguments
        made: type[BaseException] = type(name, (base,), members)
        stand_in: BaseException = made.__new__(made)
        return stand_in
    plain: type[Exception] = type(name, (Exception,), members)
    return plain()


def _find_class(module: str, name: str) -> type[BaseException] | None:
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
