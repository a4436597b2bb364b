"""Results that operators of DTensor remember from test to test, by private names of torch 2.13.

Runs inside a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import operator
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from lockstep.rank.torch_internals import group_members, process_groups

_c10d: Any = dist.distributed_c10d

DROP_EVERY = 100
"""Tests after which the results of DTensor's operators are dropped in any case."""
MAX_TENSORS = 10_000
"""Tensors, with 2 kB each, that operators got and returned whose results are kept for other meshes."""
# What makes torch know a group by its name, and forget it. If one moves: where functional collectives look
# the name up.
_REGISTRATIONS = ("_register_process_group", "_unregister_process_group", "_unregister_all_process_groups")
# What makes `ShardingPropagator` know how an operator is sharded. If one moves: what
# `torch.distributed.tensor.experimental.register_sharding` calls.
_RULES = ("register_sharding_prop_rule", "register_op_strategy", "register_single_dim_op_strategy")
# Where it has them by operator; torch 2.11 has two. If one moves: what the first of them writes to.
_RULES_BY_OPERATOR = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")

# What else of DTensor keeps meshes of tests, and so their groups and the threads of gloo. If one moves: what
# `gc.get_referrers` shows of a mesh after its test.
_HOLDING_MESHES = {
    "_redistribute": ("clear_redistribute_planner_cache", "_gen_transform_infos.cache_clear"),
    "_collective_utils": ("MeshTopoInfo.build_from_mesh.cache_clear",),
    "_sharding_prop": ("ShardingPropagator._propagate_tensor_meta_cached.cache_clear",),
}

# torch 2.11 and 2.12 count one reference too many to what describes the arguments of an operator
# (`_DTensor_OpSchema_recompute_comparison_key`): their meshes are never freed.
_KEEPS_MESHES = TorchVersion(torch.__version__) < "2.13"

# Arguments of operators besides tensors. With others, such as symbolic sizes of a compiler, nothing is kept.
_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


class DTensorResults:
    """The results that operators of DTensor remember, dropped where they may be of other groups.

    An operator remembers what it returned for equal arguments, and meshes over different groups of the same
    ranks are equal: it would answer with a mesh of another test, whose groups may be gone. To find a result
    again takes 1 to 3 ms, so they are kept while this process has the same groups, no two of them alike, and
    until a test registers how an operator is sharded. Nor are they kept for ever: torch has no limit to
    their number.
    """

    def __init__(self) -> None:
        self._is_outdated = self._awaits_rules = False
        self._num_tests = 0
        self._on_other_meshes = ResultsOnOtherMeshes()

    def install(self) -> None:
        """Drop the results whenever a group is made or ends, or an operator gets a rule."""
        for name in _REGISTRATIONS:
            setattr(_c10d, name, self._dropping(getattr(_c10d, name)))
        self._awaits_rules = True

    def begin_test(self) -> None:
        """Notice rules of operators from now on, where DTensor has been imported since."""
        if self._awaits_rules and (tensor := sys.modules.get("torch.distributed.tensor")):
            self._awaits_rules = False
            propagator = tensor.DTensor._op_dispatcher.sharding_propagator
            for name in _RULES:
                if register := getattr(type(propagator), name, None):  # torch 2.11 has two of them
                    setattr(type(propagator), name, self._dropping(register))
            self._on_other_meshes.install(propagator)

    def end_test(self) -> None:
        """Drop the results if the test has made groups, if two have the same ranks, and now and then."""
        self._num_tests += 1
        members = [ranks for _, ranks in group_members()]
        if self._is_outdated or len(set(members)) < len(members) or self._num_tests % DROP_EVERY == 0:
            self._drop()
        if self._is_outdated and _KEEPS_MESHES and "torch.distributed.tensor" in sys.modules:
            _take_ended_groups()
        self._is_outdated = False

    def _dropping(self, register: Callable[..., None]) -> Callable[..., None]:
        def drop_and_register(*args: Any, **options: Any) -> None:
            self._is_outdated = True
            self._drop()
            register(*args, **options)

        return drop_and_register

    def _drop(self) -> None:
        if tensor := sys.modules.get("torch.distributed.tensor"):
            # As torch.distributed.tensor.debug does, whose import takes 2 s. torch 2.12 has the first alone.
            with contextlib.suppress(AttributeError):
                tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
            getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
        for module, names in _HOLDING_MESHES.items():
            found: Any = sys.modules.get(f"torch.distributed.tensor.{module}")
            for name in names:
                with contextlib.suppress(AttributeError):  # of another version, or not imported
                    operator.attrgetter(name)(found)()


def _take_ended_groups() -> None:
    """Take from all meshes the groups that have ended, and so the threads that gloo has for each of them.

    Those are unknown to torch, and only meshes have them: what is out of sight for an adopted test, its guard
    still has. If it moves: where `DeviceMesh.get_group` looks a group up.
    """
    living = process_groups()
    # Not isinstance: a proxy may do much to tell its class.
    meshes = [each for each in gc.get_objects() if issubclass(type(each), DeviceMesh)]
    groups_of = [vars(mesh).get("_pg_registry", {}) for mesh in meshes]
    ours = {id(groups) for groups in groups_of}
    for groups in groups_of:
        for name in list(groups):
            group = groups[name]
            if group not in living and all(id(each) in ours for each in gc.get_referrers(group)):
                del groups[name]


class Kept(dict[Hashable, Any]):
    """Results of operators, up to so many tensors that these got and returned."""

    num_tensors = 0

    def keep(self, key: Hashable, value: Any, num_tensors: int) -> None:
        """Keep a value, in the place of all others if they would have more than MAX_TENSORS together."""
        if num_tensors > MAX_TENSORS:
            return
        if self.num_tensors + num_tensors > MAX_TENSORS:
            self.clear()
            self.num_tensors = 0
        self[key] = value
        self.num_tensors += num_tensors


class ResultsOnOtherMeshes:
    """Shardings of torch's own operators, kept for meshes over other groups of the same ranks.

    Each test makes a mesh, and finding the same again for it is most of what small tests with DTensors take:
    1 to 3 ms an operator. What is kept refers to no mesh: each result is made with those of the arguments.
    """

    def __init__(self) -> None:
        self._recipes = Kept()

    def install(self, propagator: Any) -> None:
        """Look up results here before a propagator finds them.

        If it moves: what `ShardingPropagator` calls for what is not in its cache.
        """
        find = getattr(type(propagator), "propagate_op_sharding_non_cached", None)
        cached = getattr(propagator, "propagate_op_sharding", None)
        is_traced = getattr(dist._functional_collectives, "_are_we_tracing", None)
        if find is None or cached is None or is_traced is None:
            return

        @functools.wraps(find)
        def recall(propagator: Any, op_schema: Any) -> Any:
            if is_traced():
                return find(propagator, op_schema)
            meshes: list[Any] = []
            try:
                arguments = _key(op_schema.args_schema, meshes), _key(op_schema.kwargs_schema, meshes)
                rules = rules_of(propagator, op_schema.op)
                places = _places(meshes)
                key = op_schema.op, rules, arguments, _key_of_all(meshes, places), *_key_of_now()
                recipe = self._recipes.get(key)
            except _UNKNOWN:
                return find(propagator, op_schema)
            if recipe is not None:
                return recipe(meshes)
            found = find(propagator, op_schema)
            with contextlib.suppress(*_UNKNOWN):
                recipe = _recipe(found, places)
                if recipe(meshes) == found:  # of another version of torch it might not be
                    self._recipes.keep(key, recipe, len(meshes) + _num_tensors(found.output_spec))
            return found

        setattr(type(propagator), find.__name__, recall)
        if make := getattr(type(propagator), "_propagate_tensor_meta_non_cached", None):
            type(propagator)._propagate_tensor_meta_non_cached = _remembering(make, is_traced)
        # The cache of the propagator holds the method that this replaces.
        propagator.propagate_op_sharding = type(cached)(propagator.propagate_op_sharding_non_cached)


def _remembering(make: Callable[..., Any], is_traced: Callable[[], bool]) -> Callable[..., Any]:
    """Return `make`, which runs an operator on fake tensors, keeping what it returns for equal ones.

    Where they lie does not matter for the shapes, strides and dtypes that it returns: neither placements nor
    meshes, but for the type of device.
    """
    kept = Kept()

    @functools.wraps(make)
    def remember(propagator: Any, op_schema: Any) -> Any:
        tensors: list[Any] = []
        key = None
        if not is_traced() and op_schema.op.namespace == "aten":  # others may be of a test
            with contextlib.suppress(*_UNKNOWN):
                given = op_schema.args_schema, op_schema.kwargs_schema
                wanted = op_schema.op, _whole_key(given, tensors), torch.get_default_dtype()
                if (found := kept.get(wanted)) is not None:
                    return found
                key = wanted  # it has a hash, as those of symbolic sizes have not
        found = make(propagator, op_schema)
        if key is not None:
            returned = len(found) if type(found) in (list, tuple) else 1
            kept.keep(key, found, len(tensors) + returned)
        return found

    return remember


def _whole_key(value: Any, tensors: list[Any]) -> Hashable:
    """Return what decides of an argument whose shards do not matter; what describes tensors is added."""
    if isinstance(value, _PLAIN):
        return _key(value, [])
    if isinstance(value, list | tuple):
        return type(value), *(_whole_key(each, tensors) for each in value)
    if isinstance(value, dict):
        return tuple((name, _whole_key(each, tensors)) for name, each in value.items())
    tensors.append(value)
    return _state(value)["tensor_meta"], value.mesh.device_type


def _num_tensors(spec: Any) -> int:
    """Return how many tensors an operator returns."""
    return sum(map(_num_tensors, spec)) if isinstance(spec, list | tuple) else 1


def rules_of(propagator: Any, op: Any) -> Hashable:
    """Return the functions of torch that say how an operator is sharded.

    For those that it decomposes the rules of others decide, and rules of tests may follow what tests change.
    """
    rules = [getattr(propagator, name, {}).get(op) for name in _RULES_BY_OPERATOR]
    functions = [getattr(rule, "func", rule) for rule in rules if rule is not None]
    are_torchs = [getattr(each, "__module__", "").startswith("torch.") for each in functions]
    if not all(are_torchs) or not functions or any(isinstance(rule, functools.partial) for rule in rules):
        raise NotKept
    return tuple(functions)


def _places(meshes: Sequence[Any]) -> dict[int, int]:
    """Return where each mesh comes first, by its id: others may be equal, over other groups."""
    places: dict[int, int] = {}
    for place, mesh in enumerate(meshes):
        places.setdefault(id(mesh), place)
    return places


def _key_of_all(meshes: Sequence[Any], places: Mapping[int, int]) -> Hashable:
    """Return what meshes of other groups of the same ranks have in common, and which of them are one mesh."""
    if not meshes:
        raise NotKept
    return tuple(places[id(mesh)] for mesh in meshes), *(_key_of(meshes[place]) for place in places.values())


def _key_of(mesh: Any) -> Hashable:
    """Return what decides of a mesh.

    If it moves: what `DeviceMesh.__eq__` compares. `mesh.mesh` would run operators.
    """
    place, ranks = mesh.get_coordinate(), (mesh._layout, mesh._flatten_rank_map)
    return mesh.device_type, mesh.mesh_dim_names, ranks, place if place is None else _key(tuple(place), [])


def _key_of_now() -> tuple[Hashable, ...]:
    """Return what decides besides arguments.

    If it moves: what `use_min_cost_redistribution_plan` sets.
    """
    planned = sys.modules["torch.distributed.tensor._redistribute"]._FORCE_MIN_COST_REDISTRIBUTION_PLAN
    return torch.get_default_dtype(), planned


class NotKept(Exception):
    """There is a value for which nothing is kept."""


_UNKNOWN = (NotKept, AttributeError, TypeError)  # the last two of another version of torch, or unhashable


def _key(value: Any, meshes: list[Any]) -> Hashable:
    """Return what decides of an argument, besides the mesh, which is added to `meshes`."""
    if isinstance(value, _PLAIN):
        return type(value), value.hex() if isinstance(value, float) else value  # 0.0 equals -0.0
    if isinstance(value, list | tuple):
        return type(value), *(_key(each, meshes) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each, meshes)) for name, each in value.items())
    if isinstance(value, _placement()):
        if not type(value).__module__.startswith("torch.") or hasattr(value, "mask_buffer"):
            raise NotKept  # the one of torch that has a state: it keeps a mask from operator to operator
        return type(value), value
    state = _state(value)
    meshes.append(value.mesh)
    return tuple((name, _key(each, meshes)) for name, each in state.items())


def _placement() -> type:
    return sys.modules["torch.distributed.tensor.placement_types"].Placement  # type: ignore[no-any-return]


def _state(value: Any) -> dict[str, Any]:
    """Return what the description of a DTensor has besides its mesh."""
    if type(value).__name__ != "DTensorSpec":
        raise NotKept
    return {name: each for name, each in vars(value).items() if name not in ("mesh", "_hash")}


_Recipe = Callable[[Sequence[Any]], Any]


def _recipe(value: Any, places: Mapping[int, int]) -> _Recipe:
    """Return what makes an equal value of other meshes in the same places, and refers to none."""
    if isinstance(value, _PLAIN):
        return lambda _: value
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        parts = [_recipe(each, places) for each in value]
        return lambda others: kind([part(others) for part in parts])
    if kind is dict:
        items = {name: _recipe(each, places) for name, each in value.items()}
        return lambda others: {name: part(others) for name, part in items.items()}
    if kind.__name__ == "OpSchema":
        given = [_recipe(each, places) for each in (value.args_schema, value.kwargs_schema)]
        op, info = value.op, value.schema_info
        return lambda others: kind(op, *(part(others) for part in given), info)
    if kind.__name__ == "OutputSharding":
        fields = {each.name: _recipe(getattr(value, each.name), places) for each in dataclasses.fields(kind)}
        return lambda others: kind(**{name: part(others) for name, part in fields.items()})
    state = _state(value)
    _key(value.placements, [])
    place = places.get(id(value.mesh))
    if place is None:
        raise NotKept

    def spec_of(others: Sequence[Any]) -> Any:
        spec = object.__new__(kind)
        vars(spec).update(state, mesh=others[place], _hash=None)
        return spec

    return spec_of
