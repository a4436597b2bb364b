"""Finds the statements that make and end the test's own process group, which the rank's own replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from lockstep.port.asserts import NotConverted
from lockstep.port.plans import ClassPlan
from lockstep.port.source import (
    Source,
    attribute_of_self,
    blocks_of,
    find_all,
    is_docstring,
    lone_call,
)

_INIT_KEYWORDS = {"backend", "init_method", "world_size", "rank", "store"}


@dataclass
class MethodGroups:
    """The use that a method makes of process groups.

    Attributes:
        dropped: statements that the rank's own group makes superfluous.
        backends: the backends that it asks for, as code; "" for the default.
        problems: statements about groups that stay, with the reason.
    """

    dropped: list[cst.CSTNode] = field(default_factory=list)
    backends: set[str] = field(default_factory=set)
    problems: list[tuple[cst.CSTNode, str]] = field(default_factory=list)

    def is_dropped(self, node: cst.CSTNode) -> bool:
        return any(node is one for one in self.dropped)

    def problem(self, node: cst.CSTNode) -> str:
        return next((reason for one, reason in self.problems if one is node), "")


@dataclass(frozen=True)
class FamilyGroups:
    """The use that related classes make of process groups, and the methods that do nothing else."""

    methods: dict[tuple[str, str], MethodGroups]
    emptied: frozenset[str]

    def of(self, plan: ClassPlan, method: str) -> MethodGroups:
        return self.methods[plan.name, method]

    def backends(self, plan: ClassPlan, method: str) -> set[str]:
        """Return the backends that a method asks for, itself or through methods of its class."""
        found: set[str] = set()
        seen: set[str] = set()
        waiting = [method]
        while waiting:
            name = waiting.pop()
            owner = next((one for one in plan.mro() if name in one.methods), None)
            if name in seen or owner is None:
                continue
            seen.add(name)
            found |= self.of(owner, name).backends
            waiting += [attribute_of_self(node) for node in find_all(owner.methods[name], cst.Attribute)]
        return found


def scan_family(family: Sequence[ClassPlan], source: Source) -> FamilyGroups:
    """Read the methods of related classes, and find the helpers that do nothing but join a group."""
    emptied: frozenset[str] = frozenset()
    while True:
        methods = {
            (plan.name, name): _Scan(plan, source, emptied).read(method)
            for plan in family
            for name, method in plan.methods.items()
        }
        found = frozenset(
            name
            for plan in family
            for name in plan.methods
            if _is_emptied(name, family, methods) and _is_only_called(name, source)
        )
        if found == emptied:
            return FamilyGroups(methods, emptied)
        emptied = found


def _is_emptied(name: str, family: Sequence[ClassPlan], methods: dict[tuple[str, str], MethodGroups]) -> bool:
    """Return whether all methods of a name, not tests, consist of dropped statements."""
    if name.startswith("test") or name in ("setUp", "tearDown", "setUpClass", "tearDownClass"):
        return False
    for plan in family:
        method = plan.methods.get(name)
        if method is None:
            continue
        body = [item for item in method.body.body if not is_docstring(item)]
        groups = methods[plan.name, name]
        if method.decorators or not body or not all(groups.is_dropped(item) for item in body):
            return False
    return True


def _is_only_called(name: str, source: Source) -> bool:
    """Return whether every mention of a method in the file is a call of `self`, as a statement."""
    mentions = [node for node in find_all(source.tree, cst.Attribute) if node.attr.value == name]
    alone = [call for call in source.lone_calls if attribute_of_self(call.func) == name]
    return len(mentions) == len(alone)


def is_raises(node: cst.BaseExpression) -> bool:
    """Return whether an expression is a call of `self.assertRaises` or `self.assertRaisesRegex`."""
    return isinstance(node, cst.Call) and attribute_of_self(node.func).startswith("assertRaises")


class _Scan:
    def __init__(self, plan: ClassPlan, source: Source, emptied: frozenset[str]) -> None:
        self.plan, self.source, self.emptied = plan, source, emptied
        self.groups = MethodGroups()

    def read(self, method: cst.FunctionDef) -> MethodGroups:
        stores = self._stores(method)
        lines = list(find_all(method, cst.SimpleStatementLine))
        expected = [
            line
            for block in find_all(method, cst.With)
            if any(is_raises(item.item) for item in block.items)
            for line in find_all(block.body, cst.SimpleStatementLine)
        ]
        for line in lines:
            call = lone_call(line)
            if call is not None:
                self._read_call(line, call, stores)
            if self.groups.is_dropped(line) and any(line is one for one in expected):
                self.groups.dropped.remove(line)
                self.groups.problems.append((line, "a process group that is expected to fail"))
        if len(self.groups.backends) > 1:  # the rank's own group can be one of them at most
            self.groups.problems += [(line, "one of several process groups") for line in self.groups.dropped]
            self.groups.dropped = []
        for name, line in stores.items():
            inside = [node for one in self.groups.dropped for node in find_all(one, cst.Name)]
            uses = [node for node in find_all(method, cst.Name) if node.value == name]
            if len(uses) - 1 == sum(node.value == name for node in inside):
                self.groups.dropped.append(line)
        for last in _last_statements(method.body.body) if method.name.value.startswith("test") else ():
            call = lone_call(last)
            if call is not None and self._is_destroy(call):
                self.groups.dropped.append(last)
        for line in lines:
            call = lone_call(line)
            if call is not None and self._is_destroy(call) and not self.groups.is_dropped(line):
                self.groups.problems.append((line, "the group ends here; the rank's own group goes on"))
        return self.groups

    def _stores(self, method: cst.FunctionDef) -> dict[str, cst.SimpleStatementLine]:
        """Return the names that are bound to a store in the test's own file, with the statements."""
        found = {}
        for line in find_all(method, cst.SimpleStatementLine):
            match line.body:
                case [cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))], value=value)]:
                    if self._is_store(value):
                        found[name] = line
        return found

    def _is_store(self, node: cst.BaseExpression) -> bool:
        match node:
            case cst.Call(func=func, args=[cst.Arg(value=file), *_]):
                is_file_store = self.source.distributed_name(func) == "FileStore"
                return is_file_store and attribute_of_self(file) == "file_name"
        return False

    def _is_destroy(self, call: cst.Call) -> bool:
        if attribute_of_self(call.func) == "destroy_pg" and not self.plan.has("destroy_pg"):
            return True
        return self.source.distributed_name(call.func) == "destroy_process_group" and not call.args

    def _read_call(
        self, line: cst.CSTNode, call: cst.Call, stores: dict[str, cst.SimpleStatementLine]
    ) -> None:
        name = attribute_of_self(call.func)
        try:
            if self.source.distributed_name(call.func) == "init_process_group":
                self.groups.backends.add(self._backend_of_init(call, stores))
                self.groups.dropped.append(line)
            elif name in self.emptied or (name == "create_pg" and not self.plan.has(name)):
                if name == "create_pg" and len(call.args) > 1:
                    raise NotConverted("create_pg with other arguments than the device")
                self.groups.dropped.append(line)
            elif name == "init_pg" and not self.plan.has(name):
                if call.args:
                    raise NotConverted("init_pg with arguments")
                self.groups.dropped.append(line)
        except NotConverted as problem:
            self.groups.problems.append((line, str(problem)))

    def _backend_of_init(self, call: cst.Call, stores: dict[str, cst.SimpleStatementLine]) -> str:
        """Return the backend that a call of `init_process_group` asks for, as code; "" for the default.

        Raises:
            NotConverted: it asks for something that the rank's own group may not be.
        """
        names = ("backend", "init_method")
        given: dict[str, cst.BaseExpression] = {}
        for index, arg in enumerate(call.args):
            if arg.star or (arg.keyword is None and index >= len(names)):
                raise NotConverted("init_process_group with starred or more positional arguments")
            given[arg.keyword.value if arg.keyword else names[index]] = arg.value
        if others := sorted(given.keys() - _INIT_KEYWORDS):
            raise NotConverted(f"init_process_group with {others[0]}")
        if "rank" in given and attribute_of_self(given["rank"]) != "rank":
            raise NotConverted("init_process_group with a rank of its own")
        if "world_size" in given and not self._is_world_size(given["world_size"]):
            raise NotConverted("init_process_group with a world size of its own")
        store = given.get("store")
        known = isinstance(store, cst.Name) and store.value in stores
        if store is not None and not known and not self._is_store(store):
            raise NotConverted("init_process_group with a store of its own")
        method = given.get("init_method")
        if method is not None and not self._is_own_file(method):
            raise NotConverted("init_process_group with an init_method of its own")
        return self._backend(given.get("backend"))

    def _is_world_size(self, node: cst.BaseExpression) -> bool:
        match node:
            case cst.Call(func=cst.Name("int"), args=[cst.Arg(value=value)]):
                return self._is_world_size(value)
        return attribute_of_self(node) == "world_size"

    def _is_own_file(self, node: cst.BaseExpression) -> bool:
        names = {attribute_of_self(one) for one in find_all(node, cst.Attribute)} - {""}
        is_environment = isinstance(node, cst.SimpleString) and node.evaluated_value == "env://"
        return is_environment or names in ({"file_name"}, {"init_method"})

    def _backend(self, node: cst.BaseExpression | None) -> str:
        match node:
            case None:
                return ""
            case cst.SimpleString() if node.evaluated_value in ("gloo", "nccl"):
                return f'"{node.evaluated_value}"'
            case cst.Attribute(attr=cst.Name("GLOO" | "NCCL" as name)):
                return f'"{name.lower()}"'
            case cst.Name(value=name) if name in self.source.constants:
                return name
        if attribute_of_self(node) == "backend" and not self.plan.has("backend"):
            return ""
        raise NotConverted(f"init_process_group with the backend {self.source.code(node)}")


def _last_statements(body: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Yield the statements with which a function ends, those at the end of its last block included."""
    if body:
        yield body[-1]
        for block in blocks_of(body[-1]):
            yield from _last_statements(block)
