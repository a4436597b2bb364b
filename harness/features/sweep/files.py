"""Operations of Python code on files below some directories, passed to an observer. Inside a rank.

Seen are the functions of `os`, what is written to a file that `open` has returned, and `torch.save(state,
path)`, which hands the path to C++. Not seen is what other C++ or Rust code does, nor memory maps.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

from lockstep.features.sweep.torch_internals import observed_writers

__tracebackhide__ = True  # under pytest a failure points to the call

_BY_PATH = {
    "mkdir": "mkdir",
    "remove": "unlink",
    "rmdir": "rmdir",
    "truncate": "truncate",
    "unlink": "unlink",
}
_BY_DESCRIPTOR = {
    "fdatasync": "fsync",
    "fsync": "fsync",
    "ftruncate": "truncate",
    "pwrite": "write",
    "pwritev": "write",
    "sendfile": "write",
    "write": "write",
    "writev": "write",
}
_BY_TWO_PATHS = {"link": "link", "rename": "rename", "replace": "rename", "symlink": "link"}
_READS = ("access", "listdir", "lstat", "readlink", "scandir", "stat")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _nothing() -> None: ...


class Observer(Protocol):
    def before(self, op: str, path: str, half: Callable[[], object] = _nothing) -> None:
        """See an operation that changes a file, before it. It may raise in the caller.

        Args:
            half: does the first half of it.
        """
        ...

    def after(self, op: str, path: str, target: str) -> None:
        """See it once it is over; `target` is where a rename or a link leads."""
        ...

    def reads(self, path: str) -> None:
        """See that code looks at a path."""
        ...

    def hides(self, path: str) -> bool:
        """Return whether the path is not there as far as code can see."""
        ...


class FileCalls:
    """The functions of `os` and `open` of this process, which report what they do below some directories.

    Args:
        roots: absolute paths of the directories.
    """

    def __init__(self, roots: Sequence[str], observer: Observer) -> None:
        self._roots = tuple({each for root in roots for each in (root, os.path.realpath(root))})
        self._observer = observer
        self._local = threading.local()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Report what runs inside, on all threads."""
        wrappers: dict[str, Callable[..., Any]] = {
            **{name: functools.partial(self._changes, op, 0) for name, op in _BY_PATH.items()},
            **{name: functools.partial(self._changes, op, 0) for name, op in _BY_DESCRIPTOR.items()},
            "copy_file_range": functools.partial(self._changes, "write", 1),
            **{name: functools.partial(self._moves, op) for name, op in _BY_TWO_PATHS.items()},
            **{name: functools.partial(self._looks, name) for name in _READS},
            "open": self._opens,
        }
        before = {name: getattr(os, name) for name in wrappers if hasattr(os, name)}
        opens = io.open
        try:
            for name, function in before.items():
                setattr(os, name, self._wrapped(function, wrappers[name]))
            io.open = builtins.open = self._wrapped(opens, self._opens_file)
            with observed_writers(self._below, self._before, self._after):
                yield
        finally:
            for name, function in before.items():
                setattr(os, name, function)
            io.open = builtins.open = opens

    def _wrapped(self, function: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "is_inside", False):  # the observer's own
                return function(*args, **kwargs)
            return wrapper(function, *args, **kwargs)

        return wrapped

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Report nothing of what this thread does inside."""
        before = getattr(self._local, "is_inside", False)
        self._local.is_inside = True
        try:
            yield
        finally:
            self._local.is_inside = before

    def _before(self, op: str, path: str, half: Callable[[], object] = _nothing) -> None:
        with self.unseen():
            self._observer.before(op, path, half)

    def _after(self, op: str, path: str, target: str = "") -> None:
        with self.unseen():
            self._observer.after(op, path, target)

    def _is_hidden(self, path: str) -> bool:
        with self.unseen():
            self._observer.reads(path)
            return self._observer.hides(path)

    def _below(self, given: Any, folder: int | None = None) -> str:
        """Return the absolute path of a path or a descriptor, "" if it is not below the directories."""
        try:
            if isinstance(given, int):
                path = os.readlink(f"/proc/self/fd/{given}")
            else:
                base = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
                path = os.path.abspath(os.path.join(base, os.fsdecode(given)))
        except (OSError, TypeError, ValueError):  # the function itself will say so
            return ""
        is_below = any(path == root or path.startswith(f"{root}/") for root in self._roots)
        return path if is_below else ""

    # Called with the function of `os`, and its arguments

    def _changes(self, op: str, index: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[index] if len(args) > index else next(iter(kwargs.values()), None)
        path = self._below(given, kwargs.get("dir_fd"))
        if not path:
            return function(*args, **kwargs)
        self._before(op, path, functools.partial(_write_half, function, *args) if op == "write" else _nothing)
        result = function(*args, **kwargs)
        self._after(op, path)
        return result

    def _moves(self, op: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()][:2]
        folders = (kwargs.get("src_dir_fd"), kwargs.get("dst_dir_fd"))
        source, target = (self._below(each, folder) for each, folder in zip(given, folders, strict=True))
        if not (source or target):
            return function(*args, **kwargs)
        self._before(op, target or source)
        result = function(*args, **kwargs)
        self._after(op, source, target)
        return result

    def _looks(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("path", ".")
        path = self._below(given, kwargs.get("dir_fd"))
        if not path:
            return function(*args, **kwargs)
        if self._is_hidden(path):
            if name == "access":
                return False
            raise _not_found(path)
        result = function(*args, **kwargs)
        if name == "listdir":
            return [each for each in result if not self._is_hidden(os.path.join(path, os.fsdecode(each)))]
        return _Entries(result, lambda each: self._is_hidden(each.path)) if name == "scandir" else result

    def _opens(self, function: Callable[..., Any], path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        found = self._below(path, kwargs.get("dir_fd"))
        if not found:
            return function(path, flags, *args, **kwargs)
        if flags & _WRITING:
            self._before("open", found)
        elif self._is_hidden(found):
            raise _not_found(found)
        descriptor = function(path, flags, *args, **kwargs)
        if flags & _WRITING:
            self._after("open", found)
        return descriptor

    def _opens_file(
        self,
        function: Callable[..., Any],
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        path = self._below(file)
        names = ("encoding", "errors", "newline", "closefd", "opener")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not path or not isinstance(mode, str):
            return function(file, mode, buffering, *args, **kwargs)
        if not set(mode) & set("wax+"):
            if self._is_hidden(path):
                raise _not_found(path)
            return function(file, mode, buffering, *args, **kwargs)
        if ("b" in mode and any(given.get(name) is not None for name in names[:3])) or (
            "b" not in mode and buffering == 0
        ):
            return function(file, mode, buffering, *args, **kwargs)  # which refuses that
        if not isinstance(file, int):
            self._before("open", path)
        return self._make_file(file, path, mode, buffering, given)

    def _make_file(self, file: Any, path: str, mode: str, buffering: int, given: dict[str, Any]) -> Any:
        """Return what `open` does, over a raw file that reports what is written; see `_pyio.open`."""
        raw_mode = mode.replace("b", "").replace("t", "")
        raw = _File(file, raw_mode, given.get("closefd", True), given.get("opener"))
        raw.observe(path, self)
        if not isinstance(file, int):
            self._after("open", path)
        if buffering == 0:
            return raw
        kind: Any = io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffer = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        if "b" in mode:
            return buffer
        encoding = io.text_encoding(given.get("encoding"))
        text: Any = io.TextIOWrapper(
            buffer, encoding, given.get("errors"), given.get("newline"), line_buffering=buffering == 1
        )
        text.mode = mode
        return text


class _File(io.FileIO):
    """A raw file that reports what is written to it, which buffers do as they are flushed."""

    _path = ""
    _calls: FileCalls | None = None

    def observe(self, path: str, calls: FileCalls) -> None:
        self._path, self._calls = path, calls

    def write(self, data: Any, /) -> int:
        if (calls := self._calls) is None:
            return super().write(data)
        view = memoryview(data).cast("B")
        calls._before("write", self._path, lambda: super(_File, self).write(view[: len(view) // 2]))
        written = super().write(data)
        calls._after("write", self._path)
        return written

    def truncate(self, size: int | None = None, /) -> int:
        if (calls := self._calls) is None:
            return super().truncate(size)
        calls._before("truncate", self._path)
        result = super().truncate(size)
        calls._after("truncate", self._path)
        return result


def _write_half(function: Callable[..., Any], *args: Any) -> None:
    """Do the first half of a function of `os` that writes."""
    match function.__name__, args:
        case "write" | "pwrite", (descriptor, data, *offset):
            view = memoryview(data).cast("B")
            function(descriptor, view[: len(view) // 2], *offset)
        case "writev" | "pwritev", (descriptor, buffers, *offset):
            data = b"".join(buffers)
            (os.pwrite if offset else os.write)(descriptor, data[: len(data) // 2], *offset[:1])
        case "sendfile", (target, source, offset, count, *_):
            function(target, source, offset, count // 2)
        case "copy_file_range", (source, target, count, *offsets):
            function(source, target, count // 2, *offsets)


class _Entries:
    """The iterator that `os.scandir` returns, without entries that are hidden."""

    def __init__(self, entries: Any, is_hidden: Callable[[os.DirEntry[str]], bool]) -> None:
        self._entries, self._is_hidden = entries, is_hidden

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> os.DirEntry[str]:
        while self._is_hidden(entry := next(self._entries)):
            pass
        found: os.DirEntry[str] = entry
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


def _not_found(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
