"""Ordinary tests beside those on ranks."""

import warnings

import pytest


@pytest.mark.parametrize("number", range(4))
def test_passes(number, tmp_path):
    (tmp_path / "it").write_text(str(number))


def test_fails():
    assert [1, 2] == [1, 3]


def test_skips():
    pytest.skip("for a reason")


@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail():
    raise ValueError("as expected")


def test_warns():
    warnings.warn("a warning", stacklevel=1)
