"""The directories of a sweep: put back before each point, and filled with what a world has left.

Used on both sides; standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path


class Directories:
    """The directories of one rank that it puts back: of those that ranks share, the first of them does.

    Args:
        folders: by the name of a place, which is the same on every world.
        kept: directory for copies of what is in them now.
    """

    def __init__(self, folders: dict[str, Path], kept: Path) -> None:
        self._folders, self._kept = folders, kept
        for place, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copytree(folder, kept / place, symlinks=True)

    def put_back(self) -> None:
        """Fill them with what was in them at the beginning."""
        for place, folder in self._folders.items():
            _fill(folder, self._kept / place)

    def take_over(self, left: dict[str, str]) -> None:
        """Fill them with what an earlier world has left, which is moved."""
        for place, folder in self._folders.items():
            _empty(folder)
            for each in Path(left[place]).iterdir():
                shutil.move(each, folder / each.name)


def _fill(folder: Path, source: Path) -> None:
    _empty(folder)
    shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def owned(folders: Sequence[Sequence[str]], rank: int) -> dict[str, Path]:
    """Return the directories that a rank puts back, by the name of a place: "0/1" is the second of rank 0.

    Args:
        folders: absolute paths, of each rank.
    """
    every = {path for paths in folders for path in paths}
    seen = {path for path in every if any(path.startswith(f"{other}/") for other in every)}  # below another
    found: dict[str, Path] = {}
    for number, paths in enumerate(folders):
        for index, path in enumerate(paths):
            if path not in seen and number == rank:
                found[f"{number}/{index}"] = Path(path)
            seen.add(path)
    return found


def move_aside(folders: Sequence[Sequence[str]], aside: Path) -> dict[str, str]:
    """Move the contents of all directories away; return where they are, by the name of a place."""
    left: dict[str, str] = {}
    for rank in range(len(folders)):
        for place, folder in owned(folders, rank).items():
            target = aside / place
            target.mkdir(parents=True)
            for each in folder.iterdir() if folder.is_dir() else ():
                shutil.move(each, target / each.name)
            left[place] = os.fspath(target)
    return left
