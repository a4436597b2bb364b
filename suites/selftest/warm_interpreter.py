"""The program of an interpreter that has imported the harness, and is forked for sessions under test.

A session finds imported what `OF_SESSIONS` and `IMPORTED` name; directory, environment, arguments and
descriptors are as `python -m` has them. The server of its ranks, workers of pytest-xdist and
processes that it spawns are forks, too: of a fork that was made before the session ran anything, as new
interpreters have nothing of it either. Standard library only until it is a program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

READ_AT_START = (
    *("PYTHON", "PYTORCH", "CXX", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "CUDA_"),
    *("CI", "HYPOTHESIS_"),
)
"""What names of variables begin with that matter when an interpreter starts, or imports torch, inductor or
Hypothesis."""
PATH = "PYTHONPATH"
"""Of these the one that is made up for in a fork."""
READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
"""Of these the ones that torch reads as it compiles; it writes the first where an optimizer is made."""
FOR_A_SERVER = {"OPENBLAS_NUM_THREADS": "1"}
"""What the harness adds to the environment of a server, which must have one thread to be forked from."""
IMPORTED = "LOCKSTEP_TEST_IMPORTED"
"""The variable that names more modules, which are then imported once for all sessions of a test file."""
MARK = "LOCKSTEP_TEST_MARK"
"""The variable by which tests find the processes of a session, in the environment they were started with."""
NO_MARK = "0" * 32
NAMESPACE = "LOCKSTEP_TEST_NAMESPACE"
"""The variable that names the network namespace of a session, which does not see it itself."""
CLONE_NEWNET = 0x40000000  # <linux/sched.h>
LARGEST_REQUEST = 2**20
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37  # <linux/prctl.h>
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""How the program of a worker of pytest-xdist begins."""
PROGRAMS = (
    "from multiprocessing.forkserver import main; ",
    "import sys; from multiprocessing.forkserver import main; ",  # of Python 3.14
    "from multiprocessing.spawn import spawn_main; ",
    WORKER,
)
"""How the programs begin that `multiprocessing` and pytest-xdist start, and that are forks here."""
OF_SESSIONS = (
    *("lockstep.controller.plugin", "lockstep.controller.option_checks", "lockstep.reporting.summary"),
    *("lockstep.rank.session", "lockstep.recorders", "xml.etree.ElementTree", "pdb"),
    *("lockstep.features.causes.causes", "lockstep.features.causes.summary"),
    *(f"lockstep.features.{name}.controller" for name in ("hosts", "layouts", "progress")),
)
"""What each session imports, itself or in the server of its ranks, besides torch, pytest and all plugins."""
REPEATED = "lockstep.launch.server"
"""Imported with these; in the server it works while it is imported, so it is imported there again."""
LATER = (
    *("_hypothesis_globals", "hypothesis", "platformdirs.pytest_plugin", "pytest_cov.plugin"),
    *("pytest_rerunfailures", "pytest_timeout", "xdist.plugin", "xdist.looponfail"),
)
"""Hypothesis, which its plugin imports at the end of a session, and plugins of pytest; not that plugin, which
counts imports."""
READ_AT_IMPORT: Mapping[str, tuple[str, Callable[[], object]]] = {
    "hypothesis.configuration": ("__hypothesis_home_directory_default", lambda: Path.cwd() / ".hypothesis"),
    "xdist.plugin": ("_sys_path", lambda: [*sys.path]),
}
"""What modules of these keep of the process that imports them: a variable, and its value in a session."""
HIGH = 500
"""The least number of a received descriptor, until it gets the one that it had in the session."""


def at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter when an interpreter starts, and cannot be made up for later."""
    matter = {name: value for name, value in environ.items() if name.startswith(READ_AT_START) and value}
    for name in (PATH, *READ_LATER):
        matter.pop(name, None)
    return matter


def import_all(names: Sequence[str]) -> None:
    """Import modules, for all processes that will be forked from this one."""
    for name in names:
        importlib.import_module(name)
    _keep_what_is_imported()


def _keep_what_is_imported() -> None:
    # What torch has registered is not taken back at the end of each session.
    of_weakref: Any = weakref.finalize
    for registered in of_weakref._registry:
        registered.atexit = False
    gc.freeze()


class SetAside(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of packages that have been imported, and that a session gets where it imports one of a package.

    Until then it does not find them in `sys.modules`, as it would not in a new interpreter.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self._modules = {name: sys.modules.pop(name) for name in [*sys.modules] if _package(name) in packages}
        self._specs = {name: module.__spec__ for name, module in self._modules.items()}

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in self._modules else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # it has been given one of this loader
        package = _package(module.__name__)
        for name in [name for name in self._modules if _package(name) == package]:
            sys.modules[name] = self._modules.pop(name)
            if name in READ_AT_IMPORT:
                variable, read = READ_AT_IMPORT[name]
                setattr(sys.modules[name], variable, read())


def _package(name: str) -> str:
    return name.partition(".")[0]


def _set_aside(names: Sequence[str]) -> None:
    """Import modules as a session of pytest would, and set them and the rest of their packages aside."""
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from lockstep.features.other_plugins.pytest_internals import import_with_rewritten_asserts

    installed = [name for name in names if importlib.util.find_spec(_package(name))]
    import_with_rewritten_asserts(installed)
    _keep_what_is_imported()
    found = SetAside({_package(name) for name in installed})
    sys.meta_path.insert(0, found)
    # A session puts its own finder of these packages before all others.
    of_pytest: Any = AssertionRewritingHook
    find = of_pytest.find_spec
    of_pytest.find_spec = lambda self, *wanted: found.find_spec(*wanted) or find(self, *wanted)


def _serve(requests: socket.socket) -> None:
    """Fork for each request, of a session or of an interpreter with more imports, until the last."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            request = json.loads(message)
            if "imported" in request:
                import_all(request["imported"])
                _serve(socket.socket(fileno=descriptors[0]))
            else:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                (_leave_to if "parent" in request else _watch)(request, *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(request: dict[str, Any], answers: int, output: int, errors: int) -> None:
    """Run a session in one more fork, and answer with its process id and its exit status."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        _become_session(output, errors, **request)
    for descriptor in (output, errors):
        os.close(descriptor)
    os.write(answers, f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, f"{status}\n".encode())
    os._exit(0)


def _leave_to(request: dict[str, Any], answers: int, output: int, errors: int, *given: int) -> None:
    """Run a session in a fork of one more fork, which the process `parent` adopts, and answer with its id.

    It has an input, if one is given.
    """
    parent = request.pop("parent")
    reader, writer = os.pipe()
    if os.fork() == 0:
        between = os.getpid()
        if (pid := os.fork()) == 0:
            for each in (answers, reader, writer):
                os.close(each)
            _await_adoption(between, parent)
            for each in given:
                os.dup2(each, 0)
                os.close(each)
            _become_session(output, errors, **request)
        os.write(writer, f"{pid}\n".encode())
        os._exit(0)
    os.wait()
    os.write(answers, os.read(reader, 20))
    os._exit(0)


def _await_adoption(between: int, parent: int) -> None:
    while os.getppid() == between:  # until it has ended, and `parent` has adopted this process
        time.sleep(0.0005)
    if os.getppid() != parent:
        os._exit(1)


def _become_session(
    output: int, errors: int, module: str, arguments: list[str], cwd: str, environ: dict[str, str]
) -> NoReturn:
    """Be what `python -m MODULE ARGUMENTS` is, until it would take down the interpreter."""
    os.setsid()
    for descriptor, number in ((output, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(cwd)
    first = [] if sys.flags.safe_path else [cwd]
    sys.path[: len(first) + len(_python_path(os.environ))] = [*first, *_python_path(environ)]
    sys.path[1:] = dict.fromkeys(sys.path[1:])
    if namespace := environ.pop(NAMESPACE, ""):
        _enter(namespace)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    sys.argv, sys.orig_argv = ["-m", *arguments], [sys.executable, "-m", module, *arguments]
    _write_mark(environ.get(MARK, NO_MARK))
    offer_interpreters()
    # What `python -m` calls.
    end_with(lambda: runpy._run_module_as_main(module))  # type: ignore[attr-defined]


def _enter(namespace: str) -> None:
    """Enter a network namespace with all that this process, which has one thread, will start."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(descriptor)


def _python_path(environ: Mapping[str, str]) -> list[str]:
    """Return what an interpreter finds behind the first place of its path."""
    return [os.path.abspath(path) for path in environ[PATH].split(os.pathsep)] if environ.get(PATH) else []


def _write_mark(mark: str) -> None:
    """Write a mark into the environment that this process was started with, as the kernel shows it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    offset = ctypes.string_at(begin, end - begin).index(f"{MARK}={NO_MARK}".encode())
    ctypes.memmove(begin + offset, f"{MARK}={mark}".encode(), len(MARK) + 1 + len(NO_MARK))


def offer_interpreters() -> None:
    """Give this process forks of what it is now where it would start new interpreters for `PROGRAMS`.

    Where these would not start as one would now, as variables have changed, they remain new interpreters.
    """
    as_now = {**at_start(os.environ), **FOR_A_SERVER}
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setpgid(0, 0)  # no Ctrl-C reaches it
        orders.close()
        _serve_session(theirs)
    theirs.close()
    of_multiprocessing: Any = util
    of_subprocess: Any = subprocess.Popen
    spawn, execute = of_multiprocessing.spawnv_passfds, of_subprocess._execute_child

    def start(
        arguments: Sequence[Any], environ: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> int | None:
        """Return the pid of a fork, with descriptors under given numbers; None where there is to be none."""
        words = [os.fsdecode(word) for word in arguments]
        differs = {**at_start(environ), **FOR_A_SERVER} != as_now
        if "-c" not in words or not words[words.index("-c") + 1].startswith(PROGRAMS) or differs:
            return None
        order = {
            "words": words[words.index("-c") + 1 :],
            "numbers": [*descriptors],
            "cwd": os.getcwd(),
            "environ": dict(environ),
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "parent": os.getpid(),
        }
        adopts = adopt_orphans(True)
        socket.send_fds(orders, [json.dumps(order).encode()], [*descriptors.values()])
        pid = int(orders.recv(20))
        adopt_orphans(adopts)
        return pid

    def spawnv_passfds(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
        pid = start(arguments, _environ(), {each: each for each in (0, 1, 2, *passed)})
        return pid or spawn(path, arguments, passed)

    def execute_child(self: Any, arguments: Any, *others: Any) -> None:
        environ, pipes = others[5], (others[9], others[12], others[14])
        streams = {number: number if given == -1 else given for number, given in enumerate(pipes)}
        if isinstance(arguments, list) and (pid := start(arguments, environ or _environ(), streams)):
            self.pid, self._child_created = pid, True
            for given in {*pipes} - {-1}:
                os.close(given)
        else:
            execute(self, arguments, *others)

    of_multiprocessing.spawnv_passfds = spawnv_passfds
    of_subprocess._execute_child = execute_child


def _environ() -> dict[str, str]:
    """Return the environment that a new program gets: that of `os.environ`, and what readline adds."""
    pointer: Any = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    lines = map(os.fsdecode, itertools.takewhile(bool, pointer))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def adopt_orphans(adopts: bool) -> bool:
    """Say whether this process is to be the parent of what its children leave; return whether it was."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    return bool(before.value)


def _serve_session(orders: socket.socket) -> NoReturn:
    """Fork as the session orders, until it has ended. Its children are orphans, which the session adopts."""
    while True:
        message, received, *_ = socket.recv_fds(orders, LARGEST_REQUEST, 16)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            between = os.getpid()
            if (pid := os.fork()) == 0:
                for each in (orders.detach(), reader, writer):
                    os.close(each)
                _become_program(received, between=between, **json.loads(message))
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        orders.send(os.read(reader, 20))
        for each in (reader, writer, *received):
            os.close(each)


def _become_program(
    received: list[int],
    words: list[str],
    numbers: list[int],
    cwd: str,
    environ: dict[str, str],
    blocked: list[int],
    parent: int,
    between: int,
) -> NoReturn:
    """Be what `python -c WORDS` is, to its end, with each received descriptor under its number."""
    _await_adoption(between, parent)
    os.setpgid(0, os.getpgid(parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in received]
    for each in received:
        os.close(each)
    for each, number in zip(high, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["-c", *words[1:]]
    sys.modules.pop(REPEATED, None)
    if words[0].startswith(WORKER):
        offer_interpreters()  # a session of pytest, too, whose ranks have a server
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    end_with(lambda: exec(words[0], vars(main)))


def end_with(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end as an interpreter does, but for freeing its objects: of torch they are many."""
    status = 0
    try:
        program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and error.code is not status:
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or of a pipe without a reader: it ends anyway
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    import_all(sys.argv[2:] or ["pytest", "torch", *OF_SESSIONS])
    if not sys.argv[2:]:
        _set_aside(LATER)
    _serve(socket.socket(fileno=int(sys.argv[1])))
