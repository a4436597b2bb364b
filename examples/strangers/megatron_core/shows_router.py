"""The router of experts without Transformer Engine: NameError, in any dtype and on any number of ranks.

megatron_core 0.16.1, core/transformer/moe/moe_utils.py, `RouterGatingLinearFunction.forward`: it compares
`te_general_gemm` with None, which is imported where Transformer Engine is, and else is not defined.
Run: python shows_router.py
"""

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear

try:
    print(router_gating_linear(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32))
except NameError as error:
    print("NameError:", error)
