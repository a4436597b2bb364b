"""A machine without a /proc that can be read: gloo works, with fewer checks, and shm gives the reason."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suites.selftest.project import Project

TESTS = """
import os
import torch.distributed as dist

def test_sound(world):
    dist.barrier()

def test_dies(world):
    if world.rank == 1:
        os.abort()
    dist.barrier()

def test_fails(world):
    assert world.rank == 0
    dist.barrier()

def test_sound_again(world):
    dist.barrier()

@pytest.mark.ranks(2, backend="shm")
def test_shm(world):
    pass
"""
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
HIDE = "mount -t tmpfs none /proc && exec "


def can_hide_proc() -> bool:
    command = ["unshare", "--mount", "sh", "-c", f"{HIDE}true"]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=180).returncode == 0
    except OSError:
        return False


@pytest.fixture(scope="module")
def without_proc(shared_project: Project) -> str:
    if not can_hide_proc():
        pytest.skip("this user may not make a mount namespace")
    shared_project.write(TESTS)
    command = f"{HIDE}{sys.executable} -m pytest -p lockstep.plugin -p no:cacheprovider -ra -v"
    temporary = str(shared_project.path / "tmp")
    environ = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": temporary, "PATH": PATH}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        cwd=shared_project.path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


def test_gloo_needs_no_proc(without_proc: str) -> None:
    for verdict in ("test_sound PASSED", "test_dies FAILED", "test_fails FAILED", "test_sound_again PASSED"):
        assert f"::{verdict}" in without_proc
    assert "rank 1 of 2 died: SIGABRT" in without_proc
    assert "FileNotFoundError" not in without_proc


def test_shm_says_that_it_needs_proc(without_proc: str) -> None:
    assert "the backend shm opens the memory of other ranks through /proc, and cannot read it" in without_proc
    assert "1 error" in without_proc
