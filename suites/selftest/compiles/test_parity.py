"""Parity of compiled models, and what a second run without the compiler says of a difference."""

from __future__ import annotations

from suites.selftest.project import Run

PROJECT = "compiles"
OPTIONS = ("test_parity.py", "-p", "no:cacheprovider")


def test_parameters_have_the_names_of_the_model_that_was_not_compiled(run: Run) -> None:
    assert run.outcome("test_names_are_those_of_the_model") == "passed"


def test_a_difference_that_eager_has_not_comes_with_the_compiler(run: Run) -> None:
    text = run.failure("test_wrong_code")
    assert "passed.\neager agrees: the difference comes with doubles_less, in module `0`\n" in text
    assert "step 0, the loss" in text or "step 0, loss" in text


def test_a_difference_that_eager_has_is_found_by_module(run: Run) -> None:
    text = run.failure("test_wrong_without_the_compiler")
    assert "step 0, forward: output of module `0`" in text
    assert "_orig_mod" not in text
    assert "comes without torch.compile, too" in text
