"""Ways to run pytest other than all tests in one process, and what the controller keeps out of."""

from __future__ import annotations

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


def test_a_run_with_ranks_does_not_import_torch_in_the_controller(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CENSUS)
    pytester.makepyfile(BOTH)
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["torch: False, children: *"])


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


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan"])
def test_set_up_without_tests_does_not_crash(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile(test_it=BOTH)
    result = pytester.runpytest_subprocess(option, timeout=60)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*test_it.py::test_y (fixtures used: *", "* no tests ran in *"])
    result.stdout.no_fnmatch_line("*Error*")


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
            raise RuntimeError("sees a server of its own in a rank")

    class Telling:
        def pytest_configure_node(self, node):
            node.workerinput["sock_port"] = 4711

    def pytest_runtest_protocol(item):
        if hasattr(item.config, "workerinput"):
            raise RuntimeError("runs an item again on one rank")
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
            config.option.randomly_seed = config.workerinput["randomly_seed"]
        else:
            config.option.randomly_seed = 12345
"""


@pytest.mark.parametrize("xdist", ["xdist", "no:xdist"])
def test_ranks_know_what_plugins_tell_workers_and_run_nothing_again(
    pytester: pytest.Pytester, xdist: str
) -> None:
    pytester.makepyfile(
        rerunfailures=RERUNFAILURES,
        randomly=RANDOMLY,
        test_it="""
        import pytest

        @pytest.mark.flaky
        @pytest.mark.ranks(2)
        def test_x(world, pytestconfig):
            assert pytestconfig.option.randomly_seed == 12345
            has_xdist = pytestconfig.pluginmanager.hasplugin("xdist")
            assert pytestconfig.workerinput.get("sock_port") == (4711 if has_xdist else None)
        """,
    )
    options = ["-p", "rerunfailures", "-p", "randomly", "--strict-markers"]
    result = pytester.runpytest_subprocess(*options, *(["-p", xdist] if xdist != "xdist" else []), timeout=60)
    result.assert_outcomes(passed=1)


def test_a_plugin_that_fails_to_tell_workers_is_named_with_the_cure(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_configure_node(node): node.never_heard_of")
    pytester.makepyfile(test_it=BOTH)
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(
        ["no world of 2 ranks *`pytest_configure_node`*AttributeError: *never_heard_of*"]
    )


def test_a_fixture_kept_for_an_item_that_is_run_elsewhere_ends_before_the_next(
    pytester: pytest.Pytester,
) -> None:
    """Under pytest -n the item that comes next in a file may go to another controller."""
    pytester.makeconftest(
        """
        import pytest

        def pytest_runtestloop(session):
            mine = [item for item in session.items if "elsewhere" not in item.name]
            for item, following in zip(mine, [*mine[1:], None]):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            return True

        @pytest.fixture(scope="module")
        def module(request):
            yield
            open("ended.txt", "a").write(f"{request.module.__name__} ")
        """
    )
    pytester.makepyfile(
        test_first="""
        import pytest
        @pytest.mark.ranks(1)
        def test_a(module): pass
        def test_plain(): pass
        @pytest.mark.ranks(1)
        def test_elsewhere(module): pass
        """,
        test_second="""
        import pathlib, pytest
        @pytest.mark.ranks(1)
        def test_b(module): assert pathlib.Path("ended.txt").read_text() == "test_first "
        """,
    )
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(passed=3)
    assert (pytester.path / "ended.txt").read_text() == "test_first test_second "


def test_what_a_hook_adds_to_a_report_reaches_the_controller_if_need_be_as_text(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        """
        import os, pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(call):
            report = yield
            report.rank, report.stage = os.environ["RANK"], {"what": ("is", call.when)}
            report.cannot_be_sent = lambda: 0
            return report

        def pytest_runtest_logreport(report):
            if "RANK" not in os.environ:
                text = report.cannot_be_sent.split(" at ")[0]
                open("told.txt", "a").write(f"{report.rank} {report.stage} {text}\\n")
        """
    )
    pytester.makepyfile("import pytest\n\n@pytest.mark.ranks(1)\ndef test_x(): pass")
    pytester.runpytest_subprocess(timeout=60).assert_outcomes(passed=1)
    assert (pytester.path / "told.txt").read_text().splitlines() == [
        f"0 {{'what': ('is', '{when}')}} <function pytest_runtest_makereport.<locals>.<lambda>"
        for when in ("setup", "call", "teardown")
    ]
