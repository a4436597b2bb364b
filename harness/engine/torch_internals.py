"""Private names of torch that the engine uses, each as seen in torch 2.13. Imports torch only."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

__all__ = ["BATCH_NORM", "module_versions", "new_state_dict", "pytree", "unscale_and_check"]

# pytree: `tree_is_leaf`, `tree_flatten(is_leaf=)`, `tree_unflatten` and `tree_map`. If it moves:
# torch.utils.pytree, or optree, which has the same functions.

# The base class of BatchNorm1d to 3d, of SyncBatchNorm and of the lazy ones; torch's own FSDP uses it for the
# same purpose. If it moves: the class that BatchNorm1d and SyncBatchNorm have in common below nn.Module.
BATCH_NORM: type[nn.Module] = _BatchNorm


def new_state_dict(
    entries: Mapping[str, Any] | None = None, versions: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return a state dict with the version numbers of modules by their names, as `nn.Module.state_dict` does.

    They are in its attribute `_metadata`, which `nn.Module.load_state_dict` reads. If that moves: see where
    these two create and copy the dict.
    """
    state = OrderedDict(entries or {})
    state._metadata = OrderedDict(versions or {})  # type: ignore[attr-defined]
    return state


def module_versions(state: object) -> dict[str, dict[str, Any]]:
    """Return the version numbers that `state` carries, to be changed in place; none for a plain dict."""
    return getattr(state, "_metadata", {})


def unscale_and_check(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients of one dtype and device in place; set `found_inf` to 1.0 if any was not finite.

    The kernel of `torch.amp.GradScaler`. If it moves: see `GradScaler._unscale_grads_`.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
