"""The page of conformance in a browser: rows are found by words and outcomes, and cells lead to causes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.conformance.render import to_page
from lockstep.conformance.table import Case, Cell, Claim, Outcome, Table
from suites.selftest.browser import Browser

HELD = Case("", Outcome.HELD)
BROKEN = Case("", Outcome.BROKEN, text="E   ValueError: no\nmine.py:3: ValueError")
KNOWN, LACKING = Case("", Outcome.DEVIATION, "rounds twice"), Case("", Outcome.NOT_OFFERED, "scaling")
CASES = {
    "core/test_steps.py::test_moves_all_weights": BROKEN,
    "core/test_steps.py::test_sums[2-fp16]": KNOWN,
    "core/test_steps.py::test_sums[2-fp32]": HELD,
    "core/test_steps.py::test_sums[3-fp16]": HELD,
    "scale/test_scale.py::test_it_grows": LACKING,
}
"""What the second of two engines makes of each claim; the first one holds all."""
STEPS, SCALE = "core/test_steps.py", "scale/test_scale.py"
ROWS = [STEPS, "moves all weights", "sums 3 parameter sets", SCALE, "it grows"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = Table(["first", "second"], {name: Claim(name) for name in CASES})
    for name, case in CASES.items():
        table.cells[name] = {"first": Cell((HELD,), 0.1), "second": Cell((case,), 0.1)}
    path = tmp_path_factory.mktemp("page") / "conformance.html"
    path.write_text(to_page(table))
    return path


def rows(browser: Browser) -> list[str]:
    """Return the first cell of each row of the table of claims that is shown."""
    shown = "[...document.querySelectorAll('#table tbody tr')].filter(row => row.checkVisibility())"
    found: list[str] = browser.run(f"{shown}.map(row => row.cells[0].innerText)")
    return found


def wait_for_count(browser: Browser, number: int) -> None:
    """Wait for the count of claims beside the filter, which follows a moment after what is typed."""
    browser.wait(f"shown.textContent == '{number} of {len(CASES)} claims'")


def test_words_that_are_typed_hide_the_rows_that_lack_one(path: Path, browser: Browser) -> None:
    browser.open(path)
    assert rows(browser) == ROWS
    browser.click("#text")
    browser.type("GROWS")
    wait_for_count(browser, 1)
    assert rows(browser) == [SCALE, "it grows"]
    for _ in "GROWS":
        browser.press("Backspace")
    browser.type("fp16 sums")
    wait_for_count(browser, 2)
    assert rows(browser) == [STEPS, "sums 3 parameter sets"]
    browser.type(" nothing")
    wait_for_count(browser, 0)
    assert rows(browser) == []


def test_an_outcome_is_chosen_by_keyboard(path: Path, browser: Browser) -> None:
    browser.open(path)
    browser.click("#text")
    browser.press("Tab", "ArrowDown")
    assert browser.run("state.selectedOptions[0].text") == "broken somewhere"
    wait_for_count(browser, 1)
    assert rows(browser) == [STEPS, "moves all weights"]
    browser.press("End")
    assert browser.run("state.selectedOptions[0].text") == "where engines differ"
    wait_for_count(browser, 3)
    assert rows(browser) == ROWS
    browser.press("Home")
    wait_for_count(browser, 5)


def test_of_an_open_test_parameter_sets_are_hidden_one_by_one(path: Path, browser: Browser) -> None:
    browser.open(path)
    browser.click("#table summary")
    sets = ["2-fp16", "2-fp32", "3-fp16"]
    assert rows(browser) == [*ROWS[:3], *sets, *ROWS[3:]]
    browser.click("#text")
    browser.type("fp16")
    wait_for_count(browser, 2)
    assert rows(browser) == [STEPS, "sums 3 parameter sets", "2-fp16", "3-fp16"]
    browser.press("Tab")
    browser.type("k")  # known deviation somewhere
    wait_for_count(browser, 1)
    assert rows(browser) == [STEPS, "sums 3 parameter sets", "2-fp16"]


@pytest.mark.parametrize("scripts", [True, False], ids=["scripts", "no_scripts"])
def test_a_broken_cell_leads_into_its_cause(path: Path, browser: Browser, scripts: bool) -> None:
    browser.open(path, scripts)
    cause = "document.querySelector('#c0')"
    assert not browser.run(f"{cause}.checkVisibility({{contentVisibilityAuto: true}})")
    browser.click("#table td.b a")
    browser.wait("document.querySelector('#c0').closest('details').open")
    assert "ValueError: no" in browser.run(f"{cause}.innerText")
    assert 0 <= browser.boxes("#c0")[0].top < browser.run("innerHeight")


def test_without_scripts_all_rows_are_there_and_no_filter(path: Path, browser: Browser) -> None:
    browser.open(path, scripts=False)
    assert rows(browser) == ROWS
    assert not browser.run("document.querySelector('#filter').checkVisibility()")
    browser.click("#table summary")
    assert len(rows(browser)) == len(ROWS) + 3


def test_a_page_loads_nothing_else(path: Path, browser: Browser) -> None:
    browser.open(path)
    assert browser.run("performance.getEntriesByType('resource').length") == 0
