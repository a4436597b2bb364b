"""Ways to run pytest other than all tests in one process, and what the controller keeps out of."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

BOTH = """
    import pytest

    @pytest.mark.ranks(2)
    def test_x(world, tmp_path): assert world.gather(1) == [1, 1]

    def test_y(tmp_path): pass
"""
# Prints what the controller has imported and started by the end of the run.
CENSUS = """
    import os, pathlib, sys

    def pytest_terminal_summary(terminalreporter):
        children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        terminalreporter.line(f"torch: {'torch' in sys.modules}, children: {len(children)}")
"""


def test_a_run_without_ranks_starts_no_process_and_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CENSUS)
    pytester.makepyfile("import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_x(n): pass")
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["torch: False, children: 0"])


def test_collecting_only_lists_items_and_starts_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CENSUS)
    pytester.makepyfile(test_it=BOTH)
    result = pytester.runpytest_subprocess("--co", "-q", timeout=60)
    assert result.outlines[:2] == ["test_it.py::test_x", "test_it.py::test_y"]
    result.stdout.fnmatch_lines(["torch: False, children: 0"])


@pytest.mark.parametrize("option", ["--pdb", "--trace"])
def test_a_debugger_is_refused_with_what_to_do_instead(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile(test_it=BOTH)
    result = pytester.runpytest_subprocess(option, timeout=60)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == (
        f"ERROR: {option} alone cannot reach into ranks, and test_it.py::test_x runs on ranks. Add "
        "--rank-pdb 0 for a debugger in rank 0 (it works without --pdb, too), or deselect the tests marked "
        "`ranks` with -m 'not ranks'"
    )


def test_a_debugger_is_fine_where_no_ranks_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BOTH)
    result = pytester.runpytest_subprocess("--pdb", "-m", "not ranks", timeout=60)
    result.assert_outcomes(passed=1, deselected=1)


def test_pytest_n_has_a_controller_in_each_of_its_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(
        """
        import os

        def pytest_sessionstart():
            name = os.environ.get("PYTEST_XDIST_WORKER", "main") + "-" + os.environ.get("RANK", "none")
            open("sessions.txt", "a").write(f"{name}\\n")
        """
    )
    pytester.makepyfile(
        test_it="""
        import pytest, time

        @pytest.mark.parametrize("n", range(4))
        def test_plain(n, worker_id):
            assert worker_id in ("gw0", "gw1")
            time.sleep(0.1)

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("n", range(8))
        def test_marked(world, n, worker_id):
            world.assert_same(worker_id)
            time.sleep(0.2)
            assert world.rank + n != 8
        """
    )
    result = pytester.runpytest_subprocess("-n2", timeout=60)
    result.assert_outcomes(failed=1, passed=11)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 failed",
            "rank 0: passed",
            "FAILED test_it.py::test_marked[[]7[]] - rank 1: assert (1 + 7) != 8",
        ]
    )
    ranks = [f"gw{number}-{rank}" for number in (0, 1) for rank in (0, 1)]
    sessions = (pytester.path / "sessions.txt").read_text().split()
    assert sorted(sessions) == sorted([*ranks, "gw0-none", "gw1-none", "main-none"])


# Do as pytest-rerunfailures and pytest-randomly do, which are not installed here.
RERUNFAILURES = """
    def pytest_configure(config):
        config.addinivalue_line("markers", "flaky: is run again")
        if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
            config.pluginmanager.register(Telling())
        elif config.pluginmanager.hasplugin("xdist"):
            open("wrong.txt", "a").write("sees a server of its own in a rank\\n")

    class Telling:
        def pytest_configure_node(self, node):
            node.workerinput["sock_port"] = 4711

    def pytest_runtest_protocol(item):
        if hasattr(item.config, "workerinput"):
            open("wrong.txt", "a").write("runs an item again on one rank\\n")
"""
RANDOMLY = """
    class Telling:
        def pytest_configure_node(self, node):
            node.workerinput["randomly_seed"] = node.config.option.randomly_seed

    def pytest_addoption(parser):
        parser.addoption("--randomly-seed", default="default")

    def pytest_configure(config):
        if config.pluginmanager.hasplugin("xdist"):
            config.pluginmanager.register(Telling())
        if hasattr(config, "workerinput"):
            config.option.randomly_seed = config.workerinput.get("randomly_seed")
        else:
            config.option.randomly_seed = 12345
"""


FLAKY = """
    import pytest

    @pytest.fixture
    def told(world, pytestconfig):
        has_xdist = pytestconfig.pluginmanager.hasplugin("xdist")
        assert pytestconfig.option.randomly_seed == 12345
        assert pytestconfig.workerinput.get("sock_port") == (4711 if has_xdist else None)
        open(f"told-{world.rank}-{'xdist' if has_xdist else 'none'}.txt", "a").write("once")

    @pytest.mark.flaky
    @pytest.mark.ranks(2)
    def test_flaky(told): pass
"""
PLUGINS = ("-p", "rerunfailures", "-p", "randomly", "--strict-markers")


@dataclass(frozen=True)
class Done:
    path: Path
    status: int
    lines: list[str]

    def verdicts(self) -> dict[str, str]:
        """What `-v` says, by node id."""
        return dict(line.split()[:2] for line in self.lines if "::" in line)


def run(path: Path, files: dict[str, str], *args: str) -> Done:
    (path / "pytest.ini").write_text("[pytest]\nranks_preload =\n")
    for name, text in files.items():
        (path / f"{name}.py").write_text(dedent(text))
    command = [sys.executable, "-m", "pytest", *args]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=60, check=False)
    return Done(path, done.returncode, done.stdout.splitlines())


CONFTEST = """
    import os, pytest

    def pytest_runtestloop(session):
        mine = [item for item in session.items if "elsewhere" not in item.name]
        for item, following in zip(mine, [*mine[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return True

    @pytest.fixture(scope="module")
    def module(request):
        yield
        open("ended.txt", "a").write(f"{request.module.__name__} ")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        if item.name == "test_reported":
            report.rank, report.stage = os.environ["RANK"], {"what": ("is", call.when)}
            report.cannot_be_sent = lambda: 0
        return report

    def pytest_runtest_logreport(report):
        if "RANK" not in os.environ and "test_reported" in report.nodeid:
            text = report.cannot_be_sent.split(" at ")[0]
            open("told.txt", "a").write(f"{report.rank} {report.stage} {text}\\n")
"""
HOOKED = {
    "census": CENSUS,
    "rerunfailures": RERUNFAILURES,
    "randomly": RANDOMLY,
    "conftest": CONFTEST,
    "test_first": """
        import pytest
        @pytest.mark.ranks(1)
        def test_a(module): pass
        def test_plain(): pass
        @pytest.mark.ranks(1)
        def test_elsewhere(module): pass
        """,
    "test_second": """
        import pathlib, pytest
        @pytest.mark.ranks(1)
        def test_b(module): assert pathlib.Path("ended.txt").read_text() == "test_first "
        @pytest.mark.ranks(1)
        def test_reported(): pass
        """,
    "test_third": FLAKY,
}


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Tests under hooks of all kinds."""
    return run(tmp_path_factory.mktemp("hooked"), HOOKED, "-v", "-p", "census", *PLUGINS)


@pytest.fixture(scope="module")
def only_set_up(tmp_path_factory: pytest.TempPathFactory) -> Done:
    files = {"rerunfailures": RERUNFAILURES, "randomly": RANDOMLY, "test_it": BOTH, "test_told": FLAKY}
    path = tmp_path_factory.mktemp("only_set_up")
    return run(path, files, "--setup-only", "-p", "no:xdist", *PLUGINS)


def test_a_run_with_ranks_does_not_import_torch_in_the_controller(hooked: Done) -> None:
    (census,) = (line for line in hooked.lines if line.startswith("torch: "))
    assert census.startswith("torch: False, children: ")


def test_a_fixture_kept_for_an_item_that_is_run_elsewhere_ends_before_the_next(
    hooked: Done,
) -> None:
    """Under pytest -n the item that comes next in a file may go to another controller."""
    told = hooked.verdicts()
    assert [told[f"test_first.py::{name}"] for name in ("test_a", "test_plain")] == ["PASSED", "PASSED"]
    assert told["test_second.py::test_b"] == "PASSED"
    assert "test_first.py::test_elsewhere" not in told
    assert (hooked.path / "ended.txt").read_text() == "test_first test_second "


def test_what_a_hook_adds_to_a_report_reaches_the_controller_if_need_be_as_text(
    hooked: Done,
) -> None:
    assert (hooked.path / "told.txt").read_text().splitlines() == [
        f"0 {{'what': ('is', '{when}')}} <function pytest_runtest_makereport.<locals>.<lambda>"
        for when in ("setup", "call", "teardown")
    ]


def test_ranks_know_what_plugins_tell_workers_and_run_nothing_again(hooked: Done) -> None:
    assert hooked.verdicts()["test_third.py::test_flaky"] == "PASSED"
    assert "= 5 passed in " in hooked.lines[-1]
    assert not (hooked.path / "wrong.txt").exists()
    assert [(hooked.path / f"told-{rank}-xdist.txt").read_text() for rank in (0, 1)] == ["once", "once"]


def test_ranks_know_what_plugins_tell_workers_where_there_is_no_xdist(only_set_up: Done) -> None:
    assert not (only_set_up.path / "wrong.txt").exists()
    assert [(only_set_up.path / f"told-{rank}-none.txt").read_text() for rank in (0, 1)] == ["once", "once"]


def test_set_up_without_tests_does_not_crash(only_set_up: Done) -> None:
    assert_only_set_up(only_set_up)


def test_a_plan_of_set_ups_does_not_crash(tmp_path: Path) -> None:
    assert_only_set_up(run(tmp_path, {"test_it": BOTH}, "--setup-plan"))


def assert_only_set_up(done: Done) -> None:
    assert done.status == pytest.ExitCode.OK
    assert [line for line in done.lines if "test_it.py::test_y (fixtures used: " in line]
    assert "= no tests ran in " in done.lines[-1]
    assert "Error" not in "\n".join(done.lines)


def test_a_plugin_that_fails_to_tell_workers_is_named_with_the_cure(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_configure_node(node): node.never_heard_of")
    pytester.makepyfile(test_it=BOTH)
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(
        ["no world of 2 ranks *`pytest_configure_node`*AttributeError: *never_heard_of*"]
    )
