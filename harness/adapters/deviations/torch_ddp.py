"""Where torch-ddp is known to break claims of the suites."""

from harness.adapters.deviations.deviation import Deviation

DEVIATIONS: tuple[Deviation, ...] = ()
