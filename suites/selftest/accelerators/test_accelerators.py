"""The state that a test leaves on an accelerator, and of how torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.selftest.project import Project, Run, copy_project, run_pytest

SETTINGS = {
    "torch.set_float32_matmul_precision('high')": "float32 precision: cuda matmul, float32_matmul_precision",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": "float32 precision: cuda matmul",
    "torch.backends.cudnn.allow_tf32 = False": "float32 precision: cuda conv, cuda rnn, cudnn allow_tf32",
    "torch.backends.cuda.enable_flash_sdp(False)": "attention backends: flash",
    "torch.set_autocast_enabled('cpu', True)": "autocast: cpu",
    "torch.set_autocast_dtype('cuda', torch.bfloat16)": "autocast: cuda",
    "torch.set_autocast_cache_enabled(False)": "autocast: cache",
    "torch.autocast('cpu').__enter__()": "autocast: contexts, cpu",
    "torch.backends.fp32_precision = 'tf32'": "float32 precision: all, cuda all, cuda matmul, ",
}
READ = "from lockstep.features.accelerators.guard import ComputeState\n\n"


def test_how_torch_computes_is_restored(project: Project) -> None:
    tests = [
        f"def test_{number}(world):\n    assert ComputeState.capture(None) == BEFORE\n    {code}\n"
        for number, code in enumerate((*SETTINGS, "pass"))
    ]
    project.write(f"import torch\n{READ}BEFORE = ComputeState.capture(None)\n\n" + "\n\n".join(tests))
    output = project.run()
    assert f"{len(tests)} passed, {len(SETTINGS)} warnings" in output
    for text in SETTINGS.values():
        assert f"the test left behind {text}" in output


def test_a_context_that_a_test_leaves_keeps_no_weights(project: Project) -> None:
    """Autocast casts a weight once in its outermost context: the next test would compute with the old one."""
    project.write("""
import torch

WEIGHT = torch.ones(2, 2, requires_grad=True)

def outputs():
    with torch.autocast("cpu"):
        return torch.ones(1, 2) @ WEIGHT

def test_leaves_a_context(world):
    torch.autocast("cpu").__enter__()
    assert outputs().tolist() == [[2.0, 2.0]]

def test_has_the_weight_of_now(world):
    with torch.no_grad():
        WEIGHT.zero_()
    assert outputs().tolist() == [[0.0, 0.0]]
""")
    assert "2 passed" in project.run()


def test_what_is_set_for_all_operators_still_reaches_them(project: Project) -> None:
    """A setting that an operator inherits stays inherited when another change is undone."""
    project.write("""
import pytest, torch

@pytest.fixture(scope="module", autouse=True)
def precise():
    torch.backends.fp32_precision = "tf32"
    yield
    torch.backends.fp32_precision = "none"

def test_leaves_something_else(world):
    torch.backends.cuda.matmul.fp32_precision = "ieee"

def test_sets_all(world):
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.fp32_precision = "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
""")
    assert "2 passed" in project.run()


def test_what_a_module_of_tests_sets_stays_for_it(project: Project) -> None:
    project.write("""
import pytest, torch

@pytest.fixture(scope="module", autouse=True)
def high():
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")

@pytest.mark.parametrize("number", range(2))
def test_is_high(world, number):
    assert torch.get_float32_matmul_precision() == "high"
""")
    output = project.run()
    assert "2 passed" in output
    assert "left behind" not in output


QUEUED = """
import pytest, torch

pytestmark = pytest.mark.ranks(2)

def test_queues_what_fails(world):
    torch.pretended.failed = world.rank == 0

def test_comes_after_that(world):
    assert not torch.pretended.failed
    world.barrier()

def test_fails_itself(world):
    torch.pretended.failed = world.rank == 0
    assert world.rank == 1

@pytest.mark.ranks(2, group=False)
def test_sees_its_error(world):
    torch.pretended.failed = world.rank == 0
    torch.pretended.raise_if_failed()

@pytest.mark.ranks(2, group=False)
def test_comes_after_the_failure(world):
    assert not torch.pretended.failed

@pytest.fixture
def queued_at_the_end(world):
    yield
    torch.pretended.failed = world.rank == 1

def test_tears_down(queued_at_the_end):
    pass

def test_comes_after_the_tear_down(world):
    assert not torch.pretended.failed
    world.barrier()

def test_leaves_a_stream(world):
    torch.pretended.stream = "new"

def test_has_the_stream_of_before(world):
    assert torch.pretended.stream == "of old"
"""


def run_registered(path: Path, *options: str) -> Run:
    """Run a project on a machine that has two devices of the type "pretended"."""
    (path / "pytest.ini").write_text("[pytest]\nranks_preload = registered\n")
    environ = {"PYTHONPATH": str(path), "PRETENDED_LOG": str(path / "log")}
    return run_pytest(path, "-pregistered", *options, **environ)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on the device "pretended", whose work fails where a test says so."""
    path = copy_project("pretended", tmp_path_factory.mktemp("pretended"))
    (path / "test_pretended.py").write_text(QUEUED)
    return run_registered(path, "--device=pretended")


def test_a_test_fails_for_what_it_has_queued(run: Run) -> None:
    assert "rank 0 of 2 failed" in run.failure("test_queues_what_fails")
    text = "what the test has queued on the pretended device failed: pretended error: an assert in a kernel\n"
    assert text in run.failure("test_queues_what_fails")


@pytest.mark.parametrize("after", ["that", "the_failure", "the_tear_down"])
def test_no_test_gets_a_device_that_is_lost(run: Run, after: str) -> None:
    assert run.outcome(f"test_comes_after_{after}") == "passed"


FAILED = "what the test has queued on the pretended device failed: pretended error: an assert in a kernel"


@pytest.mark.parametrize(
    ("name", "times"), [("test_fails_itself", 1), ("test_tears_down", 1), ("test_sees_its_error", 0)]
)
def test_the_device_is_named_at_tear_down_unless_the_test_has_seen_its_error(
    run: Run, name: str, times: int
) -> None:
    errors = [case.text or "" for case in run.suite.iter("error")]
    of_test = [text for text in errors if f"::{name}" in text]
    assert [FAILED in text for text in of_test] == [True] * times


def test_advice_for_cuda_is_not_given_for_others(run: Run) -> None:
    assert "CUDA_LAUNCH_BLOCKING" not in run.output


def test_the_stream_is_restored(run: Run) -> None:
    assert run.outcome("test_has_the_stream_of_before") == "passed"
    assert "left behind stream: new (was of old)" in run.output


def test_a_test_that_begins_to_use_a_device_leaves_no_stream(tmp_path: Path) -> None:
    """On ranks of the CPU, where the machine has one."""
    path = copy_project("pretended", tmp_path)
    code = (
        "import torch\n\n@pytest.mark.ranks(1)\ndef test_uses_it(world):\n    torch.pretended.used = True\n"
    )
    (path / "test_pretended.py").write_text(f"import pytest\n{code}")
    module = path / "pretended.py"
    module.write_text(module.read_text().replace("used = True", "used = False"))
    output = run_registered(path).output
    assert "1 passed" in output
    assert "left behind" not in output


def test_the_peak_of_memory_is_that_of_the_test(run: Run) -> None:
    assert (Path(run.path) / "log").read_text().count("0 peak\n") == 9
