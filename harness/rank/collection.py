"""The items of a rank's session, collected file by file as the controller orders them. Inside a rank."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from lockstep.protocol import RunItem
from lockstep.rank.pytest_internals import set_argument, waiting_conftests
from lockstep.rank.reporter import describe_raised, failure


class RankCollection:
    """The items of one rank session, collected file by file, as one collection would have found them.

    For pytest every file is a collection of its own, with its own directories; fixtures and set-up that
    belong to a directory would be bound to those of the first file. So directories are kept here.

    Args:
        rootdir: of the controller.

    Attributes:
        errors: By file that was tried, why it could not be collected; empty where it could.
    """

    def __init__(self, rootdir: str) -> None:
        self._rootdir = rootdir
        self._items: dict[tuple[str, str], pytest.Item] = {}
        self.errors: dict[str, str] = {}
        self._argument = Path()
        self._functions: frozenset[str] | None = None
        self._directories: dict[tuple[Path, pytest.Collector], pytest.Collector | None] = {}

    def find(
        self, session: pytest.Session, nodeid: str, path: str, functions: frozenset[str] | None
    ) -> pytest.Item | None:
        """Return the item, or None if the file has no such item on this rank.

        Args:
            functions: of the file, that this run has selected: to make items of all often takes longer than
                the test. None where all may be needed.
        """
        if path not in self.errors:
            self.errors[path] = ""
            self._argument, self._functions = argument_of(nodeid, path), functions
            try:
                items = session.perform_collect([path])
            except BaseException as error:
                # SystemExit, KeyboardInterrupt and pytest.exit in the file, and whatever a hook raises. It
                # may be the file of the next item: this one must not suffer from it.
                self.errors[path] = self.errors[path] or describe_raised(error)
            else:
                # By path, too: outside of the rootdir files of one name may have the same ids.
                self._items.update({(path, str(item.nodeid)): item for item in items})
            finally:
                self._functions = None  # a test may collect, too
        return self._items.get((path, nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Module | pytest.Class, name: str, obj: object
    ) -> list[pytest.Item] | None:
        """Make no item of a function that is not selected."""
        if self._functions is None or name in self._functions or isinstance(obj, type):
            return None
        return [] if collector.istestfunction(obj, name) else None

    def report_missing(self, order: RunItem, session: pytest.Session) -> pytest.TestReport:
        """Return the report of an item that was not found on this rank, with the reason."""
        text = self.errors[order.path]
        if not text and str(session.config.rootpath) != self._rootdir:
            text = (
                f"this rank has the rootdir {session.config.rootpath}, where the pytest that you started has "
                f"{self._rootdir}, so that its node ids are others: give it with --rootdir={self._rootdir}"
            )
        text = text or (
            f"this rank collected {order.path} and did not find {order.nodeid} in it. The items of a file "
            "must be the same on every rank: does a parametrization depend on the rank, or on an unseeded "
            "random choice? Or has the file changed since pytest collected it?"
        )
        path, *names = order.nodeid.split("::")
        return failure(order.nodeid, (path, None, ".".join(names)), text, "setup")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        if isinstance(collector, pytest.Session):
            set_argument(collector, self._argument)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        return self._directories.setdefault((path, parent), (yield))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reason why a file has fewer items than elsewhere: it, or a conftest, may be broken."""
        path = next(reversed(self.errors), None)
        if path is None or self.errors[path]:
            return
        if report.failed:
            self.errors[path] = report.longreprtext
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.errors[path] = f"this rank skipped {path} at import and others did not ({reason})"

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Keep the conftests that still wait for their directory; pytest (since 9.1) drops them here."""
        waiting = waiting_conftests(session)
        kept = dict(waiting)
        yield
        waiting.update(kept)


def argument_of(nodeid: str, path: str) -> Path:
    """Return the argument of pytest below which the controller has collected a file outside of its rootdir.

    There, as of an installed package (`--pyargs`), a node id begins with the path from that argument. A file
    in the rootdir has the same id whatever the arguments are.
    """
    file = nodeid.partition("::")[0]
    return Path(path.removesuffix(f"/{file}") if file else path)
