"""What a user decides for the composable front: frozen values, no behaviour."""

from dataclasses import dataclass

import torch

from harness.engine.policy import check_dtypes


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Say in which dtypes the group of one `fully_shard` or `replicate` computes and communicates.

    ``param_dtype``: full parameters, and their gather; None keeps the original dtype. ``reduce_dtype``:
    gradients on the wire, and those that wait for it; None means ``param_dtype``, then the original dtype.
    ``output_dtype``: floating-point results of the modules; None leaves them. ``cast_forward_inputs``: cast
    floating-point arguments to ``param_dtype``, inside containers and dataclasses too. Buffers stay as they
    are, and gradients are given in the parameters' dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        check_dtypes(self, "param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards where they compute."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and so the optimizer's step on CPU.

    ``pin_memory`` is accepted for torch's sake and changes nothing: shards are in pageable memory.
    """

    pin_memory: bool = True
