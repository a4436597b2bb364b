"""`python -m lockstep port`: what it writes, counts and returns."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from suites.selftest.project import PROJECTS
from suites.selftest.warm_pytest import run_module

INPUTS = PROJECTS / "port"


def run_port(path: Path, *args: str, prepare: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a directory that holds the inputs.

    Args:
        prepare: code to run before it, in a new interpreter.
    """
    shutil.copytree(INPUTS, path, dirs_exist_ok=True)
    if not prepare:
        return run_module("lockstep", "port", *args, cwd=path)
    code = f"import sys; {prepare}; from lockstep.commands import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "port", *args]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)


def test_by_default_it_counts_and_writes_nothing(tmp_path: Path) -> None:
    done = run_port(tmp_path, "test_left.py", "test_launched.py")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0] == "test_left.py: 10 tests: 1 converted, 5 with comments, 4 left"
    assert "  ThreadedTest: left: its ranks are threads of one process" in lines
    assert "  PartlyTest.test_decorated: the decorator elsewhere.decorator" in lines
    assert "test_launched.py: 13 tests: 13 converted, 0 with comments, 0 left" in lines
    for name in ("test_left.py", "test_launched.py"):
        assert (tmp_path / name).read_text() == (INPUTS / name).read_text()


def test_diff_prints_the_changes(tmp_path: Path) -> None:
    done = run_port(tmp_path, "--diff", "test_launched.py")
    assert done.stdout.startswith("--- test_launched.py\n+++ test_launched.py (ported)\n")
    assert "\n-class GroupTest(MultiProcessTestCase):\n" in done.stdout
    assert '\n+@pytest.mark.ranks(SIZE, backend="gloo")\n+class TestGroup:\n' in done.stdout


def test_write_changes_the_files_and_output_writes_others(tmp_path: Path) -> None:
    done = run_port(tmp_path, "--output", "out", "test_launched.py", "test_left.py")
    assert "class TestGroup:" in (tmp_path / "out" / "test_launched.py").read_text()
    assert "class TestPartly:" in (tmp_path / "out" / "test_left.py").read_text()
    assert (tmp_path / "test_launched.py").read_text() == (INPUTS / "test_launched.py").read_text()
    run_port(tmp_path, "--write", "test_launched.py")
    written = (tmp_path / "test_launched.py").read_text()
    assert written == (tmp_path / "out" / "test_launched.py").read_text()
    assert done.stderr == ""


def test_the_size_of_a_class_that_takes_every_gpu_is_asked_for(tmp_path: Path) -> None:
    run_port(tmp_path, "--ranks", "3", "--write", "test_launched.py")
    question = "# lockstep: world size: torch takes one rank for each GPU here; say how many"
    assert (
        f"{question}\n@pytest.mark.ranks(3)\nclass TestSharded:"
        in (tmp_path / "test_launched.py").read_text()
    )


def test_the_status_is_0_where_nothing_is_left_to_do(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("x = 1\n")
    done = run_port(tmp_path, "plain.py")
    assert (done.returncode, done.stdout) == (0, "plain.py: no test class of a multi-process kind\n")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["missing.py"], "missing.py: [Errno 2] No such file or directory"),
        (["broken.py"], "broken.py is no Python that libcst can read: line 1"),
        (["plain.py", "--ranks", "0"], "--ranks 0: a world has at least 1 rank"),
        (["plain.py", "--strange"], "unknown arguments: --strange"),
    ],
)
def test_bad_input_is_refused_with_status_2(tmp_path: Path, args: list[str], why: str) -> None:
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    done = run_port(tmp_path, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr


NESTED = "more than 100 brackets are nested; write it in several steps"
IN_ROW = "more than 2,000 names, values and operators in a row; write it in several steps"
TOO_MUCH = {
    "x = " + "(" * 3_000 + "1" + ")" * 3_000: f"line 1: {NESTED}",
    "\nx = " + "[" * 101 + "1" + "]" * 101: f"line 2: {NESTED}",
    "x = " + "+".join("1" * 20_000): f"line 1: {IN_ROW}",
    "x = a" + "()" * 20_000: f"line 1: {IN_ROW}",
    "x = (" + "'a'\n" * 20_000 + ")": f"line 2000: {IN_ROW}",
    "if a: pass\n"
    + "elif a: pass\n" * 20_000: "line 2002: more than 2,000 branches `elif` in a file; write it"
    " in several steps",
    "x = " + "not " * 1_900 + "y": "an expression, a chain of classes or `elif` is nested too deeply",
    "class A(B): pass\nclass B(A): pass": "a class is derived from itself: A -> B -> A; give each class"
    " a name of its own",
}
"""Why a file is not converted, by its code."""


def test_what_is_too_much_for_libcst_is_named_and_other_files_are_converted(tmp_path: Path) -> None:
    names = [f"much_{number}.py" for number in range(len(TOO_MUCH))]
    for name, code in zip(names, TOO_MUCH, strict=True):
        (tmp_path / name).write_text(f"{code}\n")
    done = run_port(tmp_path, *names, "test_left.py")
    reasons = zip(names, TOO_MUCH.values(), strict=True)
    assert done.stderr.splitlines() == [f"python -m lockstep port: {name}: {why}" for name, why in reasons]
    assert done.stdout.startswith("test_left.py: 10 tests: 1 converted")
    assert done.returncode == 2


def test_long_lists_and_many_statements_are_no_long_expressions(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(f"x = [{'-1, ' * 3_000}]\n" + "y = f(1)\n" * 1_000)
    done = run_port(tmp_path, "long.py")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    done = run_port(tmp_path, "--output", "out", "test_launched.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m lockstep port: --output out is a file; name a directory\n"
    done = run_port(tmp_path, "--output", "out/below", "test_launched.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m lockstep port: test_launched.py: [Errno 20] Not a directory:")


def test_without_libcst_it_says_what_to_install(tmp_path: Path) -> None:
    done = run_port(tmp_path, "test_left.py", prepare="sys.modules['libcst'] = None")
    assert done.returncode == 2
    assert done.stderr == "python -m lockstep port needs libcst: pip install 'libcst>=1.5'\n"


def test_the_command_imports_neither_torch_nor_libcst_before_it_must() -> None:
    code = "import sys, lockstep.__main__; print('torch' in sys.modules, 'libcst' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_porting_does_not_import_torch(tmp_path: Path) -> None:
    done = run_port(tmp_path, "test_launched.py", prepare="sys.modules['torch'] = None")
    assert done.stderr == ""
    assert done.returncode == 1  # for the question about a world size
