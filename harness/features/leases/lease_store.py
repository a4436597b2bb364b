"""The lease store: a directory of the user's in which a locked file stands for each lease of ranks or GPUs.

A lease is alive as long as a process holds a lock on its file; the kernel releases it however that process
ends. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.exceptions import LaunchError

# `filelock` 4.2 does not serve here. Its locks by `flock` are exclusive, and all ranks of a world hold their
# lease together. For the exclusive lock of the store it differs, too: if the directory was removed, it makes
# one that others can read; where a file system lacks `flock`, it makes a file with a pid, which outlives a
# crash; and every controller and rank would import it (0.1 s), with hooks that run at every fork.

VARIABLE = "LOCKSTEP_LEASES"
"""The environment variable that names another directory."""
LOCK_WITHIN = 60.0
"""Seconds to wait for other processes that have the store locked."""
NEW, TURN, LEASE = "new", "turn", "lease"
"""Suffixes of a lease's file: it is being written; it waits in line; it is granted."""
BUSY, IDLE, RECALLED = "busy", "idle", "recalled"
"""Suffixes of the mark of a granted lease: a test uses its world; the world is kept warm, without a test; it
was recalled then, whereupon its ranks end. Renaming is atomic: of two processes one succeeds. It also takes a
tenth of the time of making a file."""
MOST_BYTES = 1 << 20
"""Number of bytes of a lease's file that are read."""
SUFFIXES = (NEW, TURN, LEASE, BUSY, IDLE, RECALLED)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """The resources that one world holds, or waits for."""

    pid: int
    """Process id of its controller, for people who read it, like `where`."""
    where: str
    """The root directory of the run."""
    ranks: int
    """Number of ranks that it counts for; 0 where the run sets no bound."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that it has; while it waits, of those it may have."""
    exclusive: bool = False
    """True if no other world may use these GPUs at the same time."""

    def competes(self, other: ResourceRequest | Unreadable) -> bool:
        """Whether one of the two may have to wait for the other."""
        if isinstance(other, Unreadable):
            return True
        if self.ranks and other.ranks:
            return True
        return (self.exclusive or other.exclusive) and not set(self.gpus).isdisjoint(other.gpus)

    def __str__(self) -> str:
        words = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"] if self.ranks else []
        words += [f"GPU {', '.join(self.gpus)}"] if self.gpus else []
        return f"pid {self.pid} in {self.where} ({'; '.join(words)})"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request that a living process keeps and that cannot be read: it may be for all of the machine."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}, which cannot be read ({self.why}) and counts as all of the machine"


@dataclass(frozen=True, slots=True)
class Requirement:
    """The requirement of a world of `size` ranks before it may start.

    Of exclusive GPUs it requires one per rank; of others it takes one per rank where there are as many, else
    fewer, and ranks share them.
    """

    request: ResourceRequest
    size: int
    at_once: int | None = None
    """Number of ranks that may run at once; None: any number."""

    def choose(self, held: Iterable[ResourceRequest | Unreadable]) -> tuple[str, ...] | None:
        """Return the GPUs to take (none for a world on CPUs), or None while what is held leaves too little.

        Unused GPUs come first; the order is the request's.
        """
        request, others = self.request, list[ResourceRequest]()
        for other in held:
            if isinstance(other, Unreadable):
                return None
            others.append(other)
        if self.at_once is not None and sum(each.ranks for each in others) + request.ranks > self.at_once:
            return None
        barred = {gpu for each in others if request.exclusive or each.exclusive for gpu in each.gpus}
        uses = Counter(gpu for each in others for gpu in each.gpus)
        free = sorted((gpu for gpu in request.gpus if gpu not in barred), key=lambda gpu: uses[gpu])
        chosen = free[: self.size]
        enough = self.size if request.exclusive else min(1, len(request.gpus))
        return tuple(gpu for gpu in request.gpus if gpu in chosen) if len(chosen) >= enough else None

    def __str__(self) -> str:
        request, words = self.request, []
        if self.at_once is not None:
            words.append(f"{request.ranks} of the {self.at_once} ranks that may run at once (ranks_at_once)")
        if request.gpus:
            number = self.size if request.exclusive else 1
            words.append(f"{number} of the GPUs {', '.join(request.gpus)}")
        return " and ".join(words)


@dataclass(frozen=True, slots=True)
class StoredLease:
    """One lease, or one request in line for one, as it was when the store was read."""

    name: str
    """Names sort by age."""
    kind: str
    request: ResourceRequest | Unreadable
    idle_since: float | None = None
    """Moment (wall clock) from which no test has used the lease's world; None while one does."""
    recalled: bool = False


class LeaseStore:
    """The leases in one directory.

    Raises:
        LaunchError: the directory cannot be used, or another user could write in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _make_private(directory)

    def path(self, name: str, suffix: str) -> Path:
        return self.directory / f"{name}.{suffix}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from reading and adding leases until the block ends.

        Raises:
            LaunchError: another process has kept it locked for `LOCK_WITHIN` seconds.
        """
        deadline = time.monotonic() + LOCK_WITHIN
        lock = os.open(self.directory / "mutex", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _lock(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"another process has kept {self.directory}/mutex locked for {LOCK_WITHIN:g} s; it "
                        "normally takes a millisecond: is one of your pytest runs stopped?"
                    )
                time.sleep(0.002)
            yield
        finally:
            os.close(lock)

    def add(self, request: ResourceRequest) -> tuple[str, int]:
        """Add a request at the end of the line; return its name and the descriptor that keeps it alive."""
        name = f"{time.monotonic_ns():020d}-{os.getpid()}"
        new = self.path(name, NEW)
        keeper = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        _lock(keeper, fcntl.LOCK_SH)
        self.write(keeper, request)
        new.rename(self.path(name, TURN))
        return name, keeper

    def write(self, keeper: int, request: ResourceRequest) -> None:
        os.ftruncate(keeper, 0)
        os.pwrite(keeper, json.dumps(asdict(request)).encode(), 0)

    def grant(self, name: str) -> None:
        """Turn a request in line into a lease. Only while the store is `locked`."""
        self.path(name, BUSY).touch(mode=0o600)
        self._rename(name, TURN, LEASE)

    def read(self) -> list[StoredLease]:
        """Return what is alive, oldest first, and remove the dead. Only while the store is `locked`."""
        files = sorted(file.rpartition(".") for file in os.listdir(self.directory))
        leases = [self._read(name, kind) for name, _, kind in files if kind in (NEW, TURN, LEASE)]
        return [lease for lease in leases if lease is not None]

    def waiting(self) -> Iterator[ResourceRequest]:
        """Yield the requests in line, perhaps a dead one among them; needs no lock."""
        # What is gone by now has just got its lease, or has given up.
        with contextlib.suppress(FileNotFoundError):
            for file in os.listdir(self.directory):
                if file.endswith(f".{TURN}"):
                    with contextlib.suppress(OSError, ValueError), _opened(self.directory / file) as opened:
                        yield _read_request(opened)

    def remove_if_dead(self, name: str) -> None:
        """Remove a lease with its marks, unless a process still holds it."""
        for kind in (NEW, TURN, LEASE):
            self._read(name, kind)

    def _read(self, name: str, kind: str) -> StoredLease | None:
        path = self.path(name, kind)
        request: ResourceRequest | Unreadable
        try:
            with _opened(path) as file:
                if _lock(file, fcntl.LOCK_EX):  # no process holds it
                    self._remove(name)
                    return None
                request = _read_request(file)
        except FileNotFoundError:  # its world has just ended, or it has given up waiting
            return None
        except (OSError, ValueError) as error:
            request = Unreadable(path, getattr(error, "strerror", None) or str(error))
        idle_since = None
        with contextlib.suppress(FileNotFoundError):
            idle_since = self.path(name, IDLE).stat().st_mtime
        return StoredLease(name, kind, request, idle_since, self.path(name, RECALLED).exists())

    def _remove(self, name: str) -> None:
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # no directory is a lease of ours
                self.path(name, suffix).unlink()

    # The mark

    def mark_idle(self, name: str) -> bool:
        """Note that no test uses a lease's world from now on; return False if the lease is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(f"{self.directory}/{name}.{BUSY}")
        return self._rename(name, BUSY, IDLE)

    def mark_busy(self, name: str) -> bool:
        """Note that a test uses the world of an idle lease; return False if it was recalled before."""
        return self._rename(name, IDLE, BUSY)

    def recall(self, name: str) -> bool:
        """Make the ranks of an idle lease end; return False if a test uses them again."""
        return self._rename(name, IDLE, RECALLED)

    def _rename(self, name: str, before: str, after: str) -> bool:
        path = f"{self.directory}/{name}"
        try:
            os.rename(f"{path}.{before}", f"{path}.{after}")
        except FileNotFoundError:
            return False
        return True


class Recall:
    """Ends a rank, as a plugin of its session, that is idle when another world waits for its world's lease.

    Args:
        held: the file of the lease.
    """

    def __init__(self, held: str) -> None:
        self._recalled = f"{held.removesuffix(LEASE)}{RECALLED}"

    def pytest_ranks_idle(self) -> bool:
        return os.path.exists(self._recalled)


def default_directory() -> Path:
    """Return the directory that `LOCKSTEP_LEASES` names, else one of this user in the temporary directory."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).absolute() if chosen else Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open what may be anything, for reading: that of a FIFO would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


_FIELDS = {"pid": int, "where": str, "ranks": int, "gpus": list, "exclusive": bool}


def _read_request(file: int) -> ResourceRequest:
    """Read what a lease's file has; fields of another version of Lockstep are ignored.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else; the message says what.
    """
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise ValueError("it is no regular file")
    try:
        given = json.loads(os.pread(file, MOST_BYTES, 0).decode() or "null")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(given, dict):
        raise ValueError("it has no request")
    for name, kind in _FIELDS.items():
        if type(given.get(name)) is not kind:
            raise ValueError(f"its `{name}` is {given.get(name)!r}")
    fields = {name: given[name] for name in _FIELDS}
    if fields["ranks"] < 0 or not all(isinstance(gpu, str) for gpu in fields["gpus"]):
        raise ValueError(f"it is for {fields['ranks']} ranks and the GPUs {fields['gpus']}")
    return ResourceRequest(**{**fields, "gpus": tuple(fields["gpus"])})


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(directory: Path) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
        user, mode = status.st_uid, stat.S_IMODE(status.st_mode)
        if not stat.S_ISDIR(status.st_mode):
            fault = "it is no directory"
        elif user != os.getuid():
            fault = f"it belongs to the user with id {user}, not to you ({os.getuid()})"
        elif mode & 0o022:
            remove = f"Remove that with `chmod go-w {directory}`"
            fault = f"others may write in it (its mode is {mode:04o}). {remove}"
        else:
            return
    except OSError as error:
        fault = f"{error.strerror}"
    remedy = f"Set a directory of your own in the environment variable {VARIABLE}"
    raise LaunchError(f"cannot keep leases in {directory}: {fault}. {remedy}")
