"""Fixtures of the suites that hold an engine to its behaviour. Without torch until one of them is used."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep import fixtures
from lockstep.conformance import plugin
from lockstep.conformance.registry import built_in_names, engine_of

SUITES = Path(__file__).parent

# Here, too: where the suites are installed, a project's root conftest may have fixtures of these names.
engine, engine_name = plugin.engine, plugin.engine_name
collectives, run_subtests, world = fixtures.collectives, fixtures.run_subtests, fixtures.world


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Register marks, and a profile of properties/conftest.py before Hypothesis's plugin looks for it."""
    config.addinivalue_line("markers", "basic(place): of the few claims that find most faults, in order")
    config.addinivalue_line("markers", "inductor: compiles C++ code; deselected unless -m or -k names it")
    config.addinivalue_line("markers", "inside: a claim about traffic, memory or hooks, not about values")
    if config.getoption("hypothesis_profile", None) == "long":
        from hypothesis import Phase, settings

        # To explain an example takes minutes, and says little that its few lines do not show.
        phases = [phase for phase in Phase if phase != Phase.explain]
        settings.register_profile("long", max_examples=500, deadline=None, phases=phases)


def pytest_collection_modifyitems(items):
    """Run claims that name one fault each first, in all files, and those that look inside the engine last."""

    def place(item):
        basic = item.get_closest_marker("basic")
        return basic.args[0] if basic else 100 + bool(item.get_closest_marker("inside"))

    items.sort(key=place)


def pytest_itemcollected(item):
    """Make each warning an error, but leave those of an engine from elsewhere to its authors.

    The table lists them, and nothing fails.
    """
    is_ours = (engine_of(item) or built_in_names()[0]) in built_in_names()
    if not (is_ours and "error" in item.config.getini("filterwarnings")):
        # First among marks, which are applied in order: what a test says of warnings goes before this.
        item.add_marker(pytest.mark.filterwarnings("error" if is_ours else "default"), append=False)


@pytest.fixture(autouse=True)
def freed_memory_is_nan(request, monkeypatch):
    """Make the built-in engine fill freed and sent memory with NaN, so that a late reader fails a test.

    Not in selftest and engine: their tests turn the switch on where they are about it.
    """
    if request.path.relative_to(SUITES).parts[0] not in ("selftest", "engine"):
        monkeypatch.setenv("LOCKSTEP_ENGINE_DEBUG", "1")


@pytest.fixture
def group_of_one():
    """The default process group of a test without ranks: this process alone, and nothing is sent."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


# Data


@pytest.fixture
def batch(world):
    """Make a new random input (4, 8) that differs by rank, with each call."""
    import torch

    return lambda: torch.randn(4, 8, device=world.device) + world.rank


@pytest.fixture
def batches(world):
    """Turn `make(generator)` into a function from a step's number to this rank's batch on its device."""
    from lockstep.assertions import per_rank_batches

    def batches(make):
        of_step = per_rank_batches(make, world.seed, world.rank)

        def on_device(number=0):
            made = of_step(number)
            if isinstance(made, tuple):
                return tuple(tensor.to(world.device) for tensor in made)
            return made.to(world.device)

        return on_device

    return batches


@pytest.fixture
def step(engine, batches):
    """Run forward and backward on a batch (4, 8) that differs by rank and number; return the loss."""
    import torch

    inputs = batches(lambda generator: torch.randn(4, 8, generator=generator))

    def step(model, number=0):
        loss = model(inputs(number)).float().square().sum()
        engine.backward(model, loss)
        return loss.detach()

    return step


# How a model is sharded


@pytest.fixture(params=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def strategy(request):
    """Each sharding strategy over all ranks."""
    return request.param


@pytest.fixture(params=[False, True], ids=["flat", "orig"])
def use_orig_params(request):
    """Whether users see the original parameters, or one flat parameter for each group."""
    return request.param


@pytest.fixture(params=[False, True], ids=["no_offload", "offload"])
def offload(request):
    """Whether shards and gradients rest on the CPU."""
    return request.param


@dataclass(frozen=True)
class Front:
    """An engine's own front, and settings for its `ShardSpec`. The methods are those of `Engine`."""

    name: str
    engine: Any
    device: Any
    settings: dict[str, Any] = field(default_factory=dict)

    is_composable = False

    @property
    def capabilities(self):
        return self.engine.capabilities

    def shard(self, bare, **spec):
        """Shard a bare model. Its units are those that it names; `mesh` has the axes (replicate, shard)."""
        from lockstep.conformance import ShardSpec

        spec = {"units": getattr(bare, "units", ()), "device": self.device, **self.settings, **spec}
        if mesh := spec.pop("mesh", None):
            spec["process_group"] = mesh.get_group(1), mesh.get_group(0)
        return self.engine.shard(bare.to(self.device), ShardSpec(**spec))

    def unwrapped(self, model):
        return self.engine.unwrapped(model)

    def no_sync(self, model):
        return self.engine.no_sync(model)

    def backward(self, model, loss, retain_graph=False):
        self.engine.backward(model, loss, retain_graph=retain_graph)

    def optimizer(self, model, make):
        return self.engine.optimizer(model, make)

    def clip_grad_norm_(self, model, max_norm, norm_type=2.0):
        return self.engine.clip_grad_norm_(model, max_norm, norm_type)

    def full_parameters(self, model):
        return self.engine.full_parameters(model)

    def full_gradients(self, model):
        return self.engine.full_gradients(model)


WRAPPER_ONLY = {"UNSYNCED_GRADIENTS", "PLAIN_PARAMETERS", "SCALARS", "ONE_NORM", "ONE_PADDING"}
"""Names of what no composable front offers, as its parameters are DTensors."""


@dataclass(frozen=True)
class ComposableFront(Front):
    """`fully_shard` or `replicate` of an engine. Called with a module it shards this in place."""

    is_composable = True

    @property
    def capabilities(self):
        return {each for each in self.engine.capabilities if each.name not in WRAPPER_ONLY}

    def unwrapped(self, model):
        return model

    def __call__(self, module, **settings):
        return getattr(self.engine.composable, self.name)(module, **settings)

    def shard(self, bare, units=None, precision=None, offload=False, **settings):
        """Shard the units, inner before outer, and then the model."""
        if precision is not None:
            settings |= self.precision(precision.param_dtype, precision.reduction_dtype)
        if offload:
            settings["offload_policy"] = self.engine.composable.CPUOffloadPolicy()
        units = getattr(bare, "units", ()) if units is None else units
        classes = tuple(unit for unit in units if isinstance(unit, type))
        for name, module in reversed(list(bare.to(self.device).named_modules())[1:]):
            if name in units or isinstance(module, classes):
                self(module, **settings)
        return self(bare, **settings)

    def precision(self, *args, **kwargs):
        """Return the setting that is called `mp_policy`."""
        return {"mp_policy": self.engine.composable.MixedPrecisionPolicy(*args, **kwargs)}

    @property
    def shards(self):
        return self.name == "fully_shard"

    @property
    def placements(self):
        """Return the placements of a parameter on a mesh of one axis."""
        from torch.distributed.tensor import Replicate, Shard

        return (Shard(0) if self.shards else Replicate(),)

    @contextmanager
    def no_sync(self, model):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def backward(self, model, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)

    def optimizer(self, model, make):
        return make(model.parameters())

    def clip_grad_norm_(self, model, max_norm, norm_type=2.0, **settings):
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(model.parameters(), max_norm, norm_type, **settings).full_tensor()

    def full_parameters(self, model):
        parameters = dict(model.named_parameters())
        return {name: p.clone() for name, p in self._full(parameters).items()}

    def full_gradients(self, model):
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return {name: g if g is None else g.clone() for name, g in self._full(gradients).items()}

    def _full(self, dtensors):
        from torch.distributed.tensor import DTensor

        from lockstep.assertions.full_tensors import full_tensors

        plain = [name for name, t in dtensors.items() if not isinstance(t, DTensor | None)]
        assert not plain, f"between steps these are sharded: {plain}"
        return full_tensors(dtensors)


@pytest.fixture
def shard(world, engine):
    """Shard a bare model by the engine's own front: `shard(bare, strategy, **spec)`."""
    front = Front("", engine, world.device)
    return lambda bare, strategy="FULL_SHARD", **spec: front.shard(bare, strategy=strategy, **spec)


SETTINGS = {
    f"{strategy}-{'orig' if use_orig_params else 'flat'}": {
        "strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for use_orig_params in (False, True)
}


@pytest.fixture
def fronts(world, engine):
    """All ways to shard over all ranks, by name: the strategies of one front, and the two composable ones."""
    own = [Front(name, engine, world.device, settings) for name, settings in SETTINGS.items()]
    composable = [ComposableFront(name, engine, world.device) for name in ("fully_shard", "replicate")]
    return {front.name: front for front in (*own, *composable)}


@pytest.fixture(params=[*SETTINGS, "fully_shard", "replicate"])
def front(fronts, request):
    """Each way to shard over all ranks."""
    return fronts[request.param]


@pytest.fixture(params=["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "fully_shard"])
def hybrid_front(world, engine, request):
    """Each way to shard inside a replica and to average across, on the `mesh` that `shard` is given."""
    name = request.param
    if name == "fully_shard":
        return ComposableFront(name, engine, world.device)
    return Front(name, engine, world.device, {"strategy": name})


@pytest.fixture
def fully_shard(fronts):
    """The composable front that shards, for claims that make sense for no other."""
    return fronts["fully_shard"]


@pytest.fixture
def replicate(fronts):
    """The composable front that copies, for claims that make sense for no other."""
    return fronts["replicate"]


@pytest.fixture
def check_reads(world, engine, fronts):
    """Train a `Reader` in two steps of two microbatches; it learns what the same bare model learns.

    `check(front, read)`: the first microbatches are without sync if `no_sync`; `loss(model, output)` may read
    weights, too; the rest goes to `front.shard`. Bare models are trained once for all cases of a test.
    """
    from contextlib import nullcontext
    from functools import cache, partial

    import torch
    import torch.distributed as dist

    from lockstep.assertions import assert_named_close
    from lockstep.conformance import Capability, require
    from lockstep.conformance.models.readers import Reader

    require(engine, Capability.OUTSIDE_READS)
    sgd = partial(torch.optim.SGD, lr=0.001)

    def mean_loss(model, output):
        return output.square().mean()

    def reader(read, frozen):
        torch.manual_seed(0)
        return Reader(read, frozen).to(world.device)

    def tokens(step, last):
        generator = torch.Generator().manual_seed(10 * step + 2 * world.rank + last)
        return torch.randint(5, (3,), generator=generator).to(world.device)

    def average_gradients(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size

    @cache
    def learned(read, loss, frozen):
        bare = reader(read, frozen)
        optimizer = sgd(bare.parameters())
        for step in range(2):
            for last in (False, True):
                loss(bare, bare(tokens(step, last))).backward()
            average_gradients(bare)
            optimizer.step()
            optimizer.zero_grad()
        return dict(bare.named_parameters())

    def check(front, read, loss=mean_loss, frozen=False, no_sync=False, prepare=None, **spec):
        front = fronts[front] if isinstance(front, str) else front
        model = front.shard(reader(read, frozen), **spec)
        inner = front.unwrapped(model)
        optimizer = front.optimizer(model, sgd)
        for step in range(2):
            for last in (False, True):
                if prepare:
                    prepare(inner)
                with front.no_sync(model) if no_sync and not last else nullcontext():
                    front.backward(model, loss(inner, model(tokens(step, last))))
            optimizer.step()
            optimizer.zero_grad()
        assert_named_close(front.full_parameters(model), learned(read, loss, frozen))

    return check
