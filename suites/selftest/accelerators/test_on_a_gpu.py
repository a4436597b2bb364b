"""Verdicts of tests on a GPU: one rank on nccl, and two on gloo that share it."""

from __future__ import annotations

import re

import pytest
import torch

from suites.selftest.project import Run, copy_project, run_pytest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
KINDS = {"nccl": ("1", "--device=cuda"), "gloo": ("2", "--device=cuda", "--backend=gloo")}


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    size, *options = KINDS[request.param]
    path = copy_project("cuda", tmp_path_factory.mktemp("cuda"))
    return run_pytest(path, "-rA", *options, fresh=True, SIZE=size)


FAIL = {
    "test_queues_an_error": "what the test has queued on the GPU failed: CUDA error: device-side assert",
    "test_sees_its_error": "device-side assert triggered",
    "test_is_killed": "died: SIGKILL",
    "test_has_no_memory_for_it": "CUDA out of memory",
}


@pytest.mark.parametrize("name", FAIL)
def test_a_failure_is_that_of_its_test(run: Run, name: str) -> None:
    assert FAIL[name] in run.failure(name)


def test_all_others_pass(run: Run) -> None:
    assert f"{len(FAIL)} failed, {len(run.cases) - len(FAIL)} passed" in run.count()


def test_a_test_has_the_seed_of_the_world(run: Run) -> None:
    drawn = re.findall(r"^drawn .*$", run.output, re.MULTILINE)
    assert drawn
    assert len(set(drawn)) == 1


def test_only_settings_are_left_behind(run: Run) -> None:
    left = re.findall(r"the test left behind (.*)", run.output)
    assert left
    assert all("float32 precision: " in text and "; stream: " in text for text in left)
