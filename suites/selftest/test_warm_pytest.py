"""Sessions in forks of a warm interpreter find what those of a new one do, but for what is imported."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from suites.selftest.project import Project, run_pytest
from suites.selftest.warm_interpreter import REPEATED

CONFTEST = """
import json, os, signal, sys, tempfile, threading
import __main__

with open(os.environ["FOUND"], "w") as file:
    found = {
        "arguments": sys.argv[1:],
        "typed": sys.orig_argv[1:],
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
        "set_aside": [name for name in sys.modules if name.startswith(("hypothesis", "pytest_cov"))],
    }
    import hypothesis.internal, pytest_cov.plugin
    from hypothesis.configuration import storage_directory
    found["storage"] = str(storage_directory("examples", intent_to_write=False).path)
    found["imported"] = [
        [name, getattr(module.__spec__, "name", None), getattr(module.__spec__, "origin", None)]
        for name, module in sorted(sys.modules.items())
        if name.startswith(("hypothesis", "pytest_cov"))
    ]
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


# Written by the session, its worker of xdist, and each rank of that, which are all forks here.
OF_EACH = """
import json, os, signal, sys
import __main__

def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

spec = getattr(__main__, "__spec__", None)
signals = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
worker, rank = (os.environ.get(name) for name in ("PYTEST_XDIST_WORKER", "RANK"))
found = {
    "arguments": sys.argv,
    "main": [__main__.__name__, spec is None, hasattr(__main__, "__file__")],
    "path": sys.path,
    "folder": os.getcwd(),
    "environ": {name: value for name, value in os.environ.items() if not name.endswith(("UID", "PORT"))},
    "input": os.readlink("/proc/self/fd/0"),
    "descriptors": rank and len(os.listdir("/proc/self/fd")),
    "signals": [str(each).partition(" at ")[0] for each in signals],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": len(os.listdir("/proc/self/task")),
    "set_aside": [name for name in sys.modules if name.partition(".")[0] in ("hypothesis", "pytest_timeout")],
    "marked": open("/proc/self/environ").read().count(os.environ["LOCKSTEP_TEST_MARK"]),
}
pids = {"pid": os.getpid(), "parent": os.getppid(), "above": parent(os.getppid())}

def pytest_sessionfinish():
    found["lockstep"] = [name for name in sys.modules if name.startswith(("lockstep.", "suites"))]
    with open(f"found-{worker}-{rank}.json", "w") as file:
        json.dump([found, pids], file)
"""


PROCESSES = ("found-None-None", "found-gw0-None", "found-gw0-0", "found-gw0-1")


def found_by_each(project: Project, fresh: bool) -> dict[str, dict[str, Any]]:
    project.fresh = fresh
    output = project.run("-n1", "-pxdist")
    assert "1 passed" in output
    each = {path.stem: json.loads(path.read_text()) for path in project.path.glob("found-*")}
    session, worker, *ranks = (each[name][1] for name in PROCESSES)
    assert worker["parent"] == session["pid"]
    assert [rank["above"] for rank in ranks] == [worker["pid"]] * 2  # the server is between them
    return {name: found for name, (found, _) in each.items()}


def test_what_a_warm_session_starts_finds_what_it_does_in_a_new_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this test
    project.write("def test_it(world): pass\n")
    (project.path / "conftest.py").write_text(OF_EACH)
    new = found_by_each(project, fresh=True)
    warm = found_by_each(project, fresh=False)
    modules = {name for process in PROCESSES for name in new[process]["lockstep"]}
    for name in PROCESSES:
        imported = {*warm[name].pop("lockstep")}
        if name == "found-gw0-None":  # is started as a server is
            imported.add(REPEATED)
        assert {*new[name].pop("lockstep")} <= imported <= modules, name
        assert warm[name] == new[name], name


def test_a_session_that_is_started_is_a_child_that_can_be_killed(project: Project) -> None:
    (project.path / "conftest.py").write_text(
        "import os, sys, time\n"
        "print('torch' in sys.modules, os.getppid(), os.getpid() == os.getsid(0), flush=True)\n"
        "time.sleep(60)\n"
    )
    process = project.start("-s")
    assert process.stdout is not None
    assert process.stdout.readline().split() == ["True", str(os.getpid()), "True"]
    process.kill()
    assert (process.communicate(timeout=60)[0], process.returncode) == ("", -9)


def test_a_session_that_dies_has_the_signal_as_its_status(project: Project) -> None:
    (project.path / "conftest.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    assert run_pytest(project.path).status == -9


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_not_utf8_is_escaped(project: Project, fresh: bool) -> None:
    (project.path / "conftest.py").write_text("import os; os.write(1, b'a\\xffb\\n')\n")
    project.fresh = fresh
    assert "a\\xffb" in project.run("-s").splitlines()


def test_a_session_with_a_cache_of_inductor_is_warm(project: Project) -> None:
    variable = {"TORCHINDUCTOR_CACHE_DIR": "one"}
    (project.path / "conftest.py").write_text(
        f"import os, sys\nassert 'torch' in sys.modules\nassert {variable}.items() <= os.environ.items()\n"
    )
    assert "no tests ran" in project.run(environ=variable)
