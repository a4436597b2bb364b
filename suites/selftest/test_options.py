"""Values of options, ini options and environment variables that no session can use, and their errors."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401  # once: `pytester` forgets what a test has imported, and torch does not load again

from lockstep.options import DEFAULTS, add_long_names, add_options, add_short_options, default_backend
from lockstep.protocol import Preparation, Probe, Progress, RankStatus, Vote
from suites.selftest.project import Project

SECONDS = "a number of seconds above 0, at most 1000000"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--world-timeout=0"], f"--world-timeout 0.0: write {SECONDS}"),
        (["--world-timeout=nan"], f"--world-timeout nan: write {SECONDS}"),
        (["--world-timeout=inf"], f"--world-timeout inf: write {SECONDS}"),
        (["--world-timeout=1e300"], f"--world-timeout 1e+300: write {SECONDS}"),
        (
            ["--world-seed", "9" * 27],
            f"--world-seed {'9' * 27}: write a whole number from -2**63 to 2**64 - 1",
        ),
        (["--world-seed=-9223372036854775809"], "--world-seed -9223372036854775809: write a whole number"),
        (["--rank-pdb=-1"], "--rank-pdb -1: ranks count from 0"),
        (["--rank-debugpy", "9" * 5000], f"--rank-debugpy {'9' * 40}: write RANK or RANK:PORT"),
        (["--rank-debugpy", f"1:{'9' * 5000}"], f"--rank-debugpy 1:{'9' * 38}: write RANK or RANK:PORT"),
        (["--backend="], "--backend: unknown backend ''; there are gloo, nccl, shm, fake"),
        (["--device=xpu"], "--device xpu: this machine has no GPU; run with --backend gloo --device cpu"),
        (["--device="], "--device : torch.distributed has no backend for it; it has one for cpu, cuda"),
        (["--device=gpu"], "--device gpu: torch.distributed has no backend for it; it has one for cpu, cuda"),
        (["-o", "ranks_at_once=0"], "ranks_at_once = 0: write a whole number above 0"),
        (["-o", "ranks_at_once=two"], "ranks_at_once: write a whole number above 0"),
        (["-o", f"ranks_at_once={'9' * 5000}"], "ranks_at_once: write a whole number above 0"),
        (["-o", "ranks_wait=nan"], "ranks_wait = nan: write a number of seconds above 0"),
        (["-o", "ranks_leaks="], "ranks_leaks = '': choose warn, error, off"),
        (["-o", "ranks_adopt_spawn=x"], "ranks_adopt_spawn = 'x': choose "),
    ],
    ids=lambda each: "=".join(each)[:30] if isinstance(each, list) else "",
)
def test_a_value_that_no_session_can_use_is_refused(
    pytester: pytest.Pytester, args: list[str], message: str
) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}"):
        pytester.parseconfigure(*args)


MARKS = {
    "wide": ("ranks(20_000)", "ranks(20000): 10000 ranks at most under gloo; fake worlds"),
    "timeout": ('timeout(float("nan"))', f"timeout of pytest-timeout is nan: write {SECONDS}, or 0 for none"),
}


@pytest.fixture(scope="module")
def marks(shared_project: Project) -> str:
    tests = [f"@pytest.mark.{mark}\ndef test_{name}(world):\n    pass\n" for name, (mark, _) in MARKS.items()]
    shared_project.write("\n".join(tests) + "\ndef test_sound(world):\n    pass\n")
    threads = {"OMP_NUM_THREADS": "2,1", "PYTEST_PLUGINS": "pytest_timeout"}
    return shared_project.run("--tb=short", environ=threads)


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_with_a_number_that_is_none_fails_its_test(marks: str, name: str) -> None:
    assert MARKS[name][1] in marks
    assert "1 passed, 2 errors" in marks


def test_a_size_of_the_flight_recorder_that_is_none_is_named(project: Project) -> None:
    project.write("def test_x(world):\n    pass\n")
    output = project.run("--backend=shm", environ={"TORCH_FR_BUFFER_SIZE": "many"})
    assert "TORCH_FR_BUFFER_SIZE='many': set it to the number of calls that torch records" in output
    assert "INTERNALERROR" not in output


class Parser:
    """A parser that keeps the options it is given, by their first name, and the ini options."""

    def __init__(self) -> None:
        self.groups: list[tuple[str, ...]] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.inis: dict[str, tuple[Any, ...]] = {}

    def getgroup(self, *names: str) -> Parser:
        self.groups.append(names)
        return self

    def addoption(self, name: str, **attributes: Any) -> None:
        assert attributes.pop("help")
        self.options[name] = attributes

    def addini(self, name: str, help: str, kind: str | None = None, default: object = None) -> None:
        self.inis[name] = kind, default


def test_options_have_their_defaults() -> None:
    parser: Any = Parser()
    add_options(parser)
    assert parser.options == {
        "--ranks-backend": {"dest": "ranks_backend"},
        "--ranks-device": {"dest": "ranks_device", "metavar": "TYPE"},
        "--world-timeout": {"type": float, "default": 60.0, "metavar": "SECONDS"},
        "--world-seed": {"type": int, "default": 0},
        "--check-collectives": {"action": "store_true"},
        "--fresh-worlds": {"action": "store_true"},
        "--rank-output": {"choices": ("failed", "all", "none"), "default": "failed"},
        "--rank-output-dir": {"metavar": "DIR"},
        "--subtest": {"action": "append", "default": [], "metavar": "KEY=VALUE,..."},
    }
    assert parser.inis == {
        "ranks_preload": ("args", []),
        "ranks_start_method": (None, "forkserver"),
        "ranks_leaks": (None, "warn"),
    }
    assert {name[0] for name in parser.groups} == {"ranks"}
    assert DEFAULTS["fresh_worlds"] is DEFAULTS["check_collectives"] is False


def test_an_option_has_its_short_name_unless_it_is_taken() -> None:
    parser: Any = Parser()
    options = {"at-once": {"help": "x", "type": int}, "device": {"help": "y"}}
    add_short_options(parser, options, {"--device"})
    assert parser.options == {"--at-once": {"dest": "ranks_at_once", "type": int}}
    parser = Parser()
    add_long_names(parser, options)
    assert parser.options == {
        "--ranks-at-once": {"dest": "ranks_at_once", "type": int},
        "--ranks-device": {"dest": "ranks_device"},
    }


@pytest.mark.parametrize(
    ("backend", "device", "found"),
    [("shm", "cuda", "shm"), (None, "cuda", "nccl"), (None, "cpu", "gloo"), (None, None, "gloo")],
)
def test_a_backend_is_chosen_or_suits_the_device(backend: str | None, device: str | None, found: str) -> None:
    config: Any = SimpleNamespace(getoption={"ranks_backend": backend, "ranks_device": device}.get)
    assert default_backend(config) == found


def test_what_a_rank_says_of_itself_is_false_unless_it_says_so() -> None:
    vote, probe = Vote("a=1", "passed"), Probe()
    assert (vote.renews_deadline, vote.inside, vote.reason, vote.more) == (False, False, "", None)
    assert (probe.full, probe.names_place, Progress().computes) == (False, False, False)
    assert RankStatus("", "").blocked == 0
    assert str(Preparation("stage", "data")) == "stage `data`"
