"""Limits of the machine: what it lacks when a system call fails, with the remedy.

Used in the controller and in new processes on their way to be ranks; standard library only.
"""

from __future__ import annotations

import errno
import os
import resource
import tempfile

from lockstep.exceptions import LaunchError

FILES_OF_A_RANK = 3
"""Descriptors that the controller keeps for one rank: the wire, and two that report its end."""
FILES_AT_LEAST = 4
"""Descriptors that starting a rank takes for a moment."""


def explain(error: BaseException) -> str:
    """Return what went wrong, and what to do where a limit of the machine was met."""
    said = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError) and error.filename is None:  # of getcwd, and of nothing else
        return "The directory that pytest runs in is gone"
    for number, remedy in _remedies().items():
        if getattr(error, "errno", None) == number or os.strerror(number) in said:
            return f"{said}. {remedy}"
    if "Unable to find address for: lo" in said:  # gloo's words
        return f"{said}. Bring the loopback interface up: `ip link set lo up`"
    return said if isinstance(error, OSError) else f"{type(error).__name__}: {said}"


def check_open_files(size: int) -> None:
    """Refuse to start ranks that would leave this process, or the server, without file descriptors.

    Raises:
        LaunchError: with the limit and a number that would do.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        is_open = len(os.listdir("/dev/fd"))
    except OSError:  # which is a link into /proc
        is_open = 0
    need = is_open + FILES_OF_A_RANK * size + FILES_AT_LEAST
    if need > limit:
        raise LaunchError(
            f"{size} ranks need about {need} open files and this process may have {limit}: "
            f"raise the limit, with `ulimit -n {max(1024, 2 * need)}` in the shell"
        )


def _remedies() -> dict[int, str]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    allowed = "unlimited" if processes == resource.RLIM_INFINITY else processes
    temporary = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
    space = f"Free some space, or set TMPDIR to a directory that has it (it is {temporary} now)"
    own = f"If that is in the temporary directory ({temporary}), set TMPDIR to one that you may write to"
    more_files = f"A process may open {files} files here: raise the limit, with `ulimit -n 1024` in the shell"
    return {
        errno.ENOSPC: space,
        errno.EDQUOT: space,
        errno.EROFS: own,
        errno.EACCES: own,
        errno.EMFILE: more_files,
        errno.ENFILE: more_files,
        errno.EAGAIN: (
            "The user, or the container, has too many processes or threads: end some, run fewer ranks at "
            f"once, or raise the limit (`ulimit -u` is {allowed}; a container has one of its own)"
        ),
    }
