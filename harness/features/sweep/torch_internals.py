"""Private names of torch's serialization that sweeps use, with what to look for when one moves. Seen in 2.13.

Inside a rank; imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import truncate  # not as others call it, who are seen
from typing import Any

import torch.serialization

# The context in which `torch.save(state, path)` writes, whose file C++ opens by its path. If it moves: what
# `_open_zipfile_writer` calls with a path. Without it such files are seen by polling, as others of C++.
_WRITER = "_open_zipfile_writer_file"


@contextmanager
def observed_writers(
    below: Callable[[Any], str],
    before: Callable[[str, str, Callable[[], object]], None],
    after: Callable[[str, str], None],
) -> Iterator[None]:
    """Report what `torch.save(state, path)` does inside: it opens a file, and writes all of it.

    Args:
        below: returns the absolute path of a path, "" if it is not to be reported.
        before: called with "open" or "write", the path, and what writes the first half. It may raise.
        after: called with the same once it is over.
    """
    writer: Any = getattr(torch.serialization, _WRITER, None)
    if writer is None:
        yield
        return

    class Observed(writer):  # type: ignore[misc]
        def __init__(self, name: Any) -> None:
            self._path = below(name) if os.fspath(name).isascii() else ""  # others are written by Python
            if self._path:
                before("open", self._path, lambda: None)
            super().__init__(name)
            if self._path:
                after("open", self._path)

        def __exit__(self, *args: Any) -> None:
            if not self._path:
                super().__exit__(*args)
                return
            size, is_cut = os.path.getsize(self._path), False

            def cut(length: int | None = None) -> None:
                nonlocal is_cut
                is_cut = True
                super(Observed, self).__exit__(*args)
                truncate(self._path, os.path.getsize(self._path) // 2 if length is None else length)

            try:
                before("write", self._path, cut)
            except BaseException:
                if not is_cut:  # else the destructor of the writer would write the end all the same
                    cut(size)
                raise
            super().__exit__(*args)
            after("write", self._path)

    setattr(torch.serialization, _WRITER, Observed)
    try:
        yield
    finally:
        setattr(torch.serialization, _WRITER, writer)
