"""What breaks on one rank outside of tests: hooks of a conftest, the import of a test file, a conftest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

HOOKS = """
ON_RANK_1 = os.environ.get("RANK") == "1"

def pytest_runtest_setup(item):
    if ON_RANK_1 and item.name == "test_setup":
        raise ValueError("in setup")

def pytest_runtest_call(item):
    if ON_RANK_1 and item.name == "test_call":
        raise ValueError("in call")

def pytest_runtest_teardown(item):
    if ON_RANK_1 and item.name == "test_teardown":
        raise ValueError("in teardown")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if ON_RANK_1 and item.name == "test_makereport" and call.when == "call":
        raise ValueError("in makereport")
    return report

def pytest_runtest_logreport(report):
    if ON_RANK_1 and report.nodeid.endswith("::test_logreport") and report.when == "call":
        raise ValueError("in logreport")

def pytest_runtest_logstart(nodeid):
    if ON_RANK_1 and nodeid.endswith("::test_logstart"):
        raise ValueError("in logstart")

def pytest_runtest_logfinish(nodeid):
    if ON_RANK_1 and nodeid.endswith("::test_logfinish"):
        raise ValueError("in logfinish")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if ON_RANK_1 and item.name == "test_protocol":
        raise ValueError("in protocol")
    if ON_RANK_1 and item.name == "test_protocol_exits":
        raise SystemExit("in protocol")
    if ON_RANK_1 and item.name == "test_protocol_stops":
        pytest.exit("in protocol")

def pytest_fixture_setup(request):
    if ON_RANK_1 and request.node.name == "test_fixture_setup":
        raise ValueError("in fixture_setup")

def pytest_report_to_serializable(report):
    if ON_RANK_1 and report.nodeid.endswith("::test_serialise") and report.when == "call":
        raise ValueError("in serialise")

def pytest_generate_tests(metafunc):
    if ON_RANK_1 and metafunc.definition.name == "test_generate":
        raise ValueError("in generate_tests")

def pytest_itemcollected(item):
    if ON_RANK_1 and "test_import_by_hook" in item.nodeid:
        raise ValueError("in itemcollected")
"""
NAMES = [
    *("setup", "call", "teardown", "makereport", "logreport", "logstart", "logfinish", "protocol"),
    *("protocol_exits", "protocol_stops", "fixture_setup", "serialise"),
]
FAULTS = """
import os
import pytest
if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

@pytest.fixture
def some():
    pass
""" + "".join(f"\ndef test_{name}(world, some):\n    dist.barrier()\n" for name in NAMES)
FILE = """
import os
import pytest
if "RANK" in os.environ:
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

if os.environ.get("RANK") == "1":
    {code}

def test_{name}(world):
    dist.barrier()
"""
IMPORTS = {
    "import_raises": 'raise ValueError("at import")',
    "import_exits": "raise SystemExit(3)",
    "import_interrupts": 'raise KeyboardInterrupt("at import")',
    "import_stops": 'pytest.exit("at import")',
    "import_skips": 'pytest.skip("at import", allow_module_level=True)',
    "import_by_hook": "pass",
    "generate": "pass",
}
FILES = {
    **{f"test_{name}.py": FILE.format(name=name, code=code) for name, code in IMPORTS.items()},
    "test_last.py": FILE.format(name="last", code="pass"),
    # It comes before test_faults.py, whose first test is asked for while this one's conftest is broken.
    "below/conftest.py": 'import os\nif os.environ.get("RANK") == "1":\n    raise ValueError("below")\n',
    "below/test_below.py": FILE.format(name="below", code="pass"),
}


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()
    assert session["test_last"].outcomes == ["passed"]


@pytest.mark.parametrize(
    ("name", "outcome", "what"),
    [
        ("test_setup", "error", "ValueError: in setup"),
        ("test_call", "failure", "ValueError: in call"),
        ("test_teardown", "error", "ValueError: in teardown"),
        ("test_makereport", "failure", "ValueError: in makereport"),
        ("test_logreport", "failure", "ValueError: in logreport"),
        ("test_logstart", "error", "ValueError: in logstart"),
        ("test_logfinish", "error", "ValueError: in logfinish"),
        ("test_protocol", "error", "ValueError: in protocol"),
        ("test_protocol_exits", "error", "SystemExit: in protocol"),
        ("test_protocol_stops", "error", "_pytest.outcomes.Exit: in protocol"),
        ("test_fixture_setup", "error", "ValueError: in fixture_setup"),
    ],
)
def test_what_a_hook_raises_is_the_failure_of_the_phase_it_ran_in(
    session: FaultSession, name: str, outcome: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == [outcome]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert f"rank 1: {what}" in verdict.message
    assert "conftest.py:" in verdict.text
    assert "harness/" not in verdict.text  # its frames are no news


def test_a_hook_that_cannot_serialise_a_report_is_named(session: FaultSession) -> None:
    verdict = session["test_serialise"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[:2] == ["rank 1 of 2 failed", "rank 0: passed"]
    assert "a report cannot leave a rank: a hook raised" in verdict.text
    assert "E   ValueError: in serialise" in verdict.text


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("import_raises", "ValueError: at import"),
        ("import_exits", "SystemExit: 3"),
        ("import_interrupts", "KeyboardInterrupt: at import"),
        ("import_stops", "_pytest.outcomes.Exit: at import"),
        ("import_by_hook", "ValueError: in itemcollected"),
        ("generate", "ValueError: in generate_tests"),
        ("below", "ValueError: below"),
    ],
)
def test_a_file_that_one_rank_cannot_collect_is_an_error_with_its_line(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[f"test_{name}"]
    assert verdict.outcomes == ["error"]  # and not the file before it, while which it was collected
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.message == f'failed on setup with "rank 1: {what}"'
    assert f"E   {what}" in verdict.text


def test_a_file_that_one_rank_skips_is_told_with_the_reason(session: FaultSession) -> None:
    verdict = session["test_import_skips"]
    assert verdict.outcomes == ["error"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert "test_import_skips.py as it imports it, and others did not (Skipped: at import)" in verdict.text


def test_a_root_conftest_that_exits_on_one_rank_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nranks_preload =\n")
    (tmp_path / "conftest.py").write_text(
        'import os, sys\nif os.environ.get("RANK") == "1":\n    sys.exit(5)\n'
    )
    (tmp_path / "test_it.py").write_text(FILE.format(name="it", code="pass"))
    command = [sys.executable, "-m", "pytest"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert (
        "no world of 2 ranks (gloo, cpu): rank 1 did not start: it raised before it ran a test" in done.stdout
    )
    assert "conftest.py:3: in <module>\n    sys.exit(5)\nE   SystemExit: 5" in done.stdout
