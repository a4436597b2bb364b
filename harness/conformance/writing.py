"""The table's three files in one directory."""

from __future__ import annotations

from pathlib import Path

from harness.conformance.markdown import to_markdown
from harness.conformance.page import to_page
from harness.conformance.stored import dump
from harness.conformance.table import Table


def write(table: Table, directory: Path) -> None:
    """Write conformance.json, .md and .html; those of a run before are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, text in (("json", dump(table)), ("md", to_markdown(table)), ("html", to_page(table))):
        (directory / f"conformance.{suffix}").write_text(text, encoding="utf-8")
