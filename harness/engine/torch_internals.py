"""Private names of torch that the engine uses, each as seen in torch 2.13. Imports torch only."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

__all__ = ["BATCH_NORM", "pytree"]

# pytree: `tree_is_leaf`, `tree_flatten(is_leaf=)`, `tree_unflatten` and `tree_map`. If it moves:
# torch.utils.pytree, or optree, which has the same functions.

# The base class of BatchNorm1d to 3d, of SyncBatchNorm and of the lazy ones; torch's own FSDP uses it for the
# same purpose. If it moves: the class that BatchNorm1d and SyncBatchNorm have in common below nn.Module.
BATCH_NORM: type[nn.Module] = _BatchNorm
