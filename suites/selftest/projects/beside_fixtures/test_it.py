"""Tests on ranks that use fixtures and marks of plugins, one test or more of each."""

import asyncio
import datetime
import os
import socket

import anyio
import pytest
import pytest_check
import torch
import torch.distributed as dist
from pytest_bdd import given, scenario, then
from pytest_lazy_fixtures import lf
from pytest_socket import SocketBlockedError

pytestmark = pytest.mark.ranks(2)
order = []


def total(value):
    tensor = torch.tensor(value)
    dist.all_reduce(tensor)
    return tensor.item()


def test_mock(world, mocker):
    mocker.patch("os.getcwd", return_value="/nowhere")
    assert os.getcwd() == "/nowhere"
    assert total(1) == 2


@pytest.mark.asyncio
async def test_asyncio(world):
    await asyncio.sleep(0)
    assert total(world.rank) == 1


@pytest.mark.anyio
async def test_anyio(world):
    await anyio.sleep(0)
    assert total(world.rank) == 1


@pytest.mark.repeat(2)
def test_repeat(world):
    assert total(1) == 2


@pytest.mark.order(2)
def test_order_second(world):
    assert order == ["first"]


@pytest.mark.order(1)
def test_order_first(world):
    order.append("first")


def test_socket(world, socket_disabled):
    with pytest.raises(SocketBlockedError):
        socket.socket()
    assert total(1) == 2


@pytest.mark.freeze_time("2020-02-29")
def test_freezer(world):
    assert datetime.date.today() == datetime.date(2020, 2, 29)
    assert total(1) == 2


@pytest.mark.parametrize("number", [lf("one")], ids=["one"])
def test_lazy_fixtures(world, number):
    assert total(number) == 2


@pytest.mark.dependency
def test_dependency_fails(world):
    assert world.rank == 0


@pytest.mark.dependency(depends=["test_dependency_fails"])
def test_dependency_skips(world):
    assert total(1) == 2


def test_env(world):
    assert os.environ["BESIDE_PLUGINS"] == "set"


def test_check(world):
    pytest_check.equal(world.rank, 0, "the rank")
    pytest_check.equal(total(1), 2)


def test_subtests(world, subtests):
    for number in range(2):
        with subtests.test(number=number):
            assert total(number) == 2 * number


@scenario("sum.feature", "Ranks add")
def test_bdd(world):
    pass


@given("a number on each rank", target_fixture="number")
def _(world):
    return world.rank


@then("the sum is that of all")
def _(number):
    assert total(number) == 1


def test_last(world):
    assert total(1) == 2
