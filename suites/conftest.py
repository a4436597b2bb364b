"""What the suites that hold an engine to its behaviour share."""

from pathlib import Path

import pytest

SUITES = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Register the profile `long` of properties/conftest.py, before Hypothesis's plugin looks for it."""
    if config.getoption("hypothesis_profile", None) == "long":
        from hypothesis import Phase, settings

        # What is explained of an example takes minutes, and is no news beside its few lines.
        phases = [phase for phase in Phase if phase != Phase.explain]
        settings.register_profile("long", max_examples=500, deadline=None, phases=phases)


@pytest.fixture(autouse=True)
def freed_memory_is_nan(request, monkeypatch):
    """Let the built-in engine fill memory that is freed or sent with NaN, so that a late reader fails a test.

    Not in selftest and engine: their tests turn the switch on where it is what they are about.
    """
    if request.path.relative_to(SUITES).parts[0] not in ("selftest", "engine"):
        monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")


@pytest.fixture
def group_of_one():
    """The default process group of a test without ranks: this process alone, and nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
