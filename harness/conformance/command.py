"""`python -m harness conformance`: the suites against every engine, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import harness
from harness.conformance.collecting import summary
from harness.conformance.registry import built_in_names
from harness.conformance.stored import NoTable, load, merge, write
from lockstep.names import package


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `python -m harness`."""
    parser = commands.add_parser(
        "conformance",
        help="hold engines to the claims of the suites, and write a table",
        description="Hold engines to the claims of the suites, and write a page, Markdown and JSON. All"
        " other arguments are pytest's: paths (default: the checkout's suites but properties), -k, -n, ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--engine",
        action="append",
        metavar="NAME",
        help="may be given several times; default: all that come with Lockstep",
    )
    parser.add_argument("--output", type=Path, default=Path("conformance-report"), metavar="DIR")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="JSON", help="run nothing, bring these tables together"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, others: Sequence[str]) -> int:
    if options.merge is None:
        return _run_suites(options, others)
    if options.engine or others:
        return _refuse(f"--merge runs nothing; it has no use for {' '.join(others) or '--engine'}")
    return _merge(options.merge, options.output)


def _run_suites(options: argparse.Namespace, others: Sequence[str]) -> int:
    words = [*others]
    if not any(Path(word.split("::")[0]).exists() for word in others if not word.startswith("-")):
        suites = Path(harness.__file__).parents[1] / "suites"
        if not suites.is_dir():
            return _refuse("the suites are not part of the installed package: name the paths of a checkout's")
        # Models that are drawn meet now one, now another known deviation: no case is sure to fail.
        words += [str(suites), f"--ignore={suites / 'properties'}"]
    engines = list(dict.fromkeys(options.engine or built_in_names()))
    words = [item for word in words for item in _items(word, engines)]
    chosen = [f"--engine={name}" for name in engines]
    plugin = ("-p", f"{package()}.conformance.plugin")
    return int(pytest.main([*plugin, *chosen, f"--conformance={options.output}", *words]))


def _items(word: str, engines: Sequence[str]) -> list[str]:
    """Return what pytest calls a claim on each engine, if the word is a claim with parameters."""
    if len(engines) == 1 or not ("::" in word and word.endswith("]")):
        return [word]
    return [f"{word.removesuffix(']')}-{engine}]" for engine in engines]


def _merge(paths: Sequence[Path], directory: Path) -> int:
    try:
        table = merge([load(path) for path in paths])
    except NoTable as error:
        return _refuse(str(error))
    write(table, directory)
    lines = [*summary(table), f"written to {directory / 'conformance.html'}"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _refuse(why: str) -> int:
    sys.stderr.write(f"python -m {package()} conformance: {why}\n")
    return int(pytest.ExitCode.USAGE_ERROR)
