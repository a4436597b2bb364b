"""Engines of one's own, and classes that are none."""

from lockstep.conformance.adapters.lockstep import Lockstep


class Other(Lockstep):
    name = "other"


INSTANCE = Other()


class Half:
    name = "half"

    def shard(self, model, spec): ...
    @property
    def composable(self):
        raise NotImplementedError("read too early")


class Wants:
    def __init__(self, size): ...


class Inner:
    Other = Other
