"""An engine that says that it is another."""

from lockstep.conformance.adapters.lockstep import Lockstep


class Other(Lockstep):
    name = "other"
