"""The ledger of leases: a directory of the user's in which a file that is locked stands for each lease.

A lease is alive as long as a process holds its file's lock; the kernel lets go of it whatever way that
process ends. Locks are shared ones (`flock`), so that all ranks of a world hold their lease together.
Standard library only.
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

from harness.exceptions import LaunchError

VARIABLE = "LOCKSTEP_LEASES"
"""The environment variable that names another directory."""
LOCK_WITHIN = 60.0
"""Seconds to wait for others that read the ledger."""
NEW, TURN, LEASE = "new", "turn", "lease"
"""Suffixes of an entry's file: it is being written; it stands in line; it is granted."""
BUSY, IDLE, RECALLED = "busy", "idle", "asked"
"""Suffixes of the mark beside a lease: a test uses its world; no test does, and it is kept warm; it was asked
back then, upon which its ranks end. Renaming is atomic: of two processes one gets its way. It also takes a
tenth of the time of making a file."""
SUFFIXES = (NEW, TURN, LEASE, BUSY, IDLE, RECALLED)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """What one world holds, or waits for.

    ``ranks``: how many it counts for; 0 where the run sets no bound. ``gpus``: names of the GPUs that it
    has; while it waits, of those it may have. ``exclusive``: nobody else may use these GPUs meanwhile.
    ``pid`` and ``where`` (a directory) tell people whose it is.
    """

    pid: int
    where: str
    ranks: int
    gpus: tuple[str, ...] = ()
    exclusive: bool = False

    def competes(self, other: ResourceRequest) -> bool:
        """Whether one of the two may have to wait for the other."""
        if self.ranks and other.ranks:
            return True
        return (self.exclusive or other.exclusive) and not set(self.gpus).isdisjoint(other.gpus)

    def __str__(self) -> str:
        words = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"] if self.ranks else []
        words += [f"GPU {', '.join(self.gpus)}"] if self.gpus else []
        return f"pid {self.pid} in {self.where} ({'; '.join(words)})"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a world of `size` ranks needs: its claim, and how many ranks may run at once (None: any number).

    Of exclusive GPUs it needs one a rank; of others it takes one a rank where so many are to be had, else
    fewer, and ranks share them.
    """

    request: ResourceRequest
    size: int
    at_once: int | None = None

    def choose(self, held: Iterable[ResourceRequest]) -> tuple[str, ...] | None:
        """Return the GPUs to take (none for a world on CPUs), or None while what is held leaves too little.

        GPUs that nobody uses come first; the order is the claim's.
        """
        held = list(held)
        request = self.request
        if self.at_once is not None and sum(other.ranks for other in held) + request.ranks > self.at_once:
            return None
        barred = {gpu for other in held if request.exclusive or other.exclusive for gpu in other.gpus}
        uses = Counter(gpu for other in held for gpu in other.gpus)
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
    """One lease, or one turn in the line for one, as it stood when the ledger was read."""

    name: str
    """Names sort by age."""
    kind: str
    request: ResourceRequest
    idle_since: float | None = None
    """Moment (wall clock) from which no test has used the lease's world; None while one does."""
    recalled: bool = False


class LeaseStore:
    """The entries in one directory.

    Raises:
        LaunchError: the directory cannot be used, or somebody else could write in it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        _make_private(directory)

    def path(self, name: str, suffix: str) -> Path:
        return self.directory / f"{name}.{suffix}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody else from reading and adding entries meanwhile.

        Raises:
            LaunchError: somebody else has not let go of it for `ALONE_WITHIN` seconds.
        """
        deadline = time.monotonic() + LOCK_WITHIN
        lock = os.open(self.directory / "mutex", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _lock(lock, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"another process has kept {self.directory}/mutex locked for {LOCK_WITHIN:g} s; it "
                        "takes a millisecond where all is well: is one of your pytest runs stopped?"
                    )
                time.sleep(0.002)
            yield
        finally:
            os.close(lock)

    def add(self, request: ResourceRequest) -> tuple[str, int]:
        """Enter a claim at the end of the line; return its name and the descriptor that keeps it alive."""
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
        """Let a turn in line be a lease. Only for who is `locked`."""
        self.path(name, BUSY).touch(mode=0o600)
        self._rename(name, TURN, LEASE)

    def read(self) -> list[StoredLease]:
        """Return the living entries, oldest first, and strike out the dead. Only for who is `locked`."""
        files = sorted(file.rpartition(".") for file in os.listdir(self.directory))
        entries = [self._read(name, kind) for name, _, kind in files if kind in (NEW, TURN, LEASE)]
        return [entry for entry in entries if entry is not None]

    def waiting(self) -> Iterator[ResourceRequest]:
        """Yield the claims that stand in line, perhaps a dead one among them; anybody may ask at any time."""
        # What is not there any more has just got its lease, or has given up.
        with contextlib.suppress(FileNotFoundError):
            for file in os.listdir(self.directory):
                if file.endswith(f".{TURN}"):
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        yield _claim((self.directory / file).read_text())

    def strike_if_dead(self, name: str) -> None:
        """Take an entry out of the ledger, with its marks, unless a process still holds it."""
        for kind in (NEW, TURN, LEASE):
            self._read(name, kind)

    def _strike(self, name: str) -> None:
        for suffix in SUFFIXES:
            self.path(name, suffix).unlink(missing_ok=True)

    def _read(self, name: str, kind: str) -> StoredLease | None:
        try:
            with self.path(name, kind).open() as file:
                if _lock(file.fileno(), fcntl.LOCK_EX):
                    self._strike(name)
                    return None
                request = _claim(file.read())
        except FileNotFoundError:  # its world has just ended, or it has given up waiting
            return None
        idle_since = None
        with contextlib.suppress(FileNotFoundError):
            idle_since = self.path(name, IDLE).stat().st_mtime
        return StoredLease(name, kind, request, idle_since, self.path(name, RECALLED).exists())

    # The mark

    def put_down(self, name: str) -> bool:
        """Note that no test uses a lease's world from now on; False if the entry is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(f"{self.directory}/{name}.{BUSY}")
        return self._rename(name, BUSY, IDLE)

    def take_up(self, name: str) -> bool:
        """Use an idle lease again; False if it was asked back meanwhile."""
        return self._rename(name, IDLE, BUSY)

    def recall(self, name: str) -> bool:
        """Ask an idle lease's ranks to end; False if a test uses them again."""
        return self._rename(name, IDLE, RECALLED)

    def _rename(self, name: str, before: str, after: str) -> bool:
        entry = f"{self.directory}/{name}"
        try:
            os.rename(f"{entry}.{before}", f"{entry}.{after}")
        except FileNotFoundError:
            return False
        return True


def hold(lease: str) -> int:
    """Take a share in a lease (its file) for this process's life; return the descriptor that keeps it."""
    keeper = os.open(lease, os.O_RDONLY)
    fcntl.flock(keeper, fcntl.LOCK_SH)
    return keeper


class LeaseShare:
    """A rank's share in the lease of its world.

    Held from the rank's first moments to its end, whatever end that is: others may have the lease only then.

    Args:
        path: of the lease's files, without a suffix.
    """

    def __init__(self, path: str) -> None:
        self._recalled = f"{path}.{RECALLED}"
        self._keeper = hold(f"{path}.{LEASE}")

    def is_recalled(self) -> bool:
        """Whether another world waits for the lease, so that the controller cannot use this one any more."""
        return os.path.exists(self._recalled)


def default_directory() -> Path:
    """Return the directory that `LOCKSTEP_LEASES` names, else one of this user in the temporary directory."""
    chosen = os.environ.get(VARIABLE)
    return Path(chosen).absolute() if chosen else Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")


def _claim(text: str) -> ResourceRequest:
    fields = json.loads(text)
    return ResourceRequest(**{**fields, "gpus": tuple(fields["gpus"])})


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _make_private(directory: Path) -> None:
    remedy = f"Name a directory of your own in the environment variable {VARIABLE}"
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError as error:
        raise LaunchError(f"cannot keep leases in {directory}: {error.strerror}. {remedy}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"cannot keep leases in {directory}: it is no directory. {remedy}")
    if status.st_uid != os.getuid():
        raise LaunchError(
            f"cannot keep leases in {directory}: it belongs to the user with id {status.st_uid}, not to you "
            f"({os.getuid()}). {remedy}"
        )
    if status.st_mode & 0o022:
        raise LaunchError(
            f"cannot keep leases in {directory}: others may write in it (its mode is "
            f"{stat.S_IMODE(status.st_mode):04o}). Take that away with `chmod go-w {directory}`. {remedy}"
        )
