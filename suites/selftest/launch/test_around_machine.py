"""A machine that lacks something: space, descriptors, processes, a name. Each is told with its cure."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

# Python imports it at its start: here it makes the operating system refuse, once each, what a test is about.
FAULTS = """
import errno, os, pathlib, socket

def refuse(name, number, applies):
    original = getattr(os, name)
    def refusing(*args, **options):
        if applies(*args):
            raise OSError(number, os.strerror(number), *map(str, args[:1]))
        return original(*args, **options)
    setattr(os, name, refusing)

def once(name):
    try:
        os.close(os.open(os.environ["FAULTS"] + "/once-" + name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def unresolvable(*args, **options):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

faults = os.environ.get("LACKS", "").split()
if "space" in faults:
    refuse("mkdir", errno.ENOSPC, lambda path, *_: "pymp-" in str(path))
if "space-for-worlds" in faults:
    refuse("mkdir", errno.ENOSPC, lambda path, *_: "world-" in str(path))
if "processes" in faults and "LOCKSTEP_SERVER" in os.environ:
    refuse("fork", errno.EAGAIN, lambda: once("fork"))
if "space-for-logs" in faults:
    refuse("open", errno.EDQUOT, lambda path, *_: str(path).endswith("rank-1.log") and once("log"))
if "name" in faults:
    socket.getaddrinfo = socket.gethostbyname = socket.getfqdn = unresolvable
"""


def lack(project: Project, what: str) -> dict[str, str]:
    """Return the environment of a machine that lacks something."""
    folder = project.path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FAULTS)
    path = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"LACKS": what, "FAULTS": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.mark.parametrize("what", ["space", "space-for-worlds"])
def test_a_full_temporary_directory_is_told_with_its_cure(project: Project, what: str) -> None:
    project.write("def test_a(world): pass")
    output = project.run(environ=lack(project, what))
    assert "no world of 2 ranks (gloo, cpu): [Errno 28] No space left on device" in output
    assert "Free some space, or set TMPDIR to a directory that has it" in output
    assert "1 error" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_too_few_file_descriptors_are_told_with_the_cure(project: Project) -> None:
    project.write("@pytest.mark.ranks(8)\ndef test_a(world): pass")
    process = project.start(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)))
    output = process.communicate(timeout=120)[0]
    assert "open files and this process may have 32: raise the limit, with `ulimit -n 1024`" in output
    assert "1 error" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_what_stops_a_world_is_told_and_the_next_test_passes(project: Project) -> None:
    project.write("""
def test_no_process(world): pass
def test_no_space_for_a_log(world): pass
def test_passes(world): assert world.gather(world.rank) == [0, 1]

@pytest.mark.ranks(3)
def test_elsewhere(world): pass
""")
    remove, restore = (
        "os.rmdir(os.getcwd())",
        "os.mkdir(os.environ['PWD'])",
    )  # pytest itself needs it at the end
    tests = [f"import os\ndef test_unmarked(): {remove}", "@pytest.mark.ranks(4)\ndef test_a(world): pass"]
    (project.path / "test_then.py").write_text(tests[0])
    (project.path / "test_there.py").write_text(project.header + tests[1])
    (project.path / "test_too.py").write_text(tests[0].replace(remove, restore))
    (project.path / "cwd").mkdir()
    environ = {**lack(project, "processes space-for-logs name"), "PWD": str(project.path / "cwd")}
    nowhere = Path("/nowhere/to/be/found")  # Python then takes /tmp
    output = project.start("..", cwd="cwd", environ=environ, tmpdir=nowhere).communicate(timeout=120)[0]
    assert (
        "died while starting rank 0: [Errno 11] Resource temporarily unavailable. The user, or the" in output
    )
    assert "rank 1 did not start: [Errno 122] Disk quota exceeded: '/tmp/pymp-" in output
    assert "no world of 4 ranks (gloo, cpu): The directory that pytest runs in is gone" in output
    assert "4 passed, 3 errors" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()
