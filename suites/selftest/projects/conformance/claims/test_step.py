"""Claims with every outcome, of an engine and of one that lacks and breaks things."""

import os
from types import SimpleNamespace

import pytest

if "RANK" in os.environ:
    from lockstep.conformance import Capability, NotOffered


def refuse(engine, capability):
    if engine.name == "other":
        raise NotOffered(engine.name, capability)


class TestStep:
    @pytest.mark.ranks(2)
    def test_moves_all_weights(self, world, engine, run_subtests):
        """Weights move <b>alike</b>. And more."""

        def claim(lr):
            assert (lr, engine.name) != (2, "other"), "a <weight> | stood still"

        run_subtests({"lr": [1, 2, 3]}, claim)

    @pytest.mark.ranks(2)
    def test_shards(self, world, engine, run_subtests):
        refuse(engine, Capability.SHARDING)
        run_subtests({"a": [1, 2]}, lambda a: None)


@pytest.mark.ranks(2)
def test_half_of_it(world, engine, run_subtests):
    def claim(offload):
        if offload:
            refuse(engine, Capability.OFFLOAD)

    run_subtests({"offload": [False, True]}, claim)


class TestInTheController:
    @pytest.fixture
    def engine(self, engine_name):  # a stand-in, which takes no time to import
        return SimpleNamespace(name=engine_name.partition(":")[0])

    @pytest.mark.parametrize("dtype", ["fp16"])
    def test_rounding(self, engine, dtype):
        if engine.name == "other":
            pytest.xfail("rounds twice, pytorch#144045")

    def test_on_a_gpu(self, engine):
        pytest.skip("needs a GPU")

    @pytest.fixture
    def put_back(self, engine):
        yield
        assert engine.name != "other", "left behind"

    def test_tear_down(self, put_back):
        pass

    def test_no_engine_holds_it(self, engine):
        assert engine.name == "none"


def test_of_no_engine():
    pass
