"""Messages between the halves of a feature while a test runs."""

from __future__ import annotations

from suites.selftest.project import Project

CONFTEST = """
import queue
import pytest
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.protocol import Part

received = queue.SimpleQueue()

def pytest_ranks_message(run, rank, part):
    if part.feature == "mine":
        run.send(rank, Part("mine", (rank, part.data)))

def pytest_ranks_part(part):
    received.put(part)

@pytest.fixture
def asked(request, world):
    session = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    session.rank.wire.send(Part("mine", f"of {world.rank}"))
    return received.get()
"""

TEST = """
def test_a(world, asked):
    assert asked.feature == "mine"
    assert asked.data == (world.rank, f"of {world.rank}")
"""


def test_a_feature_on_a_rank_is_answered_by_its_half_in_the_controller(project: Project) -> None:
    (project.path / "conftest.py").write_text(CONFTEST)
    project.write(TEST)
    assert "1 passed" in project.run()
