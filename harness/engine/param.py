"""The parameters of one unit: where modules read them, and what is put there. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import is_lazy

_OWNER = "_lockstep_unit"
_RETIRED = "_lockstep_retired"


class _Claim(str):
    """Say which unit owns what carries this. Copies of that belong to none: they carry an empty claim."""

    def __deepcopy__(self, _: object) -> str:
        return ""

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()


@dataclass(frozen=True)
class ParamRef:
    """A place where a module reads a parameter or a buffer."""

    module: nn.Module
    name: str

    def read(self) -> object:
        return getattr(self.module, self.name, None)

    def put(self, value: Tensor) -> None:
        """Make the module read ``value``: registered if it is an nn.Parameter, a plain attribute if not.

        Goes through the module's own ``__setattr__`` if it has one: recurrent modules keep a second list.
        """
        plain = type(self.module).__setattr__ is nn.Module.__setattr__
        if plain and self.name in self.module._parameters and isinstance(value, nn.Parameter):
            self.module._parameters[self.name] = value
            return
        self.clear()
        setattr(self.module, self.name, value)

    def clear(self) -> None:
        self.module._parameters.pop(self.name, None)
        self.module.__dict__.pop(self.name, None)


@dataclass(frozen=True)
class Param:
    """One parameter of a unit. Tied parameters are one param with several refs.

    ``name`` is relative to the unit's module. ``parameter`` stays the same object for the whole life of the
    unit, so that an optimizer may be built before or after sharding.
    """

    name: str
    parameter: nn.Parameter
    refs: tuple[ParamRef, ...]
    shape: torch.Size

    @property
    def piece(self) -> Tensor:
        """What the parameter holds between steps: this rank's part."""
        return self.parameter.data

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the user sees, on this rank."""
        return self.parameter.grad

    def hold(self, piece: Tensor) -> None:
        """Let the parameter be ``piece`` from now on."""
        set_data(self.parameter, piece)

    def show_gradient(self, gradient: Tensor) -> None:
        """Let the user see ``gradient``, which is new and of the piece's shape."""
        attach_gradient(self.parameter, gradient)

    def exchanged(self, found: object) -> Param | None:
        """Return the param for what somebody put in the parameter's place; None if that cannot be."""
        return None

    def put(self, value: Tensor) -> None:
        for ref in self.refs:
            ref.put(value)

    def clear(self) -> None:
        for ref in self.refs:
            ref.clear()


def own_modules(
    root: nn.Module, skip: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) below and including ``root``, not entering modules that ``skip`` picks."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or skip(module):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk(prefix, root)


def children_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return ``modules`` in the order in which a model is built: children before parents, else as given."""
    given = dict.fromkeys(modules)
    seen, found = set[nn.Module](), list[nn.Module]()

    def visit(module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                visit(child)
            if module in given:
                found.append(module)

    for module in given:
        visit(module)
    return found


def collect(modules: Sequence[tuple[str, nn.Module]], ignored: Collection[nn.Parameter]) -> tuple[Param, ...]:
    """Return one param per distinct parameter that ``modules`` hold directly and that is not ``ignored``."""
    names: dict[nn.Parameter, str] = {}
    refs: dict[nn.Parameter, list[ParamRef]] = {}
    for module_name, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if is_lazy(parameter):
                raise ValueError(f"parameter {full_name!r} has no shape yet; run a forward before wrapping.")
            names.setdefault(parameter, full_name)
            refs.setdefault(parameter, []).append(ParamRef(module, name))
    return tuple(Param(name, p, tuple(refs[p]), p.shape) for p, name in names.items())


def check(params: Sequence[Param], unit: str, uniform_requires_grad: bool) -> None:
    """Raise ValueError for parameters that cannot lie in one flat tensor, with their names and the cure."""
    for param in params:
        _check_one(param, unit)
    _check_uniform(params, unit, "dtype", lambda p: p.dtype, "convert the module to one dtype first")
    _check_uniform(params, unit, "device", lambda p: p.device, "move the module to one device first")
    if uniform_requires_grad:
        cure = "pass use_orig_params=True, or wrap the frozen modules on their own"
        _check_uniform(params, unit, "requires_grad", lambda p: p.requires_grad, cure)


def mark_sharded(params: Iterable[Param], unit: str) -> None:
    """Mark parameters, and modules that hold them, as sharded by ``unit``: a second unit can say so."""
    for param in params:
        setattr(param.parameter, _OWNER, _Claim(f"{param.name} of {unit}"))
        for ref in param.refs:
            ref.module.__dict__[_OWNER] = _Claim(unit)


def invalidate(replaced: Iterable[Tensor], what: str) -> None:
    """Mark tensors that no optimizer should hold, since others get the gradients; messages say ``what``."""
    for tensor in replaced:
        setattr(tensor, _RETIRED, what)


def refuse_invalidated(optimized: Iterable[Tensor]) -> None:
    """Raise RuntimeError if an optimizer holds what was retired: it would never move."""
    for parameter in optimized:
        if what := getattr(parameter, _RETIRED, None):
            raise RuntimeError(
                f"the optimizer holds {what}, to which no gradient comes. Make it from the "
                "model's parameters() after sharding, and not between unshard and reshard."
            )


def refuse_sharded(modules: Iterable[tuple[str, nn.Module]], params: Iterable[Param], unit: str) -> None:
    """Raise ValueError for a module or parameter that another unit shards, with its name and the cure."""
    for name, module in modules:
        if owner := module.__dict__.get(_OWNER):
            place = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"{unit}: {place} is inside {owner} already; wrap a module once, inner modules before outer "
                "ones: put that unit in its place, or wrap one module that contains all its users."
            )
    for param in params:
        _refuse_claimed(param, unit)


def _refuse_claimed(param: Param, unit: str) -> None:
    if owner := getattr(param.parameter, _OWNER, None):
        raise ValueError(
            f"{unit}: parameter {param.name!r} is tied to {owner}, which shards it already. "
            "Wrap one module that contains both (or hand fully_shard or replicate a list of the two), and "
            "neither of the two on its own."
        )


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Let ``parameter`` be ``data``, the same object still, also where one of the two is on meta."""
    if parameter.is_meta == data.is_meta:
        parameter.data = data
        return
    # Assigning `.data` cannot change that.
    stand_in = nn.Parameter(data, parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    torch.utils.swap_tensors(parameter, stand_in)  # type: ignore[no-untyped-call]


def attach_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``parameter.grad``, also where shape, dtype or device differ from the parameter's.

    They differ on purpose: inside ``no_sync`` the gradient is unsharded, and with
    ``keep_low_precision_grads`` it has another dtype. torch checks them on assignment only.
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


def _check_one(param: Param, unit: str) -> None:
    parameter = param.parameter
    where = f"{unit}: parameter {param.name!r}"
    _refuse_claimed(param, unit)
    if type(parameter.data) is not Tensor:
        raise NotImplementedError(
            f"{where} is a {type(parameter.data).__name__}; a flat shard holds plain tensors only. "
            "Pass it in ignored_states (fully_shard, replicate: ignored_params)."
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"{where} has dtype {parameter.dtype}; only floating-point parameters are sharded. "
            "Pass it in ignored_states (fully_shard, replicate: ignored_params)."
        )


def _check_uniform(
    params: Sequence[Param], unit: str, what: str, read: Callable[[nn.Parameter], object], cure: str
) -> None:
    """Raise ValueError that names one parameter of each kind when ``read`` differs among ``params``."""
    examples: dict[object, str] = {}
    for param in params:
        examples.setdefault(read(param.parameter), param.name)
    if len(examples) > 1:
        found = ", ".join(f"{name!r} has {value}" for value, name in examples.items())
        raise ValueError(f"{unit}: the parameters of one unit must agree in {what}, but {found}; {cure}.")


@dataclass(frozen=True)
class DTensorPlacement:
    """Over which mesh, and how, `DTensor`s are placed."""

    mesh: DeviceMesh
    placements: Sequence[Placement]

    def tensor(self, local: Tensor, shape: torch.Size) -> DTensor:
        """Return the `DTensor` of ``shape`` of which this rank holds ``local``; shares its memory."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            _at_start(local), self.mesh, self.placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(frozen=True)
class DTensorParam(Param):
    """One parameter of a unit, visible as a `DTensor`."""

    placing: DTensorPlacement

    @staticmethod
    def of(param: Param, piece: Tensor, placing: DTensorPlacement) -> DTensorParam:
        """Return the param that shows ``piece`` in place of the plain parameter of ``param``."""
        parameter = nn.Parameter(placing.tensor(piece, param.shape), param.parameter.requires_grad)
        return DTensorParam(param.name, parameter, param.refs, param.shape, placing)

    @property
    def piece(self) -> Tensor:
        return _local(self.parameter)

    @property
    def gradient(self) -> Tensor | None:
        return None if self.parameter.grad is None else _local(self.parameter.grad)

    def hold(self, piece: Tensor) -> None:
        shown = self.placing.tensor(piece, self.shape)
        # A DTensor is a tensor that has dtype and device, and beside it the local one: both are exchanged.
        set_data(self.parameter, shown)
        self.parameter._local_tensor = shown._local_tensor  # type: ignore[attr-defined]
        self.parameter._spec = shown._spec  # type: ignore[attr-defined]

    def show_gradient(self, gradient: Tensor) -> None:
        # As `DTensorPlacement.tensor`, in an eighth of its time: done for each parameter in each step.
        spec = self.parameter._spec  # type: ignore[attr-defined]
        self.parameter.grad = DTensor(gradient, spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def exchanged(self, found: object) -> Param | None:
        """Take what `load_state_dict` with ``assign=True`` puts in the parameter's place."""
        if not (isinstance(found, DTensor) and isinstance(found, nn.Parameter)):
            return None
        fits = found.shape == self.shape and tuple(found.placements) == tuple(self.placing.placements)
        return replace(self, parameter=found) if fits else None

    def copy(self) -> DTensorParam:
        """Return an param for the same modules with a parameter of its own, over the same mesh."""
        return DTensorParam.of(self, self.piece.clone(), self.placing)


def _at_start(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with a storage that begins where it does; shares its memory.

    torch 2.13 cannot save a `DTensor` whose local tensor lies further on in its storage.
    """
    if tensor.is_meta or tensor.storage_offset() == 0:
        return tensor
    first = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[first : first + tensor.numel() * tensor.itemsize]
    return tensor.new_empty(0).set_(storage, 0, tensor.shape, tensor.stride())


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor  # what `to_local` returns under no_grad


INNER = "_sharded_module"
"""Where a wrapper holds the module that it wraps."""
FLAT = "flat_param"
"""What a wrapper calls the flat parameter of its group, and a local state dict this rank's shard."""


def clean_name(name: str) -> str:
    """Return ``name`` as it is in the unsharded model."""
    return ".".join(part for part in name.split(".") if part != INNER)


def joined(prefix: str, name: str) -> str:
    """Return ``name`` below the module that is called ``prefix``, ``""`` for the model itself."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
