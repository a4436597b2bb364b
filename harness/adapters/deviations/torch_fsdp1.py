"""Where torch-fsdp1 is known to break claims of the suites."""

from harness.adapters.deviations.deviation import Deviation

DEVIATIONS: tuple[Deviation, ...] = ()
