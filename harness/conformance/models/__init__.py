"""Small models, each made for one difficulty. Plain modules: sharding is the adapter's affair.

Imports torch, of harness nothing but `layouts` in `parted`, and torchvision only when a model of it is
requested. Most have `units`, the submodules to shard on their own, by name or by class; `batch(generator)`,
which makes an input; and `loss(output, ...)`.
"""

from lockstep.conformance.models.copies import copier
from lockstep.conformance.models.dtypes import (
    BatchNormNet,
    CastingLayers,
    ExternalInput,
    InHalf,
    LinearMixedPrecision,
    NestedLinearMixedPrecision,
)
from lockstep.conformance.models.nested import (
    AlwaysWrapNestedWrappedModule,
    DummyDDP,
    MixtureOfExperts,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
)
from lockstep.conformance.models.networks import TransformerWithSharedParams, resnet50
from lockstep.conformance.models.parallel import TensorParallelModel
from lockstep.conformance.models.parameters import (
    MLP,
    ForeignTensor,
    KnownGradient,
    KnownGradients,
    OddParameter,
    UnevenShapes,
)

__all__ = [
    "MLP",
    "AlwaysWrapNestedWrappedModule",
    "BatchNormNet",
    "CastingLayers",
    "DummyDDP",
    "ExternalInput",
    "ForeignTensor",
    "InHalf",
    "KnownGradient",
    "KnownGradients",
    "LinearMixedPrecision",
    "MixtureOfExperts",
    "NestedLinearMixedPrecision",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "OddParameter",
    "TensorParallelModel",
    "TransformerWithSharedParams",
    "UnevenShapes",
    "copier",
    "resnet50",
]
