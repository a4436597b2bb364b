"""Directories of compile caches, and code of inductor that is kept in them."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.ranks(2)
HERE = Path(__file__).parent
LIMIT = sys.getrecursionlimit()
COMPILED = []
VARIABLES = {name for name in os.environ if "INDUCTOR" in name}


def note(world, test, text):
    worker = os.environ["PYTEST_XDIST_WORKER"]  # that of the rank where there is none
    (HERE / f"{test}-{worker}-{world.rank}.txt").write_text(text)


def directory():
    return os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.parametrize("number", range(2))
def test_leased(world, number):
    """Two controllers run one of these each: neither ends before both have compiled."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    note(world, f"leased{number}", directory())
    while len([*HERE.glob(f"leased?-*-{world.rank}.txt")]) < 2:  # the deadline of the test is the bound
        time.sleep(0.02)


def test_nothing_compiled(world):
    note(world, "unused", directory())


def test_of_the_test(world, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert directory() == str(tmp_path)


def test_inductor(compiles, world, monkeypatch):
    from torch._inductor import config, cpu_vec_isa

    # All that the C++ compiler is called for is the code of `kept`: no probes, no headers before it.
    instructions = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) == "avx2"]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", instructions)
    monkeypatch.setattr(config, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: True)
    COMPILED.append(world)

    def kept(x):
        return (x.sin() * 2).sum()

    torch.testing.assert_close(torch.compile(kept)(torch.ones(4)), torch.ones(4).sin().sum() * 2)
    note(world, "inductor", f"{compiles.cache_hits} {compiles.cache_misses} {directory()}")


def test_after_inductor(world):
    """Inductor leaves the process as it was before, and its threads have a name."""
    assert COMPILED  # the process is the same
    assert sys.getrecursionlimit() == LIMIT
    assert {name for name in os.environ if "INDUCTOR" in name} == VARIABLES
    names = {thread.name.partition("_")[0] for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("ThreadPoolExecutor", "Thread-"))}, names


@pytest.mark.ranks(2, backend="fake")
def test_nothing_is_kept_of_a_fake_world(world):
    assert os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"
