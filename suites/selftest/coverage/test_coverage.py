"""Coverage of lines that run on ranks, killed ones too, and reports of ranks under `pytest -n`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from suites.selftest.project import Run, copy_project, line_of, run_pytest


def run(path: Path, *args: str) -> Run:
    """Run pytest --cov as in GitHub Actions, where each warning is an error."""
    copy_project("covered", path)
    measure = ("--cov=library", "--cov=only_on_ranks", "--cov-report=json")
    environ = {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}", "GITHUB_ACTIONS": "true"}
    return run_pytest(
        path, "-p", "no:cacheprovider", "-W", "error", *args, *measure, **environ, PYTHONWARNINGS="error"
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("distributed"), "-n1", "--rank-output-dir=kept")


@pytest.mark.parametrize("processes", ["alone", "distributed"])
def test_lines_that_ran_on_ranks_are_counted(request: pytest.FixtureRequest, processes: str) -> None:
    done: Run = request.getfixturevalue(processes)
    # The last test fails with its case, which counts too.
    assert "3 failed, 4 passed, 1 subtests passed in " in done.output
    measured = json.loads((done.path / "coverage.json").read_text())["files"]
    missing = {name: file["missing_lines"] for name, file in measured.items()}
    assert missing == {
        "library.py": [line_of("never runs", done.path / "library.py")],
        "only_on_ranks.py": [],
    }
    assert [path.name for path in done.path.glob(".coverage*")] == [".coverage"]


def test_pytest_n_writes_annotations_once_and_properties(distributed: Run) -> None:
    annotations = [line for line in distributed.output.splitlines() if line.startswith("::")]
    titles = sorted(re.findall("title=(.*?)::", line)[0] for line in annotations)
    assert titles == ["test_cases [n=2]", "test_killed"]
    killed = distributed.case("test_killed")
    properties = {node.get("name"): node.get("value") for node in killed.iter("property")}
    assert (properties["rank"], properties["cause"]) == ("0", "died: SIGKILL")


def test_controllers_of_pytest_n_keep_output(distributed: Run) -> None:
    kept = distributed.path / "kept"
    assert [path.name for path in (kept / "outside-of-tests").glob("*")] == ["gw0"]
    assert (kept / "test_it.py" / "test_killed" / "rank-0.stdout").read_text() == "dying\n"


def test_lines_that_ran_in_adopted_processes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def work(rank):\n    assert rank == 0\n")
    spawns = "import torch.multiprocessing as mp, work\ndef test_it():\n    mp.spawn(work.work, nprocs=1)\n"
    (tmp_path / "test_it.py").write_text(spawns)
    (tmp_path / ".coveragerc").write_text("[run]\npatch = subprocess\n")
    adopts = ("--ranks-adopt=spawn", "--ranks-adopt-report", "-o", "ranks_adopt_spawn=processes")
    measures = ("--cov=work", "--cov-report=json")
    # A new interpreter: in its server, which is another one, coverage is started before anything is forked.
    done = run_pytest(tmp_path, "-p", "no:cacheprovider", *adopts, *measures, fresh=True)
    assert "1 process from the server" in done.output
    measured = json.loads((tmp_path / "coverage.json").read_text())["files"]
    assert measured["work.py"]["missing_lines"] == []
