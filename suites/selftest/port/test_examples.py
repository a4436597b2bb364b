"""The examples of the porting guide: both sides pass, `port` writes those it converts, faults are found."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from lockstep.port.module import port
from suites.selftest.project import PROJECTS, Run, run_pytest
from suites.selftest.warm_pytest import run_module

EXAMPLES = Path(__file__).parents[3] / "examples" / "porting"
KINDS = ("multi_process", "continuous", "spawn", "torchrun", "deepspeed", "pool")

# The launchers start new interpreters, which import torch for seconds. Here all processes are forked from one
# that has, this program: a pytest for the launchers that tests call, and what torchrun starts, one for each
# rank with these variables.
ORIGINALS = """
import multiprocessing.context, os, sys, pytest, torch

contexts = multiprocessing.context._concrete_contexts
contexts["spawn"] = contexts["fork"]


def fork(name, *args):
    if os.fork() == 0:
        output = os.open(name, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = pytest.main(["-q", "-p", "no:cacheprovider", *args])
        sys.stdout.flush()
        os._exit(status)


port, *folders = sys.argv[1:]
fork("launchers", *folders)
for rank in ("0", "1"):
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    fork(f"torchrun-{rank}", "torchrun/before")
for _ in range(3):
    os.wait()
"""


def copy_examples(path: Path) -> None:
    shutil.copytree(EXAMPLES, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of what all kinds became, and of the faults."""
    path = tmp_path_factory.mktemp("after")
    copy_examples(path)
    arguments = ["-p", "lockstep", "-o", "ranks_preload=", *(f"{kind}/after" for kind in KINDS), "faulty.py"]
    return run_pytest(path, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


@pytest.mark.parametrize(("kind", "count"), list(zip(KINDS, (3, 4, 3, 3, 5, 5), strict=True)))
def test_ported_tests_pass(on_ranks: Run, kind: str, count: int) -> None:
    of_kind = [
        on_ranks.outcome(name)
        for name, (case, *_) in on_ranks.cases.items()
        if case.attrib["classname"].startswith(f"{kind}.")
    ]
    assert of_kind == ["passed"] * count


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("killed", "rank 1 of 2 died: SIGKILL"),
        ("exits", "rank 1 of 2 exited with code 0"),
        ("hangs", "rank 0 waits in all_reduce #1 (float [1]), which rank 1 never reached"),
        ("deadlocks", "deadlock: rank 0 waits in all_reduce #1 (float [1]) for rank 1; rank 1 waits in"),
        ("skips", "rank 1 of 2 skipped (not on this rank) and others did not: ranks disagree"),
    ],
)
def test_the_faults_of_the_guide_are_named(on_ranks: Run, fault: str, verdict: str) -> None:
    assert verdict in on_ranks.failure(f"test_fault[{fault}]")


def test_a_process_that_is_left_is_named_and_ended(on_ranks: Run) -> None:
    assert on_ranks.outcome("test_fault[leaks]") == "passed"
    assert "sleep 100" in on_ranks.output
    assert on_ranks.outcome("test_healthy") == "passed"


def test_the_originals_pass_under_their_launchers(tmp_path: Path) -> None:
    copy_examples(tmp_path)
    (tmp_path / "deepspeed" / "unit").mkdir()
    launcher = PROJECTS / "adopt" / "distributed_test" / "launcher.py"
    shutil.copy(launcher, tmp_path / "deepspeed" / "unit" / "common.py")
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        number = listener.getsockname()[1]
    (tmp_path / "originals.py").write_text(ORIGINALS)
    folders = (f"{kind}/before" for kind in KINDS if kind != "torchrun")
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": "."}
    done = run_module("originals", str(number), *folders, cwd=tmp_path, environ=environ, timeout=240)
    assert done.returncode == 0, done.stderr
    outputs = {name: (tmp_path / name).read_text() for name in ("launchers", "torchrun-0", "torchrun-1")}
    line = r"^(\d+ passed)(?:, \d+ warnings)? in "
    counts = {name: re.findall(line, text, re.MULTILINE) for name, text in outputs.items()}
    expected = {"launchers": ["20 passed"], "torchrun-0": ["3 passed"], "torchrun-1": ["3 passed"]}
    assert counts == expected, "\n".join(outputs.values())


@pytest.mark.parametrize("file", ["multi_process/{}/test_join.py", "continuous/{}/test_collectives.py"])
def test_the_command_writes_what_the_guide_shows(file: str) -> None:
    before, after = ((EXAMPLES / file.format(side)).read_text() for side in ("before", "after"))
    assert port(before).code == after


def test_the_guide_quotes_lines_of_the_examples() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "how_to" / "porting.md").read_text()
    blocks = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(KINDS)
    for kind, block in zip(KINDS, blocks, strict=True):
        before, after = (
            {line for path in (EXAMPLES / kind / side).glob("*.py") for line in path.read_text().splitlines()}
            for side in ("before", "after")
        )
        for line in block.splitlines():
            sides = {"-": [before], "+": [after]}.get(line[:1], [before, after])
            assert not line.strip() or all(line[1:] in side for side in sides), line


def test_the_guide_quotes_the_reports_of_the_faults(on_ranks: Run) -> None:
    page = (EXAMPLES.parents[1] / "docs" / "how_to" / "porting.md").read_text()
    quoted = re.search(r"^rank 0 waits in all_reduce.*?^```", page, re.MULTILINE | re.DOTALL)
    assert quoted is not None
    text = re.sub(r"after [\d.]+ s", "after N s", on_ranks.failure("test_fault[hangs]"))
    for line in quoted[0].splitlines()[:-1]:
        assert re.sub(r"after [\d.]+ s", "after N s", line) in text
