"""Private names of torch that the engine uses, each as seen in torch 2.13. Imports torch only.

What a step calls is an alias and no function of ours, so that it costs nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

F = TypeVar("F", bound=Callable[..., Any])

# `tree_is_leaf`, `tree_flatten(is_leaf=)`, `tree_unflatten` and `tree_map`. If it moves: torch.utils.pytree,
# or optree, which has the same functions.
pytree = _pytree

# The base class of BatchNorm1d to 3d, of SyncBatchNorm and of the lazy ones; torch's own FSDP uses it for the
# same purpose. If it moves: the class that BatchNorm1d and SyncBatchNorm have in common below nn.Module.
BATCH_NORM: type[nn.Module] = _BatchNorm

# The context in which no vmap, jvp or grad of torch.func goes on: inside one, views of shards and of full
# parameters would be wrapped tensors without memory. If it moves: what torch._functorch.pyfunctorch enters
# around a call that must see plain tensors.
outside_transforms: Callable[[], AbstractContextManager[None]] = torch._C._DisableFuncTorch

# The number of the backward that this thread is in, -1 outside; nested ones differ. If it moves: what
# torch.autograd.graph.register_multi_grad_hook counts by.
current_backward: Callable[[], int] = torch._C._current_graph_task_id

# The name that `checkpoint_wrapper` gives to the module in it, which it leaves out of state dicts. If it
# moves: torch's own FSDP leaves it out of the names of an optimizer's state.
CHECKPOINTED = "_checkpoint_wrapped_module"

# Whether the backward that is running will come to a node. If it moves: as for `current_backward`.
will_run: Callable[[Node], bool] = torch._C._will_engine_execute_node


# The attribute of `Variable` with autograd's engine, whose `queue_callback` takes what runs at the end of the
# running backward, unless that raises. It is looked up for each call: tests delay what is called there. If it
# moves: torch's own FSDP2 ends its backwards so, in `_register_root_post_backward_final_callback`.
AUTOGRAD_ENGINE = "_execution_engine"


# What a `DTensor` holds: the part of this rank, as `to_local` returns it under no_grad, and mesh, placements,
# shape and dtype. If they move: the constructor of DTensor takes both.
local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
dtensor_spec: Callable[[Tensor], Any] = attrgetter("_spec")

# The placement, on an axis, of a dim that later axes have divided before, into `split_factor` parts. If it
# moves: what torch's own FSDP2 makes of a `DTensor` that is tensor parallel on the same dim.
StridedShard: Callable[..., Placement] = _StridedShard

# The mesh that has the axes of several meshes of one root mesh, in their order. If it moves: as above.
concatenated: Callable[[list[DeviceMesh]], DeviceMesh] = DeviceMesh._concatenate

# The hooks of `register_post_accumulate_grad_hook` on a leaf, by number, or None. If it moves: what that
# function writes to.
gradient_hooks: Callable[[Tensor], dict[int, Callable[[Tensor], None]] | None] = attrgetter(
    "_post_accumulate_grad_hooks"
)

# How many modes of torch.utils._python_dispatch are entered, and a range in a profile that is no operation.
# If they move: `torch.profiler.record_function` alone does what both are for.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
FastLabel: Callable[[str], Any] = torch._C._profiler._RecordFunctionFast

# A tensor of a subclass that has shape, dtype and device, but no memory; and the attribute of a class whose
# operations go to `__torch_dispatch__` alone. Both are in torch's notes on subclasses. If they move: see how
# DTensor is made.
wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
without_torch_function: Any = torch._C._disabled_torch_function_impl


# The mark of a code object by which dynamo skips its frames: with all that they call, or alone. If they move:
# what `torch.compiler.disable` uses; that function imports torch's compiler, a second of CPU that a process
# without it saves.
_mark_code: Callable[..., None] = torch._C._dynamo.eval_frame.set_code_exec_strategy
_Strategy: Callable[..., Any] = torch._C._dynamo.eval_frame._FrameExecStrategy
_Action: Any = torch._C._dynamo.eval_frame._FrameAction
_SKIP, _SKIP_ALONE = _Strategy(_Action.SKIP, _Action.SKIP), _Strategy(_Action.SKIP, _Action.DEFAULT)


def untraced(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls: of hooks, of autograd's callbacks."""
    return _marked(function, _SKIP)


def untraced_itself(function: F) -> F:
    """Keep torch.compile out of a function, but not out of the modules that it calls."""
    return _marked(function, _SKIP_ALONE)


def _marked(function: F, strategy: Any) -> F:
    marked: Any = function
    _mark_code(marked.__code__, strategy)
    marked._torchdynamo_disable = True  # where dynamo would go into a call from a frame that it traces
    marked._torchdynamo_disable_msg = "an engine gathers parameters here"
    return function


def without_grad(function: F) -> F:
    """Run a function under `torch.no_grad()`, in a quarter of the time that its decorator takes.

    If `_set_grad_enabled` moves: what `torch.set_grad_enabled` calls.
    """

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    return cast(F, wrapped)


def count_as_parameter(tensor: Tensor) -> None:
    """Make `isinstance(tensor, nn.Parameter)` hold for a tensor of another class.

    If it moves: see `__instancecheck__` of the metaclass of nn.Parameter.
    """
    tensor._is_param = True


def set_local_tensor(dtensor: Tensor, other: Tensor) -> None:
    """Make `dtensor` hold what the `DTensor` `other` holds."""
    dtensor._local_tensor = other._local_tensor  # type: ignore[attr-defined]
    dtensor._spec = other._spec  # type: ignore[attr-defined]


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
    versions: dict[str, dict[str, Any]] | None = getattr(state, "_metadata", None)
    return {} if versions is None else versions


def unscale_and_check(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients of one dtype and device in place; set `found_inf` to 1.0 if any was not finite.

    The kernel of `torch.amp.GradScaler`. If it moves: see `GradScaler._unscale_grads_`.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
