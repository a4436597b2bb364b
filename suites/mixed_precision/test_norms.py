"""Norms in models of low precision: they become units of their own, and compute in full precision.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the tests of batch norms and of ResNet.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.assertions import (
    Training,
    assert_parity,
    train,
    unsharded_with_casts,
)
from lockstep.conformance import Precision, ShardSpec, trainee
from lockstep.conformance.models import BatchNormNet, resnet50
from lockstep.recorders import ForwardDtypes

F16, F32 = torch.float16, torch.float32
IN_FP16 = {"param_dtype": F16, "reduce_dtype": F16, "buffer_dtype": F16}


def check_norms(engine, bare, spec, training, others):
    """Check that norms in fp32 and `others` become the units of `bare`, and that it learns with them."""
    classes = spec.precision.full_precision_classes or (_BatchNorm,)
    norms = [name for name, module in bare.named_modules() if isinstance(module, classes)]
    learned = train(unsharded_with_casts(copy.deepcopy(bare), F16, None, None, classes), training)
    named = {type(bare.get_submodule(name)).__name__ for name in norms}
    dtypes, modules = ForwardDtypes(bare), dict(bare.named_modules())
    with pytest.warns(UserWarning, match="in full precision|mixed precision disabled") as hints:
        model = engine.shard(bare, spec)
    said = " ".join(str(hint.message) for hint in hints)
    assert {name for name in named if name not in said} == set()
    groups = {group.name: (group.compute_dtype, group.reduce_dtype) for group in engine.groups(model)}
    assert groups == dict.fromkeys(norms, (F32, F32)) | dict.fromkeys(others, (F16, F16))
    with dtypes:
        assert_parity(learned, trainee(engine, model), training)
    check_dtypes(modules, dtypes, norms)


def check_dtypes(modules, dtypes, norms):
    """Check what forward met in the norms, and in the layers that feed them and are fed by them."""
    for name, module in modules.items():
        if name in norms:
            assert (dtypes.inputs(name), dtypes.parameters(name)) == ({F32}, {F32}), name
        elif isinstance(module, nn.Linear | nn.Conv2d):
            assert (dtypes.inputs(name), dtypes.parameters(name)) == ({F16}, {F16}), name
        if isinstance(module, _BatchNorm):
            assert dtypes.buffers(name) == {F32}, name


@pytest.mark.ranks(2)
@pytest.mark.inside
class TestFSDPMixedPrecisionSharded:
    @pytest.mark.ranks(2, timeout=180)  # 27 s on two cores that six others used, most of it fp16 convolutions
    def test_mixed_precision_resnet(self, monkeypatch, world, engine, batch, batches):
        """Off the GPU torch refuses SyncBatchNorm in training: there the plain one stands for it."""
        # Two models that are held to each other need one algorithm for each convolution.
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        bare = resnet50().to(world.device)
        if world.device.type != "cpu":
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)
        images = batches(lambda generator: torch.randn(2, 3, 36, 36, generator=generator))
        # A sum of logits has gradients beyond the range of fp16.
        training = Training(images, lambda model, batch: model(batch).mean(), steps=1, tolerance=F16)
        large = ["layer4.0.conv2", "layer4.0.downsample.0", "layer4.1.conv2", "layer4.2.conv2", "fc"]
        blocks = ["layer3", "layer4.1", "layer4.2"]
        spec = ShardSpec(precision=Precision(**IN_FP16), min_num_params=2_000_000)
        check_norms(engine, bare, spec, training, ["", *blocks, *large])

    @pytest.mark.parametrize("sync", [True, False], ids=["sync", "plain"])
    def test_mp_batchnorm(self, world, engine, batch, batches, sync):
        """Off the GPU torch refuses SyncBatchNorm in training: there the claim is made of evaluation."""
        bare = BatchNormNet().to(world.device)
        inputs = batches(BatchNormNet.batch)
        if sync:
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)
        if sync and world.device.type == "cpu":
            with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
                bare(inputs(0))
            bare.eval()
        training = Training(inputs, lambda model, batch: BatchNormNet.loss(model(batch)), tolerance=F16)
        precision = Precision(**IN_FP16, full_precision_classes=(_BatchNorm, nn.LayerNorm))
        check_norms(engine, bare, ShardSpec(precision=precision), training, [""])
