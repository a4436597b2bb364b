"""Small models, each named after the trouble it makes. Plain modules: sharding is the adapter's affair.

Imports torch, nothing else of harness, and torchvision only when a model of it is asked for. ``units`` tells
an adapter what to shard on its own: submodules by name or by class. ``batch(generator)`` makes an input and
``loss(output, ...)`` a loss to learn from it.
"""

from harness.zoo.casting import CastingLayers, ExternalInput
from harness.zoo.delay import NestedWrappedModuleWithDelay
from harness.zoo.experts import DummyDDP, MixtureOfExperts
from harness.zoo.in_half import InHalf
from harness.zoo.known_gradient import KnownGradient, KnownGradients
from harness.zoo.mixed_precision import LinearMixedPrecision, NestedLinearMixedPrecision
from harness.zoo.mlp import MLP
from harness.zoo.nested import AlwaysWrapNestedWrappedModule, NestedWrappedModule, NonUniformReqGradNWM
from harness.zoo.norms import BatchNormNet
from harness.zoo.transformer import TransformerWithSharedParams
from harness.zoo.uneven import UnevenShapes
from harness.zoo.vision import resnet50

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
