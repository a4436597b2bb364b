"""The reference is what the code says: every option, mark, fixture, command and public name, each once."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from lockstep.controller.pytest_internals import option_groups
from suites.selftest.reference import CHECKOUT, PACKAGES, PAGES, names_page, options_page

REMEDY = "run `python -m suites.selftest.reference` in the checkout"


@pytest.mark.parametrize(("name", "make"), [("options", options_page), ("names", names_page)])
def test_a_page_of_the_reference_is_what_the_code_says(name: str, make: object) -> None:
    assert callable(make)
    assert (PAGES / f"{name}.md").read_text() == make(), REMEDY


def test_every_option_of_a_run_is_in_the_reference_once(pytestconfig: pytest.Config) -> None:
    """Also where they are added in another way than that which the page is made of."""
    page = (PAGES / "options.md").read_text().partition("## Commands")[0]
    listed = re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE)
    groups = option_groups(pytestconfig).items()
    ours = [action for action, group in groups if group in ("ranks", "conformance")]
    assert sorted(listed) == sorted(name for action in ours for name in action.option_strings)
    sources = "".join(path.read_text() for path in (CHECKOUT / "harness").rglob("*.py"))
    added = re.findall(r'parser\.addini\(\s*"(\w+)"', sources)
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(added)  # in no order on disk


def test_every_public_name_is_in_the_reference_once() -> None:
    page = (PAGES / "names.md").read_text()
    names = [name for package in PACKAGES for name in import_module(f"harness{package}").__all__]
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == names
