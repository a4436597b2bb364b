"""The life of worlds: reused, made fresh, replaced, restored, closed. One session shows it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from suites.selftest.shared_memory import left_in_shared_memory, names_in_shared_memory

if TYPE_CHECKING:
    from suites.selftest.project import Project


# In the order in which they run.
FILES = (
    *("warm", "restored", "wide", "after_wide", "on_request", "seeds", "loopback", "import_before", "import"),
    *("no_start", "breaks_late", "wide_deadline", "pace", "silence", "death", "bomb"),
)


@dataclass(frozen=True)
class Session:
    """The reports of the one session."""

    project: Project
    output: str
    reports: dict[str, list[tuple[str, str]]]
    """Node id and text of each report, by pytest's own categories."""
    shared_memory: set[str]
    """The segments that were there before."""

    def outcomes(self, file: str) -> dict[str, int]:
        """Count as pytest's last line does, in one file."""
        counts = {category: len(self._of(file, category)) for category in self.reports}
        return {category: count for category, count in counts.items() if count and category}

    def warnings(self, file: str) -> list[str]:
        return self._of(file, "warnings")

    def failure(self, file: str, test: str) -> str:
        """Return the reports of the failures and errors of one test."""
        reports = [*self.reports.get("failed", []), *self.reports.get("error", [])]
        return "\n".join(text for nodeid, text in reports if nodeid == f"test_{file}.py::{test}")

    def _of(self, file: str, category: str) -> list[str]:
        reports = self.reports.get(category, [])
        return [text for nodeid, text in reports if nodeid.startswith(f"test_{file}.py::")]


@pytest.fixture(scope="module")
def session(shared_project: Project) -> Session:
    path, shared_memory = shared_project.path, names_in_shared_memory()
    shared_project.copy("worlds")
    # Torch makes a folder for what it compiles, where deterministic algorithms are requested.
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(path / "inductor")}
    output = shared_project.run(*(f"test_{file}.py" for file in FILES), environ=environ)
    return Session(shared_project, output, json.loads((path / "reports.json").read_text()), shared_memory)


def test_nothing_is_left_after_a_run_with_failures(session: Session) -> None:
    assert session.outcomes("death") == {"failed": 1, "passed": 1, "warnings": 1}
    session.project.assert_nothing_is_left()
    assert left_in_shared_memory(session.shared_memory) == []


def test_worlds_are_reused_by_size_and_replaced_after_a_failure(session: Session) -> None:
    assert session.outcomes("warm") == {"failed": 1, "passed": 7}
    warm, replaced, fresh, three = map(session.project.pids, ("warm", "replaced", "fresh", "three"))
    assert len(warm) == 4
    assert len(set(warm)) == 1
    assert len(three) == 2
    assert len(set(three)) == 1
    assert len(replaced) == len(fresh) == 1
    assert not {*warm, *three} & {*replaced, *fresh}
    assert set(session.project.pids("warm", rank=1)).isdisjoint(warm)


def test_state_that_a_test_changes_is_restored_and_reported(session: Session) -> None:
    assert session.outcomes("restored") == {"passed": 4, "warnings": 1}
    pids = session.project.pids("pids")
    assert len(pids) == 3
    assert len(set(pids)) == 1
    (warning,) = session.warnings("restored")  # one of all ranks, none of the mesh
    assert "RankStateWarning: the test left behind" in warning
    assert "default dtype: torch.float64 (was torch.float32)" in warning
    assert "environ: HOME, LEFT" in warning
    assert "1 process group" in warning


def test_state_that_a_wider_fixture_changes_stands_until_it_ends(session: Session) -> None:
    assert session.outcomes("wide") == {"passed": 3, "warnings": 1}
    assert session.outcomes("after_wide") == {"passed": 1}
    for warning in session.warnings("wide"):
        assert "default dtype: torch.float16 (was torch.float64)" in warning


def test_a_requested_fixture_does_not_adopt_state_of_its_test(session: Session) -> None:
    assert session.outcomes("on_request") == {"passed": 2}


def test_seeds_are_equal_on_all_ranks_before_every_test(session: Session) -> None:
    assert session.outcomes("seeds") == {"passed": 2}
    first, second = (session.project.path / "numbers-0.txt").read_text().splitlines()
    assert first == second
    assert first.startswith(f"({random.Random(0).random()}, ")
    assert first.endswith(" 0)")


def test_groups_listen_on_the_loopback_interface_only(session: Session) -> None:
    assert session.outcomes("loopback") == {"passed": 1}


def test_the_import_of_the_next_file_is_no_part_of_a_test(session: Session) -> None:
    assert session.outcomes("import_before") == {"passed": 1}
    assert session.outcomes("import") == {"passed": 1}


def test_a_rank_that_cannot_start_says_why(session: Session) -> None:
    assert session.outcomes("no_start") == {"error": 1}
    error = session.failure("no_start", "test_a")
    assert error.startswith("no world of 4 ranks (gloo, cpu): rank 1")
    assert "rank 1 has no licence" in error


def test_a_fixture_that_breaks_as_its_world_closes_fails_the_run(session: Session) -> None:
    assert session.outcomes("breaks_late") == {"passed": 6, "error": 1}
    assert "ERROR test_breaks_late.py::test_a" in session.output
    assert "AssertionError: closing" in session.failure("breaks_late", "test_a")


def test_a_wide_fixture_has_a_full_deadline_for_its_tear_down(
    session: Session,
) -> None:
    assert session.outcomes("wide_deadline") == {"failed": 1, "passed": 1}
    assert (session.project.path / "torn-down.txt").exists()


def test_ranks_leave_collectives_and_failed_tests_in_their_time(session: Session) -> None:
    assert session.outcomes("pace") == {"failed": 1, "passed": 1}
    torn_down = [session.project.pids("torn-down", rank) for rank in (0, 1)]
    assert [len(pids) for pids in torn_down] == [1, 1]


def test_silence_and_disagreement_are_failures(session: Session) -> None:
    assert "rank 1 of 2 sent no report of the setup phase" in session.failure("silence", "test_silent")
    failure = session.failure("silence", "test_subtests_disagree")
    assert "skipped it and others did not: ranks disagree" in failure
    assert "rank 1 of 2 did not reach it and others did: ranks disagree" in failure


def test_a_rank_that_dies_after_a_test_fails_that_test(session: Session) -> None:
    assert session.outcomes("bomb") == {"passed": 3, "error": 1, "warnings": 1}  # for its timer
    assert session.failure("bomb", "test_leaves_a_bomb")
    assert "ERROR test_bomb.py::test_leaves_a_bomb" in session.output


# Not in the session: preloading makes it cheap here.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_dtensors_of_one_test_do_not_use_groups_of_another(world: Any, turn: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).detach()
    assert tensor.full_tensor().tolist() == [1, 1]
    dist.destroy_process_group(group)
