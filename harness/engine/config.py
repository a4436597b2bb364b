"""In which dtypes a unit computes and communicates now: as it was told, or in eval in full precision.

Imports torch and engine.policy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from harness.engine.api import MixedPrecision


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a forward and of the backward that belongs to it.

    ``compute``: of full parameters and their gather; ``reduce``: of gradients on the wire; ``gradient``: of
    reduced gradients as the user gets them.
    """

    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype


@dataclass(frozen=True)
class Precision:
    """What a unit was told, ``given``, which does not hold in eval of its ``module`` if ``full_in_eval``."""

    given: MixedPrecision
    module: nn.Module
    full_in_eval: bool

    @property
    def is_suspended(self) -> bool:
        """Whether the unit is in eval, and so in full precision whatever it was told."""
        return self.full_in_eval and not self.module.training

    @property
    def now(self) -> MixedPrecision:
        return MixedPrecision() if self.is_suspended else self.given

    def dtypes(self, original: torch.dtype) -> Dtypes:
        """Return what holds now for parameters of the dtype ``original``."""
        mixed = self.now
        compute = mixed.param_dtype or original
        reduce = mixed.reduce_dtype or compute
        return Dtypes(compute, reduce, gradient=reduce if mixed.keep_low_precision_grads else original)
