"""Tests of two worlds and of the controller, between each other."""

import pytest
from notes import note


@pytest.fixture(scope="module")
def of_the_controller():
    with open("controller.txt", "a") as file:
        print("up", file=file)
        yield
        print("down", file=file)


@pytest.mark.ranks(2)
def test_a(world, module):
    note(world, "a")


def test_plain(of_the_controller):
    pass


@pytest.mark.ranks(1)
def test_of_another_world(world, module):
    note(world, "other")


@pytest.mark.ranks(2)
class TestClass:
    def test_b(self, world, of_class):
        note(world, "b")

    def test_c(self, world, of_class):
        note(world, "c")


def test_plain_too(of_the_controller):
    pass
