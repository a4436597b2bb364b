"""Cases of pytest's XML report that are closed: reports of them must not close them again.

Runs in the controller, and in the main process of pytest-xdist; must not import torch.
"""

from __future__ import annotations

import pytest

from lockstep.reporting.pytest_internals import forget_closed_cases


class XmlCases:
    """Lets a tear-down be reported after that of its test: where a world fails as it closes, for example.

    pytest's XML report keeps all failures but one of a test that had several, those of subtests, as those of
    an open case. The next tear-down of the test would close it, and raise KeyError.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)  # after the XML report's own
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            forget_closed_cases(self._config)
