"""Runs that are interrupted: by Ctrl-C once or twice, by SIGTERM, at any moment. Nothing is left of them."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from suites.selftest.project import line_of, printed_by

if TYPE_CHECKING:
    from suites.selftest.project import Project

INTERRUPT = signal.SIGINT


def test_ctrl_c_tears_down_on_ranks_and_shows_where_each_was(project: Project) -> None:
    project.copy("waiting")
    process = project.start()
    project.wait_for(
        lambda: project.pids("reached") and project.pids("reached", rank=1), "the test has begun"
    )
    time.sleep(0.3)  # from the line that notes it to the one that waits
    output = project.interrupt(process, INTERRUPT)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    lines = output.split("interrupted on ranks", 1)[1].splitlines()
    reduces, receives = (
        line_of(f"dist.{op}(", project.path / "test_sample.py") for op in ("all_reduce", "recv")
    )
    assert lines[1:4] == [
        "test_sample.py::test_waits was running:",
        f"  rank 0: all_reduce #1 (float [3]) at test_sample.py:{reduces} in test_waits",
        f"  rank 1: recv at test_sample.py:{receives} in test_waits",
    ]
    assert "!! KeyboardInterrupt !!" in output
    assert "Traceback" not in output
    for rank in (0, 1):
        assert len(project.pids("narrow-torn-down", rank)) == 1
        assert len(project.pids("wide-torn-down", rank)) == (2 if rank == 0 else 1)
    project.assert_nothing_is_left()


def test_ctrl_c_of_the_controller_alone_leaves_nothing(project: Project) -> None:
    project.copy("gil")
    process = project.start()
    project.wait_for(lambda: project.pids("reached", rank=1), "the test has begun")
    process.send_signal(INTERRUPT)
    output = process.communicate(timeout=10)[0]
    assert "KeyboardInterrupt" in output
    assert re.search(r"\n  rank 1 of 2 ranks \(gloo, cpu\) did not end in [\d.]+ s and was killed\n", output)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    project.assert_nothing_is_left()


def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first(project: Project) -> None:
    project.copy("gil")
    process = project.start()
    project.wait_for(lambda: project.pids("reached", rank=1), "the test has begun")
    output = project.interrupt(process, INTERRUPT, INTERRUPT)
    # After the first alone it would wait for the rank that holds the GIL, and report how that ended.
    assert "interrupted on ranks" not in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    project.assert_nothing_is_left()


def test_ctrl_c_leaves_nothing_while_the_server_imports(project: Project) -> None:
    project.fresh = True
    (project.path / "torch.py").touch()  # instead of the real one, which takes long
    project.copy("slow_import", "ranks_preload = slow\npythonpath = .")
    _interrupt_when_reached(project)


def test_ctrl_c_leaves_nothing_during_collection(project: Project) -> None:
    project.copy("slow_import")
    (project.path / "test_slow_import.py").write_text("import slow")
    _interrupt_when_reached(project)


def test_ctrl_c_leaves_nothing_while_a_world_starts(project: Project) -> None:
    project.copy("slow_import", "pythonpath = .")
    (project.path / "conftest.py").write_text("import os\nif os.environ.get('RANK') == '1': import slow\n")
    _interrupt_when_reached(project)


def _interrupt_when_reached(project: Project) -> None:
    process = project.start()
    project.wait_for(lambda: project.pids("reached"), "the moment has come")
    output = project.interrupt(process, INTERRUPT)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "!! KeyboardInterrupt !!" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_a_run_that_stops_at_a_failure_tears_down_on_ranks(project: Project) -> None:
    project.copy("stopping")
    assert "stopping after 1 failures" in project.run("-x")
    assert len(project.pids("ran")) == len(project.pids("wide-torn-down", rank=1)) == 1
    project.assert_nothing_is_left()


def test_sigterm_and_limits_of_other_plugins_tear_down_on_ranks(project: Project) -> None:
    project.copy("ending")
    output = project.run()
    assert "ERROR test_sample.py::test_b - the plugin's time is over" in output
    assert "Exit: SIGTERM" in output
    assert len(project.pids("ran")) == 2
    assert len(project.pids("wide-torn-down", rank=1)) == 1
    project.assert_nothing_is_left()


def test_sigterm_has_its_default_action_again_after_a_run(project: Project) -> None:
    project.write("def test_passes(world): ...")
    (project.path / "program.py").write_text(
        "import pytest, signal\nprint(pytest.main(['-plockstep.plugin']), signal.getsignal(signal.SIGTERM))\n"
    )
    output = printed_by(project.path, "program")
    assert output.splitlines()[-1] == "0 0"
