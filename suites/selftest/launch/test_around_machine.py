"""A machine that lacks space, descriptors, processes or a name: each is reported with its remedy."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import HEADER, copy_project

if TYPE_CHECKING:
    from suites.selftest.project import Project


def lack(project: Project, what: str) -> dict[str, str]:
    """Return the environment of a machine that lacks something."""
    project.fresh = True  # it is an interpreter's start that makes it so
    folder = project.path / "site"
    copy_project("lacking", project.path)
    path = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"LACKS": what, "FAULTS": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}


@pytest.mark.parametrize("what", ["space", "space-for-worlds"])
def test_a_full_temporary_directory_is_reported_with_a_remedy(project: Project, what: str) -> None:
    project.write("def test_a(world): pass")
    output = project.run(environ=lack(project, what))
    assert "no world of 2 ranks (gloo, cpu): [Errno 28] No space left on device" in output
    assert "Free some space, or set TMPDIR to a directory that has it" in output
    assert "1 error" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_a_temporary_directory_may_have_any_name(project: Project) -> None:
    """Also one that is no UTF-8, which torch refuses for the files that ranks meet in."""
    project.write("def test_x(world, tmp_path):\n    world.barrier()\n    (tmp_path / 'file').touch()\n")
    directory = Path(os.fsdecode(os.fsencode(project.path / "tmp") + b"/\xff"))
    directory.mkdir()
    assert "= 1 passed in" in project.run(tmpdir=directory)


def test_too_few_file_descriptors_are_reported_with_a_remedy(project: Project) -> None:
    project.write("@pytest.mark.ranks(8)\ndef test_a(world): pass")
    process = project.start(prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)))
    output = process.communicate(timeout=120)[0]
    assert "open files and this process may have 32: raise the limit, with `ulimit -n 1024`" in output
    assert "1 error" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_a_world_that_cannot_start_fails_one_test_only(project: Project) -> None:
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
    (project.path / "test_there.py").write_text(HEADER + tests[1])
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
