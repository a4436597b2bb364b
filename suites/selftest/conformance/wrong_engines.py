"""The sample engine with a fault in each: what the suites must not let pass."""

from sample_engine import HandDDP
from speed_engine import HandSpeed
from zero1_engine import HandZero1, ShardedOptimizer

from lockstep.conformance import Capability


class ForgetsToAverage(HandDDP):
    def average(self, parameter):
        pass


class ForgetsToDivide(HandDDP):
    def average(self, parameter):
        super().average(parameter)
        parameter.grad *= 2


class MissesOne(HandDDP):
    """The first parameter of a model is left alone."""

    def shard(self, model, spec):
        self.missed = next(model.parameters())
        return super().shard(model, spec)

    def average(self, parameter):
        if parameter is not self.missed:
            super().average(parameter)


class ForgetsToCast(HandDDP):
    """Says that it casts, and does not."""

    capabilities = HandDDP.capabilities | {Capability.MIXED_PRECISION}


class NeedsNoBackward(HandSpeed):
    """Its own `backward` is never called."""

    def backward(self, model, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)


class KeepsItsPart(HandZero1):
    """Ranks step their parts of the parameters, and do not exchange them."""

    def optimizer(self, model, make):
        return AloneOptimizer(model.parameters(), make)


class AloneOptimizer(ShardedOptimizer):
    def exchange(self):
        pass
