"""The parameters of one unit, as modules and the user see them, and the local shard. Runs on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.engine import collectives
from lockstep.engine.config import UnitConfig
from lockstep.engine.guard import Guard, stand_in
from lockstep.engine.layout import FlatLayout, Layout, RowLayout
from lockstep.engine.marks import OWNER, Owner, invalidate
from lockstep.engine.torch_internals import count_as_parameter, local_tensor

INNER = "_sharded_module"
"""The attribute of a wrapper that holds the module it wraps."""
FLAT = "flat_param"
"""The name of a group's flat parameter in its wrapper, and of this rank's shard in a local state dict."""


@dataclass(frozen=True)
class ParamRef:
    """A place where a module reads a parameter or a buffer."""

    module: nn.Module
    name: str

    def read(self) -> object:
        module, name = self.module, self.name
        found = module.__dict__.get(name, module._parameters.get(name))  # as getattr finds it, but quicker
        return getattr(module, name, None) if found is None else found

    def put(self, value: Tensor) -> None:
        """Make the module read `value`: registered if it is an nn.Parameter, a plain attribute if not."""
        module, name = self.module, self.name
        registered = module._parameters
        if registered.get(name) is value:
            return
        is_flat = name == FLAT and INNER in module._modules  # that of a wrapper
        if is_flat or type(module).__setattr__ is nn.Module.__setattr__:
            # As that does, in a tenth of its time: each parameter is exchanged four times in a step.
            if isinstance(value, nn.Parameter):
                module.__dict__.pop(name, None)
                registered[name] = value
            else:
                registered.pop(name, None)
                module.__dict__[name] = value
            return
        self.clear()
        # Recurrent modules have a `__setattr__` that keeps a second list of parameters.
        setattr(module, name, value)

    def clear(self) -> None:
        self.module._parameters.pop(self.name, None)
        self.module.__dict__.pop(self.name, None)


@dataclass(frozen=True)
class Param:
    """One parameter of a unit. Tied parameters are one `Param` with several refs.

    Attributes:
        name: Relative to the unit's module.
        parameter: The same object for the whole life of the unit, so that an optimizer may be built before or
            after sharding.
        shape: That of the unsharded parameter on this rank.
    """

    name: str
    parameter: nn.Parameter
    refs: tuple[ParamRef, ...]
    shape: torch.Size

    @property
    def dim(self) -> int:
        """The dim that is sharded, where the layout has rows."""
        raise NotImplementedError

    @property
    def piece(self) -> Tensor:
        """This rank's part, which the parameter holds between steps."""
        return self.parameter.data

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the user sees, on this rank."""
        raise NotImplementedError

    def hold(self, piece: Tensor) -> None:
        set_data(self.parameter, piece)

    def set_gradient(self, gradient: Tensor) -> None:
        """Show `gradient`, which is new and of the piece's shape, to the user."""
        raise NotImplementedError

    def showing(self, piece: Tensor) -> Param:
        """Return a `Param` for the same modules with a parameter of its own, which holds `piece`."""
        raise NotImplementedError

    def leaf(self, unsharded: Tensor, trainable: bool) -> Tensor:
        """Return `unsharded`, with which modules compute: a plain tensor that counts as a parameter."""
        count_as_parameter(unsharded)
        return unsharded

    def exchanged(self, found: object) -> Param | None:
        """Return the `Param` of what replaced the parameter in its module; None if it does not fit."""
        return None

    def put(self, value: Tensor) -> None:
        for ref in self.refs:
            ref.put(value)

    def clear(self) -> None:
        for ref in self.refs:
            ref.clear()


def mark_sharded(params: Iterable[Param], unit: str) -> None:
    """Mark parameters, and the modules that hold them, as sharded by `unit`: a second unit refuses them."""
    for param in params:
        setattr(param.parameter, OWNER, Owner(f"{param.name} of {unit}"))
        for ref in param.refs:
            ref.module.__dict__[OWNER] = Owner(unit)


class LocalShard:
    """This rank's shard of a unit's parameters: `flat`, 1-D, the only copy that outlasts a step.

    The visible parameters are the originals, each a view of its piece of `flat` (`use_orig_params`), or
    `flat` itself.

    Attributes:
        guarded: Modules hold stand-ins in place of the shard, as a forward of the root is going on.
        retrained: There may be parameters that were frozen, or others, when someone last looked.
    """

    def __init__(self, params: Sequence[Param], config: UnitConfig, flat: nn.Parameter) -> None:
        self.params = tuple(params)
        self.config = config
        self.layout = layout_of(params, config)
        self.pieces = self.layout.pieces(config.mesh.index)
        self.spans = tuple(slice(piece.shard_start, piece.shard_stop) for piece in self.pieces)
        self.flat = flat
        self.guarded, self.retrained = False, True
        self._flat_ref: ParamRef | None = None
        # What modules hold now, as the object that stands for all of it; None if others may put something.
        self._shown: object = None
        self._guards: tuple[Guard, ...] = ()
        self._tracked: tuple[Tensor, ...] = ()
        self._tracked_as: object = None
        self._views: tuple[Tensor, ...] = ()
        self._viewed: tuple[int, torch.dtype] | None = None
        mark_sharded(params, config.name)
        self._bind()

    @staticmethod
    def of(params: Sequence[Param], config: UnitConfig) -> LocalShard:
        """Return this rank's shard of the values that `params` hold in full."""
        trainable = any(param.parameter.requires_grad for param in params)
        layout, index = layout_of(params, config), config.mesh.index
        unsharded = [local_of(param.parameter) for param in params]
        values = unsharded[0].new_zeros(layout.shard_numel)
        for i, (whole, piece) in enumerate(zip(unsharded, layout.pieces(index), strict=True)):
            values[piece.shard_start : piece.shard_stop] = layout.select(i, index, whole).reshape(-1)
        offloads = config.offload and not values.is_meta
        flat = nn.Parameter(values.cpu() if offloads else values, trainable)
        if config.dtensor:
            mark_sharded(params, config.name)  # the plain parameters: another unit that shares one can refuse
            invalidate(
                (p.parameter for p in params), f"parameters of {config.name} as they were before sharding"
            )
            views = _views(flat.data, layout, index)
            params = [param.showing(view) for param, view in zip(params, views, strict=True)]
        return LocalShard(params, config, flat)

    @cached_property
    def whole(self) -> bool:
        """Whether there is one shard, which has everything in the parameters' own shapes."""
        return self.layout.num_shards == 1

    @property
    def device(self) -> torch.device:
        """Where the group computes and communicates."""
        return (self.config.device if self.config.offload else None) or self.flat.device

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers that change with every in-place change of the shard through what the user sees."""
        # An operation on a DTensor is counted by the DTensor, one on its local tensor by that.
        return tuple(param.parameter._version + param.piece._version for param in self.params)

    @property
    def all_trainable(self) -> bool:
        return all(map(self.is_trainable, self.params))

    def is_trainable(self, param: Param) -> bool:
        return param.parameter.requires_grad if self.config.use_orig_params else self.flat.requires_grad

    def register_flat(self, ref: ParamRef) -> None:
        """Show `flat` as a parameter at `ref` whenever the shard is shown."""
        replaced = (param.parameter for param in self.params)
        invalidate(replaced, f"parameters of {self.config.name} as they were before sharding")
        self._flat_ref = ref
        ref.put(self.flat)

    def show(self) -> None:
        """Show modules the shard: as their parameters, or as views of `flat`; stand-ins while `guarded`."""
        if self.guarded:
            self._guards = self._guards or tuple(map(self._stand_in, self.params))
            self.show_unsharded(self._guards)
            return
        if self._flat_ref:
            self._flat_ref.put(self.flat)
        if not self.config.use_orig_params:
            self._put(self.tracked_views())
        elif self._shown is not self.params:
            for param in self.params:
                param.put(param.parameter)
            self._shown = self.params

    def leaves_in(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """Return one leaf per parameter that lies in `buffer` (padded numel), whose memory must be allocated.

        They are parameters: what a forward computes from `self.parameters()` must not lack them.
        """
        self.retrained = True
        # Tensors made in inference mode could never be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            # `.data` gives each leaf a version counter of its own: filling the buffer for backward must not
            # look like an in-place change of what autograd saved in forward.
            views = (view.data for view in self.layout.views(buffer))
            return tuple(p.leaf(v, self.is_trainable(p)) for p, v in zip(self.params, views, strict=True))

    def show_unsharded(self, leaves: Sequence[Tensor]) -> None:
        """Show modules one of `leaves` per parameter, with gradients where the user wants them."""
        if self._flat_ref:
            self._flat_ref.clear()  # it would be there a second time, as another parameter
        if self._shown is not leaves:
            for param, leaf in zip(self.params, leaves, strict=True):
                if leaf.requires_grad != (trainable := self.is_trainable(param)):
                    leaf.requires_grad = trainable  # requires_grad_ would refuse it inside of torch.func
                    self.retrained = True
            self._put(leaves)

    def show_original(self, full: Tensor, gradients: Sequence[Tensor | None] | None) -> None:
        """Register full original parameters that lie in `full`, with `gradients` if given."""
        self.hide()
        for i, (param, view) in enumerate(zip(self.params, self.layout.views(full), strict=True)):
            original = nn.Parameter(view, requires_grad=self.is_trainable(param))
            attach_gradient(original, gradients[i] if gradients else None)
            param.put(original)

    def is_shown_by(self, module: nn.Module) -> bool:
        """Return whether `module` has what is shown, and not what `functional_call` puts there for a call."""
        shown: Any = [param.parameter for param in self.params] if self._shown is self.params else self._shown
        return shown is not None and all(
            ref.read() is value
            for param, value in zip(self.params, shown, strict=True)
            for ref in param.refs
            if ref.module is module
        )

    def hide(self) -> None:
        self._shown = None
        if self._flat_ref:
            self._flat_ref.clear()
        for param in self.params:
            param.clear()

    def views(self) -> Iterator[tuple[Param, Tensor]]:
        """Return each parameter with its piece of the shard, in the shape that the layout gives it."""
        key = (self.flat.data_ptr(), self.flat.dtype)
        if self._viewed != key:
            self._views = _views(self.flat.data, self.layout, self.config.mesh.index)
            self._viewed = key
        return zip(self.params, self._views, strict=True)

    def tracked_views(self) -> tuple[Tensor, ...]:
        """Return a view of `flat` for each parameter, through which gradients come to `flat`."""
        key = (self.flat.data_ptr(), self.flat.dtype, self.flat.requires_grad)
        if self._tracked_as != key:
            # Tensors made in inference mode could never be saved for a backward.
            with torch.inference_mode(False), torch.enable_grad():
                self._tracked = _views(self.flat, self.layout, self.config.mesh.index)
            self._tracked_as = key
        return self._tracked

    def gather(self, shard: Tensor) -> Tensor:
        """Return every rank's 1-D `shard` end to end, as a new tensor on the group's device."""
        shard = shard.to(self.device)
        axis = self.config.mesh.shard
        if axis is None:
            return shard.clone()
        return collectives.start_gather(shard.new_empty(self.layout.padded_numel), shard, axis)()

    def replace(self, flat: Tensor) -> None:
        """Hold `flat`, of the same shape, in place of the current values."""
        if (shape := self.flat.shape) != flat.shape:
            raise ValueError(f"{self.config.name}: a conversion must keep the shape {tuple(shape)}.")
        # Views of the values before would hold memory, and the node of autograd that exchanging refuses.
        self._tracked, self._tracked_as = (), None
        set_data(self.flat, flat)
        self._bind()

    def reclaim(self) -> None:
        """Copy in visible parameters whose `.data` the user replaced; refuse ones that were exchanged."""
        if self.config.offload and self.flat.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"{self.config.name}: offload_params keeps shards on CPU, but they are on "
                f"{self.flat.device}; do not move the module after wrapping it."
            )
        if not self.config.use_orig_params or self._shown is not self.params:
            return
        params = tuple(map(_current, self.params))
        if any(new is not old for new, old in zip(params, self.params, strict=True)):
            self.params = self._shown = params
            self.retrained = True
        if self.flat.is_meta and not any(param.piece.is_meta for param in self.params):
            # `load_state_dict` with assign=True gave values to all parameters.
            set_data(self.flat, torch.zeros_like(self.flat, device=self.params[0].piece.device))
        for index, (param, view) in enumerate(self.views()):
            if any(ref.read() is not param.parameter for ref in param.refs):
                raise RuntimeError(
                    f"{self.config.name}: parameter {param.name!r} was exchanged for another object after "
                    "wrapping; copy the values into it instead (into a wrapper's under summon_full_params)."
                )
            piece = param.piece
            if piece.data_ptr() != view.data_ptr() and not view.is_meta:
                self._copy_into(view, index, piece)
                param.hold(view)

    def write_back(self) -> None:
        """Copy in this rank's part of the full parameters that modules hold."""
        for index, (param, view) in enumerate(self.views()):
            value = param.refs[0].read()
            if not isinstance(value, Tensor) or value.shape != param.shape:
                raise ValueError(
                    f"{self.config.name}: parameter {param.name!r} must keep its shape "
                    f"{tuple(param.shape)} inside summon_full_params."
                )
            self._copy_into(view, index, value.detach())

    def _bind(self) -> None:
        """Make the original parameters views of `flat`, which is new; they hold nothing else, seen or not."""
        for param, view in self.views():
            param.hold(view)
        self._guards, self._shown, self.retrained = (), None, True
        self.show()

    def _put(self, values: Sequence[Tensor]) -> None:
        if self._shown is not values:
            for param, value in zip(self.params, values, strict=True):
                param.put(value)
            self._shown = values

    def _stand_in(self, param: Param) -> Guard:
        whole = torch.empty((), dtype=self.flat.dtype, device=self.device).expand(param.shape)
        self.retrained = True
        guard = stand_in(whole, self.is_trainable(param))
        guard.unit, guard.holder, guard.name_there = (
            self.config.name,
            param.refs[0].module,
            param.refs[0].name,
        )
        return guard

    def _copy_into(self, view: Tensor, index: int, value: Tensor) -> None:
        """Copy `value`, a full parameter or this rank's piece of it, into the shard's `view`."""
        param = self.params[index]
        if value.shape == param.shape:
            mine = self.layout.select(index, self.config.mesh.index, value)
            view.view(-1).copy_(mine.reshape(-1))
        elif value.shape == view.shape:
            view.copy_(value)
        else:
            raise ValueError(
                f"{self.config.name}: parameter {param.name!r} was given the shape {tuple(value.shape)}; "
                f"expected {tuple(param.shape)} in full or {tuple(view.shape)} for this rank's shard."
            )


def _current(param: Param) -> Param:
    """Return the `Param` of what the module of `param` has in its place now, if it fits."""
    found = param.refs[0].read()
    if found is param.parameter or not (exchanged := param.exchanged(found)):
        return param
    twins = [param.exchanged(ref.read()) for ref in param.refs]
    # `load_state_dict` gives every name of a tied parameter an object of its own over one memory.
    if all(twin and twin.piece.data_ptr() == exchanged.piece.data_ptr() for twin in twins):
        exchanged.put(exchanged.parameter)
    return exchanged


def layout_of(params: Sequence[Param], config: UnitConfig) -> Layout:
    """Return the layout of `params`, the same object for units that are alike."""
    shapes, num_shards = tuple(tuple(param.shape) for param in params), config.mesh.num_shards
    if not config.dtensor:
        return _layout(FlatLayout, shapes, num_shards)
    return _layout(RowLayout, shapes, num_shards, tuple(param.dim for param in params))


@lru_cache(maxsize=1024)
def _layout(kind: Callable[..., Layout], *arguments: Any) -> Layout:
    return kind(*arguments)


def local_of(parameter: nn.Parameter) -> Tensor:
    """Return what this rank has of a parameter that no unit shards yet."""
    return local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.detach()


def _views(flat: Tensor, layout: Layout, index: int) -> tuple[Tensor, ...]:
    """Return the pieces of shard number `index`, which lie in the 1-D `flat`, in their shapes."""
    places = zip(layout.pieces(index), layout.piece_shapes(index), strict=True)
    return tuple(flat[piece.shard_start : piece.shard_stop].view(shape) for piece, shape in places)


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Make `data` the memory of `parameter`, the same object still, also where one of the two is on meta."""
    if parameter.is_meta == data.is_meta:
        parameter.data = data
        return
    # Assigning `.data` cannot change that.
    stand_in = nn.Parameter(data, parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    torch.utils.swap_tensors(parameter, stand_in)  # type: ignore[no-untyped-call]


def attach_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set `parameter.grad`, also where shape, dtype or device differ from the parameter's.

    They differ on purpose: inside `no_sync` the gradient is unsharded, and with `keep_low_precision_grads` it
    has another dtype. torch checks them on assignment only.
    """
    data = parameter.data
    if gradient is not None and (gradient.shape, gradient.dtype, gradient.device) != (
        data.shape,
        data.dtype,
        data.device,
    ):
        parameter.grad = None
        parameter.data = gradient
        parameter.grad = gradient
        parameter.data = data
    else:
        parameter.grad = gradient


def joined(prefix: str, name: str) -> str:
    """Return `name` below the module that is called `prefix`, `""` for the model itself."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
