"""Sessions in forks of a warm interpreter find what those of a new one do, but for what is imported."""

from __future__ import annotations

import json

import pytest

from suites.selftest.project import Project, run_pytest

CONFTEST = """
import json, os, signal, sys, tempfile, threading
import __main__

with open(os.environ["FOUND"], "w") as file:
    found = {
        "arguments": sys.argv[1:],
        "main": [__main__.__name__, __main__.__spec__.name, __main__.__file__],
        "path": sys.path,
        "folders": [os.getcwd(), tempfile.gettempdir()],
        "environ": dict(os.environ),
        "flags": list(sys.flags),
        "input": os.readlink("/proc/self/fd/0"),
        "output": [(each.encoding, each.errors, each.isatty()) for each in (sys.__stdout__, sys.__stderr__)],
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)],
        "threads": threading.active_count(),
        "lockstep": sorted(name for name in sys.modules if name.partition(".")[0] in ("lockstep", "suites")),
    }
    json.dump(found, file)
"""


def found_by(project: Project, fresh: bool) -> dict[str, object]:
    project.fresh = fresh
    output = project.run("-k", "none", environ={"FOUND": str(project.path / "found.json")})
    assert "1 deselected" in output
    found: dict[str, object] = json.loads((project.path / "found.json").read_text())
    return found


def test_a_warm_session_finds_what_a_new_one_does(project: Project) -> None:
    (project.path / "test_sample.py").write_text("def test_it(): pass\n")
    (project.path / "conftest.py").write_text(CONFTEST)
    new = found_by(project, fresh=True)
    assert found_by(project, fresh=False) == new
    assert new["leads"] == [True, True]


def test_a_session_that_dies_has_the_signal_as_its_status(project: Project) -> None:
    (project.path / "conftest.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_pytest(project.path).status == -9


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_not_utf8_is_escaped(project: Project, fresh: bool) -> None:
    (project.path / "conftest.py").write_text("import os; os.write(1, b'a\\xffb\\n')\n")
    project.fresh = fresh
    assert "a\\xffb" in project.run("-s").splitlines()
