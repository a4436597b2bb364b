"""A rank's collection: a file's items are collected when the first of them is asked for."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from harness.rank.raised import describe_raised


class RankCollection:
    """The items of one rank session, collected file by file, as one collection would have found them.

    For pytest every file is a collection of its own, with directories of its own; fixtures and set-up that
    belong to a directory would be bound to those of the first file. So directories are kept here.
    """

    def __init__(self) -> None:
        self._items: dict[str, pytest.Item] = {}
        self._errors: dict[str, str] = {}
        """Why a file could not be collected, for every file that was tried; empty where all went well."""
        self._directories: dict[tuple[Path, pytest.Collector], pytest.Collector | None] = {}

    def find(self, session: pytest.Session, nodeid: str, path: str) -> pytest.Item | None:
        """Return the item, or None if the file has no such item on this rank."""
        if path not in self._errors:
            self._errors[path] = ""
            try:
                items = session.perform_collect([path])
            except BaseException as error:
                # SystemExit, KeyboardInterrupt and pytest.exit in the file, and whatever a hook raises. It
                # may be the file of the next item: this one must not suffer from it.
                self._errors[path] = self._errors[path] or describe_raised(error)
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
        """Note why the file in hand yields fewer items than elsewhere: it, or a conftest, may be broken."""
        path = next(reversed(self._errors), None)
        if path is None or self._errors[path]:
            return
        if report.failed:
            self._errors[path] = report.longreprtext
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self._errors[path] = f"this rank skips {path} as it imports it, and others did not ({reason})"

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Keep the conftests that still wait for their directory; pytest (since 9.1) drops them here."""
        waiting: dict[Path, object] = getattr(session._fixturemanager, "_pending_conftests", {})
        kept = dict(waiting)
        yield
        waiting.update(kept)
