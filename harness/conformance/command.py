"""`python -m lockstep conformance`: the suites against every engine, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.conformance.changes import has_worsened
from lockstep.conformance.collecting import summary
from lockstep.conformance.registry import INSTALLED_SUITES, built_in_names, suites_are_installed
from lockstep.conformance.render import to_changes
from lockstep.conformance.stored import NoTable, load, merge, write
from lockstep.conformance.table import Table
from lockstep.output import write_text


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `python -m lockstep`."""
    parser = commands.add_parser(
        "conformance",
        help="hold engines to the claims of the suites, and write a table",
        description="Hold engines to the claims of the suites, and write a page, Markdown and JSON. All"
        " other arguments are pytest's: paths (default: all suites but properties), -k, -n, ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--engine",
        action="append",
        metavar="NAME",
        help="may be given several times; default: all that come with Lockstep",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("conformance-report"),
        metavar="DIR",
        help="where to write (default: %(default)s)",
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="JSON", help="run nothing, bring these tables together"
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        type=Path,
        metavar="JSON",
        help="run nothing, print what changed from the first table to the second, and write it to changes.md;"
        " the exit status is 1 if an engine breaks a claim that it did not break before",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, others: Sequence[str]) -> int:
    if options.merge is None and options.diff is None:
        return _run_suites(options, others)
    name = "--diff" if options.merge is None else "--merge"
    if options.engine or others or None not in (options.merge, options.diff):
        useless = " ".join(others) or ("--engine" if options.engine else "--diff")
        return _refuse(f"{name} runs nothing; it has no use for {useless}")
    try:
        tables = [load(path) for path in options.merge or options.diff]
    except NoTable as error:
        return _refuse(str(error))
    try:
        return _merge(tables, options.output) if options.merge else _diff(tables, options.output)
    except OSError as error:
        file = error.filename2 or error.filename or options.output
        return _refuse(f"nothing is written to --output {options.output}: {file}: {error.strerror}")


def _run_suites(options: argparse.Namespace, others: Sequence[str]) -> int:
    words = [*others]
    if not any(Path(word.split("::")[0]).exists() for word in others if not word.startswith("-")):
        words = _words_of_suites(others)
    engines = list(dict.fromkeys(options.engine or built_in_names()))
    words = [item for word in words for item in _items(word, engines)]
    chosen = [f"--engine={name}" for name in engines]
    plugin = ("-p", "lockstep.conformance.plugin")
    return int(pytest.main([*plugin, *chosen, f"--conformance={options.output}", *words]))


def _words_of_suites(others: Sequence[str]) -> list[str]:
    """Return arguments of pytest that run the suites, wherever they lie: what the words name, or all.

    With those that are installed neither an ini file nor a conftest of the user's has to do.
    """
    is_installed = suites_are_installed()
    suites = INSTALLED_SUITES if is_installed else INSTALLED_SUITES.resolve()
    words = [
        f"{suites}{word.removeprefix('suites')}" if word.split("/")[0] == "suites" else word
        for word in others
    ]
    if words == [*others]:
        # Models that are drawn meet now one, now another known deviation: no case is sure to fail.
        words += [str(suites), f"--ignore={suites / 'properties'}"]
    if is_installed:
        words += ["-c", str(suites / "installed.ini"), "-o", f"cache_dir={Path.cwd() / '.pytest_cache'}"]
    return words


def _items(word: str, engines: Sequence[str]) -> list[str]:
    """Return what pytest calls a claim on each engine, if the word is a claim with parameters."""
    if len(engines) == 1 or not ("::" in word and word.endswith("]")):
        return [word]
    return [f"{word.removesuffix(']')}-{engine}]" for engine in engines]


def _merge(tables: Sequence[Table], directory: Path) -> int:
    table = merge(tables)
    write(table, directory)
    lines = [*summary(table), f"written to {directory / 'conformance.html'}"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _diff(tables: Sequence[Table], directory: Path) -> int:
    old, new = tables
    text = to_changes(old, new)
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "changes.md", text)
    sys.stdout.write(text)
    return int(pytest.ExitCode.TESTS_FAILED if has_worsened(old, new) else pytest.ExitCode.OK)


def _refuse(why: str) -> int:
    sys.stderr.write(f"python -m lockstep conformance: {why}\n")
    return int(pytest.ExitCode.USAGE_ERROR)
