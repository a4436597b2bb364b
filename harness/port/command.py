"""`python -m lockstep port`: its arguments, files and exit status. Must not import libcst or torch."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.port.module import Ported

ALL_CONVERTED, SOME_LEFT, NOT_RUN = 0, 1, 2
"""Exit status: nothing is left to do; comments say what is; wrong usage, or a file that is not converted."""

COMMAND = "python -m lockstep port"
NEEDS_LIBCST = f"{COMMAND} needs libcst: pip install 'libcst>=1.5'"


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `python -m lockstep`."""
    parser = commands.add_parser(
        "port",
        help="write test classes of torch's and DeepSpeed's launchers as tests on ranks",
        description="Convert classes derived from MultiProcessTestCase, FSDPTest, DTensorTestBase, "
        "DistributedTestBase, MultiProcContinuousTest and DeepSpeed's DistributedTest into plain tests on "
        "ranks. Exit status: 0 if everything was converted, 1 if comments say what was not, 2 if a file "
        "cannot be read or written; the others are converted.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="count only, and write nothing (the default)")
    action.add_argument("--diff", action="store_true", help="print the changes as a unified diff")
    action.add_argument("--write", action="store_true", help="change the files")
    action.add_argument("--output", type=Path, metavar="DIR", help="write the converted files to a directory")
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="world size where a class takes its number of GPUs"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, others: Sequence[str]) -> int:
    try:
        import libcst  # noqa: F401
    except ImportError:
        return _refuse(NEEDS_LIBCST)
    if others:
        return _refuse(f"{COMMAND}: unknown arguments: {' '.join(others)}")
    if options.ranks < 1:
        return _refuse(f"{COMMAND}: --ranks {options.ranks}: a world has at least 1 rank")
    if options.output and options.output.exists() and not options.output.is_dir():
        return _refuse(f"{COMMAND}: --output {options.output} is a file; name a directory")
    # A file that cannot be converted does not keep the others from it.
    return max([_convert(*target, options) for target in _targets(options.files, options.output)])


def _convert(file: Path, path: Path, options: argparse.Namespace) -> int:
    """Convert a file, and write it to `path` if the options want that; return the exit status."""
    import libcst

    from lockstep.port.limits import NotPorted
    from lockstep.port.module import port

    try:
        code = file.read_bytes().decode()
        ported = port(code, options.ranks)
        if options.write or options.output:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ported.code.encode())
            shutil.copymode(file, path)
    except (OSError, UnicodeDecodeError, NotPorted) as error:
        return _refuse(f"{COMMAND}: {file}: {error}")
    except RecursionError:
        return _refuse(f"{COMMAND}: {file}: an expression, a chain of classes or `elif` is nested too deeply")
    except libcst.ParserSyntaxError as error:
        line = f"line {error.raw_line}: {error.message}"
        return _refuse(f"{COMMAND}: {file} is no Python that libcst can read: {line}")
    if options.diff:
        sys.stdout.writelines(_diff(file, code, ported.code))
    sys.stdout.write("".join(f"{line}\n" for line in _summary(file, ported)))
    return SOME_LEFT if ported.notes else ALL_CONVERTED


def _targets(files: Sequence[Path], output: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield each file with the path to write to: below `output` files keep their place among the others."""
    common = os.path.commonpath([file.resolve().parent for file in files])
    for file in files:
        yield file, output / file.resolve().relative_to(common) if output else file


def _diff(file: Path, before: str, after: str) -> Iterator[str]:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    return difflib.unified_diff(old, new, fromfile=str(file), tofile=f"{file} (ported)")


def _summary(file: Path, ported: Ported) -> Iterator[str]:
    whole, commented, left = ported.whole, ported.commented, ported.left
    if not whole + commented + left:
        yield f"{file}: no test class of a multi-process kind"
    else:
        total = whole + commented + left
        yield f"{file}: {total} tests: {whole} converted, {commented} with comments, {left} left"
    yield from (f"  {note}" for note in ported.notes)


def _refuse(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return NOT_RUN
