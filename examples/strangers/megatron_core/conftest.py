"""Megatron-core on CPU ranks."""

from contextlib import nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Megatron-core makes tensors on CUDA's current device, and scales gradients in the default dtype."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda each: each)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)  # see shows_router.py
    # Its random states are those of CUDA; that of inference has none. There is no dropout here.
    random.initialize_rng_tracker(inference_rng_tracker=True)
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)
    torch.set_default_dtype(torch.float64)
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")
    torch.set_default_dtype(torch.float32)
    parallel_state.destroy_model_parallel()
