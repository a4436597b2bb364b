"""A rank's collection: a file's items are collected when the first of them is asked for."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest


class RankCollection:
    """The items of one rank session, collected file by file, as one collection would have found them.

    For pytest every file is a collection of its own, with directories of its own; fixtures and set-up that
    belong to a directory would be bound to those of the first file. So directories are kept here.
    """

    def __init__(self) -> None:
        self._items: dict[str, pytest.Item] = {}
        self._errors: dict[str, str] = {}
        """Why a file could not be collected, for every file that was tried; empty where all went well."""
        self._collecting = ""
        self._directories: dict[tuple[Path, pytest.Collector], pytest.Collector | None] = {}

    def find(self, session: pytest.Session, nodeid: str, path: str) -> pytest.Item | None:
        """Return the item, or None if the file has no such item on this rank."""
        if path not in self._errors:
            self._errors[path] = ""
            self._collecting = path
            try:
                items = session.perform_collect([path])
            except pytest.UsageError as error:  # it may follow from what a report has said better
                self._errors[path] = self._errors[path] or str(error)
            else:
                self._items.update({str(item.nodeid): item for item in items})
        return self._items.get(nodeid)

    def knows(self, path: str) -> bool:
        """Whether the file has been collected, or tried."""
        return path in self._errors

    def error_of(self, path: str) -> str:
        """Return what pytest said of a file that it could not collect."""
        return self._errors.get(path, "")

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_directory(
        self, path: Path, parent: pytest.Collector
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        return self._directories.setdefault((path, parent), (yield))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:  # of the file, or of a directory on the way to it
            self._errors[self._collecting] = report.longreprtext

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Keep the conftests that still wait for their directory; pytest (since 9.1) drops them here."""
        waiting: dict[Path, object] = getattr(session._fixturemanager, "_pending_conftests", {})
        kept = dict(waiting)
        yield
        waiting.update(kept)
