"""The local shard of one group's parameters, and how modules and the user see it. Runs on ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.api import ShardingStrategy
from harness.engine.config import Dtypes, Precision
from harness.engine.layout import FlatLayout, Layout
from harness.engine.mesh import MeshInfo
from harness.engine.param import Param, ParamRef, check, invalidate, mark_sharded, set_data


@dataclass(frozen=True)
class GroupSettings:
    """What the unit that owns a group decides for it.

    ``unit``: how error messages call it. ``offload_device``: where an offloaded group computes; None if
    shards live where they compute. ``poison``: fill freed and sent memory with NaN. ``layout``: how
    parameters lie in shards. ``registers_full``: modules register full parameters, and do not just read them.
    """

    unit: str
    strategy: ShardingStrategy
    precision: Precision
    use_orig_params: bool
    axes: MeshInfo
    offload_device: torch.device | None
    poison: bool
    layout: type[Layout] = FlatLayout
    registers_full: bool = False


def layout_of(params: Sequence[Param], settings: GroupSettings) -> Layout:
    return settings.layout(tuple(tuple(param.shape) for param in params), settings.axes.num_shards)


def cut(params: Sequence[Param], settings: GroupSettings) -> Tensor:
    """Return this rank's shard of the parameters' values as a new 1-D tensor."""
    layout = layout_of(params, settings)
    shard = params[0].parameter.detach().new_zeros(layout.shard_numel)
    for i, param in enumerate(params):
        piece = layout.piece(i, settings.axes.index)
        values = param.parameter.detach().reshape(-1)
        shard[piece.shard_start : piece.shard_stop] = values[piece.start : piece.stop]
    return shard.cpu() if settings.offload_device else shard


class LocalShard:
    """Hold ``flat``, the 1-D local shard: the one lasting copy of what this rank owns of ``params``.

    It is cut from the params' parameters unless it is given.

    The visible parameters are the originals, each showing its piece of ``flat`` (``use_orig_params``), or
    ``flat`` itself.
    """

    def __init__(
        self, params: Sequence[Param], settings: GroupSettings, flat: nn.Parameter | None = None
    ) -> None:
        self.params = tuple(params)
        self.settings = settings
        self.layout = layout_of(params, settings)
        self.pieces = tuple(self.layout.piece(i, settings.axes.index) for i in range(len(params)))
        if flat is None:
            check(params, settings.unit, uniform_requires_grad=not settings.use_orig_params)
            trainable = any(param.parameter.requires_grad for param in params)
            flat = nn.Parameter(cut(params, settings), requires_grad=trainable)
        self.flat = flat
        self._flat_ref: ParamRef | None = None
        self._views: tuple[Tensor, ...] = ()
        self._viewed: tuple[int, torch.dtype] | None = None
        mark_sharded(params, settings.unit)
        self._bind()

    @property
    def whole(self) -> bool:
        """Whether the one shard is everything: nothing is cut, and pieces keep their parameters' shapes."""
        return self.layout.num_shards == 1

    @property
    def original_dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def dtypes(self) -> Dtypes:
        """Those of a forward that would begin now."""
        return self.settings.precision.dtypes(self.original_dtype)

    @property
    def device(self) -> torch.device:
        """Where the group computes and communicates."""
        return self.settings.offload_device or self.flat.device

    @property
    def versions(self) -> tuple[int, ...]:
        """What changes whenever somebody changes the shard in place through what the user sees."""
        # An operation on a DTensor is counted by the DTensor, one on its local tensor by that.
        return tuple(param.parameter._version + param.piece._version for param in self.params)

    def is_trainable(self, param: Param) -> bool:
        return param.parameter.requires_grad if self.settings.use_orig_params else self.flat.requires_grad

    def register_flat(self, ref: ParamRef) -> None:
        """Let the user see ``flat`` as a parameter at ``ref`` whenever the shard is shown."""
        replaced = (param.parameter for param in self.params)
        invalidate(replaced, f"parameters of {self.settings.unit} as they were before sharding")
        self._flat_ref = ref
        ref.put(self.flat)

    def show(self) -> None:
        """Let modules see the shard: as their parameters, or as plain tensors beside ``flat``."""
        if self._flat_ref:
            self._flat_ref.put(self.flat)
        if self.settings.use_orig_params:
            for param in self.params:
                param.put(param.parameter)
        else:
            for param, view in self.views():
                param.put(view)

    def hide(self) -> None:
        """Take the parameters, and ``flat``, out of their modules."""
        if self._flat_ref:
            self._flat_ref.clear()
        for param in self.params:
            param.clear()

    def views(self) -> Iterator[tuple[Param, Tensor]]:
        """Return each param with its piece of the shard, in the shape that the layout gives it."""
        if self._viewed != (self.flat.data_ptr(), self.flat.dtype):
            index = self.settings.axes.index
            self._views = tuple(
                self.flat.data[piece.shard_start : piece.shard_stop].view(self.layout.piece_shape(i, index))
                for i, piece in enumerate(self.pieces)
            )
            self._viewed = (self.flat.data_ptr(), self.flat.dtype)
        return zip(self.params, self._views, strict=True)

    def gather(self, shard: Tensor) -> Tensor:
        """Return every rank's 1-D ``shard`` end to end, as a new tensor on the group's device."""
        shard = shard.to(self.device)
        if self.whole:
            return shard.clone()
        full = shard.new_empty(self.layout.padded_numel)
        collectives.gather(full, shard, self.settings.axes)
        return full

    def in_full(self, full: Tensor) -> list[Tensor]:
        """Return views of the 1-D ``full`` (padded numel), one per param, in the param's shape."""
        layout = self.layout
        return [
            full[start : start + numel].view(shape)
            for start, numel, shape in zip(layout.starts, layout.numels, layout.shapes, strict=True)
        ]

    def replace(self, flat: Tensor) -> None:
        """Hold ``flat`` (of the same shape) from now on."""
        if flat.shape != self.flat.shape:
            raise ValueError(
                f"{self.settings.unit}: a conversion must keep the shape {tuple(self.flat.shape)}."
            )
        set_data(self.flat, flat)
        self._bind()

    def reclaim(self) -> None:
        """Take over visible parameters whose ``.data`` the user replaced; refuse ones that were exchanged."""
        if self.settings.offload_device and self.flat.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"{self.settings.unit}: offload_params keeps shards on CPU, but they are on "
                f"{self.flat.device}; do not move the module after wrapping it."
            )
        if not self.settings.use_orig_params:
            return
        for index in range(len(self.params)):
            self._read_again(index)
        self._leave_meta()
        for index, (param, view) in enumerate(self.views()):
            if any(ref.read() is not param.parameter for ref in param.refs):
                raise RuntimeError(
                    f"{self.settings.unit}: parameter {param.name!r} was exchanged for another object after "
                    "wrapping; copy the values into it instead (into a wrapper's under summon_full_params)."
                )
            piece = param.piece
            if piece.data_ptr() != view.data_ptr() and not view.is_meta:
                self._take(index, piece, view)
                param.hold(view)

    def write_back(self) -> None:
        """Keep what this rank owns of the full parameters that modules hold now."""
        for index, (param, view) in enumerate(self.views()):
            value = param.refs[0].read()
            if not isinstance(value, Tensor) or value.shape != param.shape:
                raise ValueError(
                    f"{self.settings.unit}: parameter {param.name!r} must keep its shape "
                    f"{tuple(param.shape)} inside summon_full_params."
                )
            self._take(index, value.detach(), view)

    def _leave_meta(self) -> None:
        """Make memory for a shard on meta, when `load_state_dict` with ``assign=True`` gave all of it."""
        device = self.params[0].piece.device
        if self.flat.is_meta and not any(param.piece.is_meta for param in self.params):
            set_data(self.flat, torch.zeros_like(self.flat, device=device))

    def _read_again(self, index: int) -> None:
        """Take the parameter that the module of param number ``index`` has now, if it fits."""
        param = self.params[index]
        found = param.refs[0].read()
        if found is not param.parameter and (exchanged := param.exchanged(found)):
            twins = [param.exchanged(ref.read()) for ref in param.refs]
            # `load_state_dict` gives every name of a tied parameter an object of its own over one memory.
            if all(twin and twin.piece.data_ptr() == exchanged.piece.data_ptr() for twin in twins):
                exchanged.put(exchanged.parameter)
            self.params = (*self.params[:index], exchanged, *self.params[index + 1 :])

    def _bind(self) -> None:
        """Let the original parameters show ``flat``, which is new; visible or not, they hold nothing else."""
        for param, view in self.views():
            param.hold(view)
        self.show()

    def _take(self, index: int, value: Tensor, view: Tensor) -> None:
        """Copy ``value``, a full parameter or this rank's piece of it, into the shard's ``view``."""
        param, piece = self.params[index], self.pieces[index]
        if value.shape == param.shape:
            view.view(-1).copy_(value.reshape(-1)[piece.start : piece.stop])
        elif value.shape == view.shape:
            view.copy_(value)
        else:
            raise ValueError(
                f"{self.settings.unit}: parameter {param.name!r} was given the shape {tuple(value.shape)}; "
                f"expected {tuple(param.shape)} in full or {tuple(view.shape)} for this rank's shard."
            )
