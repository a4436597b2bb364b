"""Worlds on a device of a type that Lockstep does not know, and the types that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.backends.device import Device
from suites.selftest.project import Run, copy_project, run_pytest

PROJECT = "pretended"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(PROJECT, tmp_path_factory.mktemp(PROJECT))


def run_on(path: Path, *options: str, fresh: bool = False, **environ: str) -> Run:
    environ |= {"PYTHONPATH": str(path), "PRETENDED_LOG": str(path / "log")}
    return run_pytest(path, "--device=pretended", *options, fresh=fresh, **environ)


@pytest.fixture(scope="module")
def run(path: Path) -> Run:
    return run_on(path, fresh=True)  # `import torch` loads its module


def test_ranks_use_the_backend_and_a_device_of_the_type(run: Run) -> None:
    assert run.outcome("test_all_reduce") == "passed"
    assert re.findall("^(.) set (.)$", (run.path / "log").read_text(), re.MULTILINE)[:2] in (
        [("0", "0"), ("1", "1")],
        [("1", "1"), ("0", "0")],
    )


def test_its_generators_are_seeded_before_each_test(run: Run) -> None:
    assert (run.path / "log").read_text().count("0 seed 0\n") == 3


def test_a_rank_that_dies_is_the_cause(run: Run) -> None:
    assert "rank 0 of 2 exited with code 3" in run.output
    assert re.search(r"rank 1: lost its connection to rank 0 at test_pretended\.py", run.output)


def test_too_few_devices_skip_a_test(run: Run) -> None:
    reason = "4 ranks under pccl need 4 pretended devices, this machine has 2"
    assert run.outcome("test_four_ranks") == f"skipped: {reason}"


@pytest.mark.parametrize(
    ("options", "count", "message"),
    [
        (("--backend=gloo",), "2", "--backend gloo does not work with --device pretended"),
        (
            (),
            "0",
            "--device pretended: this machine has no pretended device; run with --backend gloo --device cpu",
        ),
    ],
)
def test_what_the_type_cannot_do_is_refused(
    path: Path, options: tuple[str, ...], count: str, message: str
) -> None:
    run = run_on(path, "-pregistered", *options, PRETENDED_COUNT=count)
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}" in run.lines


@pytest.mark.parametrize(
    ("type", "names", "indices"), [("cuda", ("5", "7"), [0, 1, 0]), ("mtia", ("5", "7"), [5, 7, 5])]
)
def test_ranks_are_spread_over_the_devices_of_their_world(
    type: str, names: tuple[str, ...], indices: list[int]
) -> None:
    """They see no others, where a variable of the type's maker can say so."""
    assert [Device(type).of_rank(rank, names).index for rank in range(3)] == indices


def test_a_device_has_the_name_that_the_variable_of_its_type_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "count", lambda _: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Device("cuda").names() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,wrong")
    assert Device("cuda").names() == ("GPU-a", "GPU-b")
    assert Device("mtia").names() == ("0", "1")


def test_types_of_devices_have_their_words_and_backends() -> None:
    assert [Device(type).unit for type in ("cuda", "xpu", "mtia")] == ["GPU", "GPU", "mtia device"]
    assert [Device(type).default_backend for type in ("cpu", "cuda")] == ["gloo", "nccl"]
    assert Device("nonsense").count() == 0
    assert [Device(type).has_module for type in ("cpu", "nonsense")] == [True, False]
