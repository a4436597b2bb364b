"""The ranks of an item, for tests of the merge of their reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from suites.selftest.reporting.merged import Ranks


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    item = SimpleNamespace(
        nodeid="a.py::test",
        location=("a.py", 6, "test"),
        keywords={"test": 1},
        config=request.config,
        fixturenames=("run_subtests",),
        stash=pytest.Stash(),
        get_closest_marker=lambda name: None,
    )
    hook = SimpleNamespace(
        pytest_report_to_serializable=request.config.hook.pytest_report_to_serializable,
        pytest_report_from_serializable=request.config.hook.pytest_report_from_serializable,
        pytest_ranks_remarks=lambda context: [["a remark"]],
        pytest_ranks_sections=lambda context, cause, report: [("a section", f"text of {cause.rank}")],
    )
    options = {"rank_output": "blamed", "subtest": []}
    item.config = SimpleNamespace(
        hook=hook,
        getoption=lambda name, default=None: options.get(name, default),
        getini=lambda name: "no",
        invocation_params=SimpleNamespace(dir="/base"),
        options=options,
    )
    return Ranks(item)
