"""Small models, each named after the trouble it makes. Plain modules: sharding is the adapter's affair.

Imports torch, nothing else of harness, and torchvision only when a model of it is asked for. ``units`` tells
an adapter what to shard on its own: submodules by name or by class. ``batch(generator)`` makes an input and
``loss(output, ...)`` a loss to learn from it.
"""

from harness.conformance.models.casting import CastingLayers, ExternalInput
from harness.conformance.models.delay import NestedWrappedModuleWithDelay
from harness.conformance.models.experts import DummyDDP, MixtureOfExperts
from harness.conformance.models.in_half import InHalf
from harness.conformance.models.known_gradient import KnownGradient, KnownGradients
from harness.conformance.models.mixed_precision import LinearMixedPrecision, NestedLinearMixedPrecision
from harness.conformance.models.mlp import MLP
from harness.conformance.models.nested import (
    AlwaysWrapNestedWrappedModule,
    NestedWrappedModule,
    NonUniformReqGradNWM,
)
from harness.conformance.models.norms import BatchNormNet
from harness.conformance.models.transformer import TransformerWithSharedParams
from harness.conformance.models.uneven import UnevenShapes
from harness.conformance.models.vision import resnet50

__all__ = [
    "MLP",
    "AlwaysWrapNestedWrappedModule",
    "BatchNormNet",
    "CastingLayers",
    "DummyDDP",
    "ExternalInput",
    "InHalf",
    "KnownGradient",
    "KnownGradients",
    "LinearMixedPrecision",
    "MixtureOfExperts",
    "NestedLinearMixedPrecision",
    "NestedWrappedModule",
    "NestedWrappedModuleWithDelay",
    "NonUniformReqGradNWM",
    "TransformerWithSharedParams",
    "UnevenShapes",
    "resnet50",
]
