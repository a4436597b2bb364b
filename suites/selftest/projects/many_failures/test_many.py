"""Many failures of few causes, on ranks and not."""

import pytest


def check(value):
    assert value == 0, f"value of {value} at {hex(id(value))}"


@pytest.mark.ranks(2)
def test_cases(world, run_subtests):
    def claim(lr, size):
        if lr == 2:
            check(size)
        if size == 3:
            raise ValueError(f"bad shape {[size, lr]}")

    run_subtests({"lr": [0, 1, 2], "size": [1, 2, 3]}, claim)


@pytest.mark.ranks(2)
def test_one_rank(world):
    if world.rank == 1:
        check(7)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("n", [1, 2])
def test_plain(n, dtype):
    if dtype == "bf16":
        raise KeyError(n)


def test_alone(tmp_path):
    (tmp_path / "state.pt").read_text()
