"""Findings on what ranks need of the machine: directories, limits, memory, the loopback interface.

Nothing here starts a rank, and torch need not be installed. Standard library only, but for the limits that
`lockstep.launch` knows: their errors need pytest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.doctor.finding import MIB, Finding, note, ok, problem
from lockstep.launch.multiprocessing_internals import MAX_TEMPORARY_DIRECTORY

RANKS = 2
"""The size of the world that must work."""
FREE_SPACE = 64 * MIB
"""Bytes in the temporary directory below which a run will fail: logs of ranks, files of tests."""
LITTLE_SPACE = 1024 * MIB
OF_A_RANK = 256 * MIB
"""Memory that a rank may take before its test allocates anything; most of it is shared with the server."""
PROCESSES_OF_A_RUN = 32
"""Processes and threads of a run of two ranks, with those of gloo and of BLAS."""
SHARED = 256 * MIB
"""Free bytes in /dev/shm below which loaders of data may fail; Docker gives a container 64 MiB."""
REMEDY_TMPDIR = "set TMPDIR to a directory of yours on a local disk, such as /var/tmp/NAME"


def system() -> Finding:
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if platform.system() != "Linux":
        why = "Lockstep is tested on Linux alone: shm, pidfd and /proc are Linux's"
        return note("system", name, why, "run tests on ranks in a Linux container")
    if platform.machine() != "x86_64":
        return note("system", name, "Lockstep was tested on x86-64 alone")
    return ok("system", name)


def temporary_directory() -> Iterator[Finding]:
    """Look at the directory of sockets, logs and leases: that it is there, its path, its space, its mount."""
    asked = os.environ.get("TMPDIR", "")
    try:
        path = tempfile.gettempdir()
    except FileNotFoundError:
        why = "sockets, logs of ranks and leases are kept there"
        yield problem("temp", "no temporary directory can be written to", why, REMEDY_TMPDIR)
        return
    if asked and os.path.realpath(path) != os.path.realpath(asked):
        why = "Python silently takes another one where TMPDIR is missing or cannot be written to"
        yield note("temp", f"TMPDIR={asked} is not used, {path} is", why, REMEDY_TMPDIR)
    else:
        yield ok("temp", f"{path}")
    if len(path) > MAX_TEMPORARY_DIRECTORY:
        yield _of_long_path(path)
    yield from _of_space(path)
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        yield note(
            "temp-noexec",
            f"{path} is mounted noexec",
            "what torch.compile and torch.utils.cpp_extension build there cannot be loaded: such tests fail",
            "set TMPDIR, or TORCHINDUCTOR_CACHE_DIR and TORCH_EXTENSIONS_DIR, to a directory without noexec",
        )


def _of_long_path(path: str) -> Finding:
    what = f"the path of the temporary directory has {len(path)} characters"
    why = f"the path of a socket has at most 107: beyond {MAX_TEMPORARY_DIRECTORY} sockets are made in /tmp"
    if os.access("/tmp", os.W_OK | os.X_OK):
        return note("temp-length", what, why, "set a shorter TMPDIR if /tmp is not to be used")
    return problem("temp-length", what, f"{why}, which cannot be written to", "set a shorter TMPDIR")


def _of_space(path: str) -> Iterator[Finding]:
    mount = os.statvfs(path)
    free = mount.f_bavail * mount.f_frsize
    what, why = f"{path} has {free // MIB} MiB free", "logs and files of tests are written there"
    if free < FREE_SPACE:
        yield problem("temp-space", what, why, f"free some space, or {REMEDY_TMPDIR}")
    elif mount.f_files and not mount.f_favail:
        yield problem("temp-space", f"{path} has no inode left", why, f"remove files, or {REMEDY_TMPDIR}")
    elif free < LITTLE_SPACE:
        yield note("temp-space", what, why, f"free some space, or {REMEDY_TMPDIR}")
    else:
        yield ok("temp-space", what)


def compiler() -> Finding:
    """Look for the C++ compiler by which torch.compile makes code for the CPU."""
    name = os.environ.get("CXX") or "g++"
    if found := shutil.which(name):
        return ok("compiler", found)
    what = f"no C++ compiler {name} on the path"
    why = "inductor, the default backend of torch.compile, needs it on CPUs; eager and aot_eager do not"
    return note("compiler", what, why, "install g++ (apt-get install g++), or set CXX")


def open_files() -> Finding:
    """Look at the limit of file descriptors; needs pytest."""
    from lockstep.exceptions import LaunchError
    from lockstep.launch.limits import FILES_AT_LEAST, FILES_OF_A_RANK, check_open_files

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        check_open_files(RANKS)
    except LaunchError as error:
        what, _, remedy = str(error).rpartition(": ")
        return problem("open-files", what, "the controller keeps three for each rank", remedy)
    if limit == resource.RLIM_INFINITY:
        return ok("open-files", "no limit")
    most = (limit - len(os.listdir("/dev/fd")) - FILES_AT_LEAST) // FILES_OF_A_RANK
    what = f"a process may open {limit} files, enough for {most} ranks"
    if limit < 256:
        why = "what a test opens counts too: data loaders, process groups, checkpoints"
        return note("open-files", what, why, "raise the limit, with `ulimit -n 1024` in the shell")
    return ok("open-files", what)


def processes() -> Finding:
    """Look at the limits of processes and threads: of the user, and of a container."""
    bounds = []
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY and os.geteuid() != 0:  # root has none
        bounds.append((limit - _threads_of_user(), f"`ulimit -u` is {limit}", "raise `ulimit -u`"))
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        most, now = _number(f"{folder}/pids.max"), _number(f"{folder}/pids.current")
        if most is not None and now is not None:
            bounds.append((most - now, f"the container may have {most}", "raise its limit (--pids-limit)"))
    if not bounds:
        return ok("processes", "no limit")
    left, which, remedy = min(bounds)
    what, why = (
        f"{left} more processes and threads may start: {which}",
        "a rank is a process with a few threads",
    )
    if left < PROCESSES_OF_A_RUN:
        return problem("processes", what, why, f"end some processes, or {remedy}")
    if left < 8 * PROCESSES_OF_A_RUN:
        return note("processes", what, f"{why}; OpenMP and data loaders start more", remedy)
    return ok("processes", what)


def _threads_of_user() -> int:
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if entry.stat().st_uid == os.getuid():
                count += len(os.listdir(entry / "task"))
    return count


def _number(path: str) -> int | None:
    """Return the number in a file of the kernel; None where there is none, or it has "max"."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def processors() -> Finding:
    """Look at the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    if cores < RANKS:
        why = "ranks take turns: what takes 3 ms on two cores takes 10 to 20, and deadlines come sooner"
        return note("cores", f"{cores} core", why, "raise --world-timeout where tests meet their deadline")
    return ok("cores", f"{cores} cores")


def memory() -> Finding:
    """Look at the memory that is left on the machine and in the container."""
    left = []
    with contextlib.suppress(OSError, IndexError, ValueError):
        left.append(int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10)
    most, now = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if most is not None and now is not None:
        left.append(most - now)
    if not left:
        return ok("memory", "not known here")
    what = f"{min(left) // MIB} MiB can be had"
    why = f"the server and each rank take up to {OF_A_RANK // MIB} MiB, with what tests allocate beside"
    remedy = "end other processes, run smaller worlds, or set ranks_at_once"
    if min(left) < (RANKS + 1) * OF_A_RANK:
        return problem("memory", what, f"{why}; the kernel kills a rank that finds none", remedy)
    if min(left) < 2 * (RANKS + 1) * OF_A_RANK:
        return note("memory", what, why, remedy)
    return ok("memory", what)


def shared_memory() -> Finding:
    """Look at /dev/shm, which data loaders, semaphores and nccl use; the harness and shm do not."""
    why = "data loaders of torch, semaphores of multiprocessing and nccl keep what processes share there"
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        remedy = "mount a tmpfs there: `mount -t tmpfs tmpfs /dev/shm`"
        return note("dev-shm", f"/dev/shm: {error.strerror}", why, remedy)
    what = f"/dev/shm has {free // MIB} MiB free"
    if free < SHARED:
        return note("dev-shm", what, why, "in Docker: `--shm-size=1g`, or `--ipc=host`")
    return ok("dev-shm", what)


def kernel() -> Iterator[Finding]:
    """Look at the system calls that the backend shm consists of, which a sandbox may refuse."""
    remedy = "use gloo, or a sandbox (seccomp profile) that allows it"
    calls: tuple[tuple[str, str, Callable[[], int]], ...] = (
        ("memfd", "`memfd_create`: memory that ranks of shm share", _open_memory_from_a_child),
        (
            "pidfd",
            "`pidfd_open`: how ranks of shm, and the controller, learn of a death",
            lambda: os.pidfd_open(os.getpid()),
        ),
    )
    for name, what, attempt in calls:
        try:
            os.close(attempt())
        except (OSError, AttributeError) as error:
            number = getattr(error, "errno", None)
            said = os.strerror(number) if number else "this Python has no such function"
            yield problem(name, f"{what}: {said}", "the backend shm will not work here", remedy)
        else:
            yield ok(name, what.split(":")[0] + " works")


def _open_memory_from_a_child() -> int:
    """Open memory of this process in another one, through /proc, as ranks of shm do; return its descriptor.

    Raises:
        OSError: the memory cannot be made, or be opened by another process of this user.
    """
    fd = os.memfd_create("lockstep-doctor", os.MFD_CLOEXEC)
    code = "import sys\ntry: open(sys.argv[1], 'r+b')\nexcept OSError as error: sys.exit(error.errno)"
    command = [sys.executable, "-S", "-c", code, f"/proc/{os.getpid()}/fd/{fd}"]
    try:
        number = subprocess.run(command, timeout=20, check=False, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        number = errno.ETIMEDOUT
    if number:
        os.close(fd)
        raise OSError(number, os.strerror(number))
    return fd


def loopback() -> Finding:
    """Look at the loopback interface, to which gloo is bound."""
    what, why = "127.0.0.1 can be reached", "gloo connects ranks over it"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        said = f"127.0.0.1 cannot be reached: {os.strerror(error.errno or errno.ETIMEDOUT)}"
        return problem("loopback", said, why, "bring it up, `ip link set lo up`, or use --backend shm")
    return ok("loopback", what)


def environment() -> Iterator[Finding]:
    """Look at variables that change how tests on ranks run."""
    for name, why, remedy in _VARIABLES:
        if name in os.environ:
            yield note(f"variable-{name}", f"{name}={os.environ[name]}", why, remedy)


_VARIABLES = (
    (
        "WORLD_SIZE",
        "this looks like a process of torchrun: Lockstep starts its ranks itself",
        "run plain `pytest`",
    ),
    (
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
        "pytest does not load installed plugins, nor Lockstep: the mark `ranks` is unknown",
        "add -p lockstep to the command or to addopts",
    ),
    ("PYTEST_ADDOPTS", "every pytest run takes these options, in ranks too", ""),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        "with DETAIL each collective takes 2 ms more; Lockstep finds mismatches without it",
        "unset it unless you look for something that it logs",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "kernels run one by one: races and overlap are not seen as in a training",
        "unset it",
    ),
    ("GLOO_SOCKET_IFNAME", "gloo binds to this interface; ranks need the loopback alone", "unset it"),
)


def leases() -> Iterator[Finding]:
    """Look at the leases of ranks and GPUs that runs of this user hold now."""
    from lockstep.exceptions import LaunchError
    from lockstep.features.leases.lease_store import LeaseStore, default_directory

    directory = default_directory()
    if not directory.exists():
        yield ok("leases", f"none held, {directory} is not there yet")
        return
    try:
        store = LeaseStore(directory)
        with store.locked():
            held = [str(lease.request) for lease in store.read()]
    except (LaunchError, OSError) as error:
        what, _, remedy = str(error).rpartition(". ")
        why = "runs on GPUs, and with ranks_at_once, keep leases there"
        yield problem("leases", what, why, remedy or "set LOCKSTEP_LEASES to a directory of yours")
        return
    for each in held:
        yield note("lease", f"held by {each}", "a run that needs the same waits for it", "end that run")
    yield ok("leases", f"{len(held)} held, in {directory}")
