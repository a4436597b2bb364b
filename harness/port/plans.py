"""Reads the classes of a file: which are converted, on how many ranks they run, which are left and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import libcst as cst

from lockstep.port.kinds import GROUP_OPTIONS, KINDS, LAUNCHER_METHODS, THREADED, LauncherKind
from lockstep.port.limits import NotPorted
from lockstep.port.source import (
    Source,
    attribute_of_self,
    find_all,
    is_docstring,
    lone_call,
    simple_statements,
)

PLAIN_BASES = {"object", "ABC", "abc.ABC"}


@dataclass
class ClassPlan:
    """A class that is derived from a known base, or a mixin of one.

    Attributes:
        node: the class as it is written.
        kind: kind of the base it comes from; None for a mixin.
        direct: whether that base is one of its own, not of another class of this file.
        bases: the classes of this file that it is derived from, in order.
        reason: why it is left as it is; "" if it is converted.
    """

    node: cst.ClassDef
    kind: LauncherKind | None = None
    direct: bool = False
    bases: list[ClassPlan] = field(default_factory=list)
    derived: list[ClassPlan] = field(default_factory=list)
    reason: str = ""

    @property
    def name(self) -> str:
        return self.node.name.value

    @cached_property
    def methods(self) -> dict[str, cst.FunctionDef]:
        return {item.name.value: item for item in self.node.body.body if isinstance(item, cst.FunctionDef)}

    @property
    def tests(self) -> list[cst.FunctionDef]:
        return [method for name, method in self.methods.items() if name.startswith("test")]

    @cached_property
    def assigned(self) -> dict[str, cst.BaseExpression]:
        """The names that the body of the class assigns, with values; those in `if` statements too."""
        found: dict[str, cst.BaseExpression] = {}
        for statement in simple_statements(self.node.body.body):
            match statement:
                case cst.Assign(targets=targets, value=value):
                    found.update({t.target.value: value for t in targets if isinstance(t.target, cst.Name)})
                case cst.AnnAssign(target=cst.Name(name), value=value) if value is not None:
                    found[name] = value
        return found

    @cached_property
    def members(self) -> frozenset[str]:
        """Names that this class gives to `self`."""
        targets = (
            attribute_of_self(target.target)
            for assignment in find_all(self.node, cst.Assign)
            for target in assignment.targets
        )
        annotated = (attribute_of_self(one.target) for one in find_all(self.node, cst.AnnAssign))
        return frozenset({*self.methods, *self.assigned, *targets, *annotated} - {""})

    def mro(self) -> Iterator[ClassPlan]:
        """Yield this class and those of this file that it is derived from, the nearest first."""
        yield self
        for base in self.bases:
            yield from base.mro()

    def family(self) -> list[ClassPlan]:
        """Return the classes of this file that inheritance connects with this one, itself included."""
        found: list[ClassPlan] = []
        waiting = [self]
        while waiting:
            plan = waiting.pop()
            if all(plan is not one for one in found):
                found.append(plan)
                waiting += [*plan.bases, *plan.derived]
        return found

    def has(self, name: str) -> bool:
        return any(name in plan.members for plan in self.mro())


def plan_classes(source: Source) -> dict[str, ClassPlan]:
    """Return the plans of the classes of a known kind at module level, and of their mixins, by name.

    Raises:
        NotPorted: a class is derived from itself.
    """
    plans = {node.name.value: ClassPlan(node) for node in _top_level_classes(source.tree)}
    strangers: dict[str, list[str]] = {}
    threaded: set[str] = set()
    for plan in plans.values():
        for base in plan.node.bases:
            name = source.code(base.value)
            known = _known_base(source, base.value)
            if name in plans and plans[name] is not plan:
                plan.bases.append(plans[name])
                plans[name].derived.append(plan)
            elif known is not None:
                plan.kind, plan.direct = known, True
            elif source.testing_name(base.value) in THREADED:
                threaded.add(plan.name)
            elif name not in PLAIN_BASES:
                strangers.setdefault(plan.name, []).append(name)
    _check_bases(plans)
    for plan in plans.values():
        plan.kind = next((one.kind for one in plan.mro() if one.kind), None)
        plan.reason = plan.reason or _own_reason(plan, strangers.get(plan.name, []))
        if not plan.reason and source.has_own_assert_equal:
            plan.reason = "the file has a function assert_equal of its own"
    chosen = {
        name: plan for name, plan in plans.items() if plan.kind or any(one.kind for one in plan.family())
    }
    for plan in plans.values():
        if any(one.name in threaded for one in plan.mro()) and plan.tests:
            plan.reason = "its ranks are threads of one process"
            chosen[plan.name] = plan
    for plan in chosen.values():
        _spread(plan)
    return chosen


def _check_bases(plans: dict[str, ClassPlan]) -> None:
    """Refuse classes that are derived from each other, as two of one name can be."""
    try:
        TopologicalSorter(
            {plan.name: [base.name for base in plan.bases] for plan in plans.values()}
        ).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise NotPorted(
            f"a class is derived from itself: {circle}; give each class a name of its own"
        ) from None


def classes_out_of_sight(source: Source, plans: dict[str, ClassPlan]) -> dict[cst.ClassDef, str]:
    """Return the classes of a known kind that have no plan, with the reason."""
    planned = {plan.node for plan in plans.values()}
    has_star = any(isinstance(one.names, cst.ImportStar) for one in find_all(source.tree, cst.ImportFrom))
    found = {}
    for node in find_all(source.tree, cst.ClassDef):
        if node in planned:
            continue
        for base in node.bases:
            name = source.code(base.value)
            if _known_base(source, base.value) is not None:
                found[node] = "it is not at module level, or another class has its name"
            elif has_star and name in KINDS and name not in {*plans, *source.imports}:
                found[node] = f"{name} comes from an import of `*`; import it by its name"
    return found


def _top_level_classes(tree: cst.Module) -> Iterator[cst.ClassDef]:
    for statement in tree.body:
        if isinstance(statement, cst.ClassDef):
            yield statement
        elif isinstance(statement, cst.If):
            yield from (item for item in statement.body.body if isinstance(item, cst.ClassDef))


def _known_base(source: Source, node: cst.BaseExpression) -> LauncherKind | None:
    kind = KINDS.get(source.testing_name(node))
    if kind is not None and not kind.is_deepspeed:
        return kind
    # As DeepSpeed's own tests import it. A copy may know nothing of DeepSpeed, which what is written imports.
    is_deepspeeds = f".{source.origin(node)}".endswith(".unit.common.DistributedTest")
    return KINDS["DistributedTest"] if is_deepspeeds else None


def _own_reason(plan: ClassPlan, strangers: list[str]) -> str:
    """Return why a class of a known kind, or its mixin, cannot be converted; "" if nothing is in the way."""
    if strangers:
        return f"it is derived from {strangers[0]}, which this file does not define"
    if plan.node.keywords:
        return "it has a metaclass or other keywords"
    launcher = LAUNCHER_METHODS - (
        {"_init_pg"} if plan.kind is None or not plan.kind.is_continuous else set()
    )
    if own := sorted(launcher & plan.methods.keys()):
        return f"its {own[0]} is part of a launcher of its own"
    if plan.kind is None:
        return ""
    if plan.kind.is_continuous and GROUP_OPTIONS & plan.members:
        return "it sets options of its process group"
    if plan.kind.is_deepspeed and _literal(plan, "init_distributed") == "False":
        return "init_distributed = False: it makes its process groups itself"
    if "special_return_code_checks" in _words(plan.node):
        return "it expects ranks to end with certain exit codes"
    if plan.tests and not plan.kind.spawns and not any(_spawns(one) for one in plan.mro()):
        return "its setUp does not start the processes by _spawn_processes"
    return ""


def _literal(plan: ClassPlan, name: str) -> str:
    value = next((one.assigned[name] for one in plan.mro() if name in one.assigned), None)
    return value.value if isinstance(value, cst.Name) else ""


def _words(node: cst.CSTNode) -> set[str]:
    return {name.value for name in find_all(node, cst.Name)}


def _spawns(plan: ClassPlan) -> bool:
    """Return whether the class's own setUp starts the processes, in its first block."""
    setup = plan.methods.get("setUp")
    calls = [lone_call(item) for item in setup.body.body] if setup is not None else []
    return any(call is not None and attribute_of_self(call.func) == "_spawn_processes" for call in calls)


def _spread(plan: ClassPlan) -> None:
    """Leave the whole family of a class that is left: half of it would lack the other half's base."""
    if plan.reason:
        for one in plan.family():
            one.reason = one.reason or f"{plan.name}, of the same family, is left: {plan.reason}"


@dataclass(frozen=True)
class Size:
    """The world sizes of a class: the arguments of the mark, and a question if they depend on the machine."""

    arguments: str
    question: str = ""


def size_of(plan: ClassPlan, source: Source, ranks: int) -> Size:
    """Return the world size of a class of a kind, its own or that of its nearest base.

    Args:
        ranks: what to write where the size depends on GPUs.
    """
    assert plan.kind is not None
    for one in plan.mro():
        defined = one.assigned.get("world_size") or _returned(one.methods.get("world_size"))
        if defined is not None and "world_size" in one.assigned and _is_conditional(one):
            return Size(
                str(ranks), "world size: it depends on the conditions in the class; say how many ranks"
            )
        if defined is not None:
            arguments = _constant_size(defined, source)
            if not arguments and isinstance(defined, cst.Name) and defined.value in source.constants:
                name = defined.value
                return Size(name, f"world size: {name} depends on the machine; say how many ranks")
            was = " ".join(source.code(defined).split())
            question = f"world size: it was {was}; say how many ranks"
            return Size(arguments) if arguments else Size(str(ranks), question)
        if "world_size" in one.methods:
            return Size(str(ranks), "world size: its property computes it; say how many ranks")
    if plan.kind.size is None:
        return Size(str(ranks), f"world size: {plan.kind.asked}; say how many")
    asked = f"world size: {plan.kind.asked}; say how many" if plan.kind.asked else ""
    return Size(str(plan.kind.size), asked)


def _is_conditional(plan: ClassPlan) -> bool:
    direct = [item for item in plan.node.body.body if isinstance(item, cst.SimpleStatementLine)]
    targets = [one.target for statement in direct for one in find_all(statement, cst.AssignTarget)]
    targets += [one.target for statement in direct for one in find_all(statement, cst.AnnAssign)]
    return not any(isinstance(target, cst.Name) and target.value == "world_size" for target in targets)


def _returned(method: cst.FunctionDef | None) -> cst.BaseExpression | None:
    """Return what a method of one `return` statement returns."""
    body = [item for item in method.body.body if not is_docstring(item)] if method is not None else []
    match body:
        case [cst.SimpleStatementLine(body=[cst.Return(value=value)])]:
            return value
    return None


def _constant_size(node: cst.BaseExpression, source: Source) -> str:
    """Return the arguments of the mark for an expression that does not depend on the machine, else ""."""
    match node:
        case cst.Integer(value=value):
            return value
        case cst.List(elements=elements) | cst.Tuple(elements=elements) if elements:
            sizes = [_constant_size(element.value, source) for element in elements]
            return ", ".join(sizes) if all(sizes) else ""
        case cst.Call(func=cst.Name("int"), args=[cst.Arg(value=value)]):
            return _constant_size(value, source)
        case cst.Name(value=name) if isinstance(source.constants.get(name), cst.Integer):
            return name
        case cst.Name() if source.testing_name(node) == "DEFAULT_WORLD_SIZE":  # but on ROCm
            return "4"
    return ""
