"""The comparison of code: the files that an item needs must be the same on all hosts of its world.

Runs in controllers, `digests` in agents as well; standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

Digests = dict[str, str | None]
"""Digest of a file's contents by its path, None where there is no file."""
Ask = Callable[[int, list[str]], Digests]
"""Returns the digests that a host, by its number, has for paths of node 0."""


def digests(paths: Iterable[str]) -> Digests:
    return {path: _digest(Path(path)) for path in paths}


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


class CodeComparison:
    """Compares files of this host, of which pytest runs on it, with those of others; each of them once.

    Args:
        root: of the project: files above it are not compared.
    """

    def __init__(self, root: Path, ask: Ask) -> None:
        self._root = root
        self._ask = ask
        self._same: set[tuple[int, str]] = set()

    def find_difference(self, path: Path, hosts: Mapping[int, str]) -> str:
        """Return which file of a test, and on which host, is another one than here; "" if there is none.

        Args:
            path: of the test file.
            hosts: names of the other hosts, by number.
        """
        needed = sorted(map(str, self._files_of(path)))
        for number, name in hosts.items():
            ours = digests({file for file in needed if (number, file) not in self._same})
            theirs = self._ask(number, list(ours)) if ours else {}
            for file, digest in ours.items():
                if theirs.get(file) != digest:
                    return self._describe(
                        file, name, is_here=digest is not None, is_there=bool(theirs.get(file))
                    )
            self._same.update((number, file) for file in ours)
        return ""

    def _describe(self, file: str, host: str, *, is_here: bool, is_there: bool) -> str:
        shown = Path(file).relative_to(self._root) if Path(file).is_relative_to(self._root) else file
        if is_here and is_there:
            what = f"{shown} is not the same on host {host} as on the host that runs pytest"
        else:
            what = f"{shown} is missing on host {host}" if is_here else f"{shown} is on host {host} alone"
        return f"{what}: ranks there would run other code; bring the hosts to the same state"

    def _files_of(self, path: Path) -> Iterator[Path]:
        """Yield the files that decide what a test file does: itself, conftests, and what they have imported.

        A conftest is one whether it is there or not: a host may have one more.
        """
        folders = [each for each in path.parents if each.is_relative_to(self._root)] or [path.parent]
        known = {str(path), *(str(folder / "conftest.py") for folder in folders)}
        by_file = {str(getattr(module, "__file__", None)): module for module in [*sys.modules.values()]}
        waiting = [*known]
        while waiting:
            file = waiting.pop()
            yield Path(file)
            for name in _imported_by(by_file.get(file)):
                other = str(getattr(sys.modules.get(name), "__file__", None))
                if other.startswith(f"{self._root}/") and not (other in known or _is_installed(other)):
                    known.add(other)
                    waiting.append(other)


def _imported_by(module: ModuleType | None) -> set[str]:
    """Return the names of the modules that a module has imported, or of whose things it has some."""
    names = set()
    for value in () if module is None else [*vars(module).values()]:
        with contextlib.suppress(Exception):  # whatever an object does that is asked for an attribute
            name = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if isinstance(name, str):
                names.add(name)
    return names


def _is_installed(file: str) -> bool:
    return "/site-packages/" in file or file.startswith((f"{sys.prefix}/", f"{sys.base_prefix}/lib/"))
