"""The plans of examples/layouts hold on layouts of two ranks, and composed on four; a bug in one is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from suites.selftest.project import run_pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "layouts"
PLUGIN = ("-p", "lockstep")
WITHOUT_OTHERS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def copy_examples(path: Path) -> None:
    shutil.copytree(EXAMPLES, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def test_the_plans_hold(tmp_path: Path) -> None:
    copy_examples(tmp_path)
    layouts = "pp2,dp2,fsdp2,ep2,cp2,tp2,ep2-tp2,pp2-tp2"
    run = run_pytest(tmp_path, *PLUGIN, "--layouts", layouts, **WITHOUT_OTHERS)
    assert run.count().startswith("29 passed, "), run.output


def test_a_sum_that_a_plan_lacks_is_named(tmp_path: Path) -> None:
    copy_examples(tmp_path)
    plan = tmp_path / "by_hand.py"
    code = plan.read_text()
    assert code.count("        self.reduce_gradients()\n") == 1
    plan.write_text(code.replace("        self.reduce_gradients()\n", ""))
    arguments = (*PLUGIN, "--layouts", "tp2", "test_by_hand.py::test_plan")
    run = run_pytest(tmp_path, *arguments, **WITHOUT_OTHERS)
    assert "equals the reference after a sum over tp: that reduction is missing" in run.output
    assert run.count() == "1 failed, 9 deselected", run.output


def test_the_bugs_of_the_benchmark_still_are_edits_of_the_plans() -> None:
    code = "import files; print(sum(bool(files.edited(bug)) for bug in files.all_bugs()))"
    folder = EXAMPLES.parents[1] / "benchmarks" / "layout_bugs"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 80
