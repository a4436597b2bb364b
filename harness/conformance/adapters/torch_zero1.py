"""The adapter of torch's `ZeroRedundancyOptimizer` over `DistributedDataParallel`. Inside a rank."""

import warnings
from typing import Any

from torch.optim import Optimizer

from lockstep.assertions.parity import MakeOptimizer
from lockstep.conformance.adapters.torch_ddp import TorchDdp
from lockstep.conformance.capabilities import Capability

with warnings.catch_warnings():  # of `torch.jit.script`, which torch itself uses there
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


class TorchZero1(TorchDdp):
    """Replicas where each rank holds the optimizer's state of some parameters, and broadcasts them."""

    name = "torch-zero1"
    capabilities = TorchDdp.capabilities - {Capability.OPTIMIZER_STATE}

    def optimizer(self, model: Any, make: MakeOptimizer) -> Optimizer:
        # It calls what it is given as `optimizer_class` with parameters; it need not be a class.
        how: Any = make
        group = getattr(model, "process_group", None)  # a module of the model has none
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=how, process_group=group)
