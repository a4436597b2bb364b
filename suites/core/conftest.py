"""State dicts of an engine by type, of models and of optimizers; and its wrapper front."""

from functools import partial

import pytest

from lockstep.conformance import Capability, offers, require


class StatesByType:
    """Saves and loads by the front; `kind` is FULL, SHARDED or LOCAL, `rank0` leaves it to rank 0."""

    def __init__(self, front):
        self.front, self.static = front, front.FullyShardedDataParallel

    def of_kind(self, model, kind, rank0=False):
        configs = {}
        if rank0:
            configs["state_dict_config"] = self.front.FullStateDictConfig(
                offload_to_cpu=True, rank0_only=True
            )
            configs["optim_state_dict_config"] = self.front.FullOptimStateDictConfig(rank0_only=True)
        return self.static.state_dict_type(model, self.front.StateDictType[f"{kind}_STATE_DICT"], **configs)

    def model(self, model, kind="FULL", rank0=False):
        with self.of_kind(model, kind, rank0):
            return model.state_dict()

    def load_model(self, model, state, kind="FULL", **arguments):
        with self.of_kind(model, kind):
            return model.load_state_dict(state, **arguments)

    def optimizer(self, model, optimizer, kind="FULL", rank0=False):
        with self.of_kind(model, kind, rank0):
            return self.static.optim_state_dict(model, optimizer)

    def load_optimizer(self, model, optimizer, state, kind="FULL", rank0=False):
        with self.of_kind(model, kind, rank0):
            optimizer.load_state_dict(self.static.optim_state_dict_to_load(model, optimizer, state))

    def all(self, model, optimizer, kind="FULL", rank0=False):
        return {
            "model": self.model(model, kind, rank0),
            "optimizer": self.optimizer(model, optimizer, kind, rank0),
        }

    def load_all(self, model, optimizer, state, kind="FULL"):
        self.load_model(model, state["model"], kind)
        self.load_optimizer(model, optimizer, state["optimizer"], kind)

    def values(self, model, optimizer):
        """Return full copies of all tensors, of the optimizer's by "parameter key"."""
        state = self.all(model, optimizer)
        moments = {
            f"{name} {key}": value
            for name, one in state["optimizer"]["state"].items()
            for key, value in one.items()
        }
        return {name: tensor.clone() for name, tensor in (state["model"] | moments).items()}


@pytest.fixture
def states(engine):
    """The engine's state dicts by type, see `StatesByType`; most of the models have a 0-dim parameter."""
    require(engine, Capability.STATE_DICTS, Capability.SCALARS)
    return StatesByType(engine.state_dicts)


@pytest.fixture
def states_if_any(engine, request):
    """`states`, or None where the engine does not offer all of it: for claims that can save weights alone."""
    offered = offers(engine, Capability.STATE_DICTS) and offers(engine, Capability.SCALARS)
    return request.getfixturevalue("states") if offered else None


@pytest.fixture
def wrapper_front(engine):
    """The names of the wrapper front, as `FullyShardedDataParallel`."""
    require(engine, Capability.WRAPPER)
    return engine.wrapper


@pytest.fixture
def wrap(world, wrapper_front):
    """Wrap a bare model as one unit, unless a policy is among the settings: `wrap(bare, **settings)`."""
    return partial(wrapper_front.FullyShardedDataParallel, device_id=world.device)
