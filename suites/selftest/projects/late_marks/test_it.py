"""Marks that are found to be broken after the collection: methods of unittest have no parameters."""

import unittest

import pytest


@pytest.mark.ranks(2, 4)
class TestOld(unittest.TestCase):
    def test_x(self):
        pass


def test_hooked():
    pass


def test_sound():
    pass
