"""`setUp`, `tearDown`, `setUpClass` and `tearDownClass` as fixtures, without what the launcher needed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from lockstep.port.groups import FamilyGroups
from lockstep.port.methods import MethodConverter, Needs
from lockstep.port.plans import ClassPlan
from lockstep.port.source import (
    Source,
    attribute_of_self,
    find_all,
    is_docstring,
    is_self,
    lone_call,
    super_call,
)

INSTANCE_SETUP = ("setUp", "tearDown")
CLASS_SETUP = ("setUpClass", "tearDownClass")
SETUP_METHODS = (*INSTANCE_SETUP, *CLASS_SETUP)
_SUPPRESS = ("contextlib.suppress", "suppress")


@dataclass
class Setup:
    """A fixture in the place of a pair of methods."""

    node: cst.FunctionDef
    needs: Needs


def has_setup(plan: ClassPlan, source: Source, family: FamilyGroups, names: tuple[str, str]) -> bool:
    """Return whether anything but the launcher's part is in a class's own set-up or tear-down."""
    return any(_kept(plan, name, source, family) for name in names)


def setup_reason(plan: ClassPlan, source: Source, family: FamilyGroups, names: tuple[str, str]) -> str:
    """Return why no fixture can take the place of a class's set-up and tear-down; "" if one can."""
    in_base = any(has_setup(one, source, family, names) for one in plan.mro() if one is not plan)
    methods = [plan.methods[name] for name in names if name in plan.methods]
    if in_base and has_setup(plan, source, family, names):
        return "a base has a set-up, too; pytest would run them in an order of its own"
    if in_base and any(one.name.value not in map(super_call, find_all(one, cst.Call)) for one in methods):
        return "it takes the place of that of a base"
    return next(filter(None, map(_method_reason, methods)), "") or _shared_name(methods)


def several_setups(plan: ClassPlan, source: Source, family: FamilyGroups) -> list[str]:
    """Return the comment for a class that inherits from several classes with a set-up."""
    bases = {one.name: one for one in plan.mro() if one is not plan}.values()
    for names in (INSTANCE_SETUP, CLASS_SETUP):
        found = [one.name for one in bases if has_setup(one, source, family, names)]
        if len(found) > 1:
            return [f"{' and '.join(found)} have a set-up; pytest would run one of them alone"]
    return []


def _method_reason(method: cst.FunctionDef) -> str:
    """Return why the statements of a method cannot be part of a fixture; "" if they can."""
    if any(find_all(method, cst.Return)):
        return "a set-up that returns early"
    if any(find_all(method, cst.Yield)) or method.asynchronous is not None:
        return "a set-up that is a generator or a coroutine"
    is_pass = [isinstance(one, cst.Pass) for one in method.body.body]
    if isinstance(method.body, cst.SimpleStatementSuite) and not all(is_pass):
        return "a set-up on the line of its def"
    has_others = any(not is_self(one.decorator, "classmethod") for one in method.decorators)
    return "a set-up with decorators" if has_others else ""


def _shared_name(methods: Sequence[cst.FunctionDef]) -> str:
    """Return why two methods cannot be one function: a name is local in one, and another's in the other."""
    for one, other in itertools.permutations(methods, 2):
        local = _bound(one)
        read = {node.value for node in find_all(other.body, cst.Name)} - _bound(other)
        if shared := sorted(local & read):
            return f"{shared[0]} is a local name in {one.name.value} alone"
    return ""


def _bound(method: cst.FunctionDef) -> set[str]:
    targets = [one.target for one in find_all(method.body, cst.AssignTarget)]
    targets += [one.target for one in find_all(method.body, cst.For)]
    targets += [one.name for one in find_all(method.body, cst.AsName)]
    return {target.value for target in targets if isinstance(target, cst.Name)}


def convert_setup(
    plan: ClassPlan,
    source: Source,
    family: FamilyGroups,
    names: tuple[str, str],
    attributes: dict[str, str],
) -> Setup | None:
    """Return the fixture for the class's own set-up and tear-down, or None if there is nothing to do."""
    before, after = (_kept(plan, name, source, family) for name in names)
    if not before and not after:
        return None
    needs = Needs()
    body: list[cst.BaseStatement] = []
    last: list[cst.EmptyLine] = []  # comments behind the last statement
    for name, statements in zip(names, (before, after), strict=True):
        if name == names[1] and statements:
            body.append(cst.SimpleStatementLine([cst.Expr(cst.Yield())], leading_lines=last))
        if statements:
            method = plan.methods[name]
            converter = MethodConverter(plan, method, source, family, True, attributes)
            footer = getattr(method.body, "footer", ())
            block = cst.IndentedBlock(statements, footer=footer).visit(converter)
            assert isinstance(block, cst.IndentedBlock)
            if names is INSTANCE_SETUP:  # monkeypatch restores after each test, too soon for a class
                block = cst.ensure_type(block.visit(_Environment(source, converter)), cst.IndentedBlock)
            body += block.body
            last = [line for line in block.footer if line.comment]
            needs.fixtures |= converter.needs.fixtures
            needs.on_self |= converter.needs.on_self
            needs.imports |= converter.needs.imports
            needs.reasons += converter.needs.reasons
    block = cst.IndentedBlock(body, footer=last)
    return Setup(_fixture(names, [*needs.fixtures], block), needs)


def _fixture(names: tuple[str, str], fixtures: list[str], body: cst.IndentedBlock) -> cst.FunctionDef:
    if names is INSTANCE_SETUP:
        head = f"@pytest.fixture(autouse=True)\ndef set_up({', '.join(['self', *fixtures])}):\n    pass\n"
    else:
        parameters = ", ".join(["cls", *fixtures])
        mark = '@pytest.fixture(scope="class", autouse=True)\n@classmethod\n'
        head = f"{mark}def set_up_class({parameters}):\n    pass\n"
    function = cst.parse_statement(head)
    assert isinstance(function, cst.FunctionDef)
    return function.with_changes(body=body)


def _kept(plan: ClassPlan, name: str, source: Source, family: FamilyGroups) -> list[cst.BaseStatement]:
    """Return the statements of a method that mean something to a test on ranks."""
    method = plan.methods.get(name)
    if method is None or not isinstance(method.body, cst.IndentedBlock):
        return []
    groups = family.of(plan, name)
    kept = [
        statement
        for statement in method.body.body
        if not groups.is_dropped(statement) and not _is_launchers(statement, source)
    ]
    return [] if all(map(is_docstring, kept)) else kept


def _is_launchers(statement: cst.CSTNode, source: Source) -> bool:
    """Return whether a statement of a set-up is about processes, the test's file or its group."""
    call = lone_call(statement)
    if call is not None:
        return (
            super_call(call) in SETUP_METHODS
            or attribute_of_self(call.func) == "_spawn_processes"
            or _removes_own_file(call, source)
            or source.distributed_name(call.func) == "destroy_process_group"
        )
    if isinstance(statement, cst.Try):
        parts = [*statement.body.body, *(one for handler in statement.handlers for one in handler.body.body)]
        return all(_is_launchers(part, source) or _is_pass(part) for part in parts)
    if isinstance(statement, cst.With):
        items = [item.item for item in statement.items]
        suppresses = all(isinstance(item, cst.Call) and source.code(item.func) in _SUPPRESS for item in items)
        return suppresses and all(_is_launchers(part, source) for part in statement.body.body)
    if isinstance(statement, cst.If) and statement.orelse is None:
        binds = any(find_all(statement, cst.NamedExpr))
        return not binds and all(_is_launchers(part, source) for part in statement.body.body)
    return False


def _removes_own_file(call: cst.Call, source: Source) -> bool:
    is_remove = source.code(call.func) in ("os.remove", "os.unlink")
    return is_remove and len(call.args) == 1 and attribute_of_self(call.args[0].value) == "file_name"


def _is_pass(statement: cst.CSTNode) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Pass()]):
            return True
    return False


class _Environment(cst.CSTTransformer):
    """Sets variables of the environment through monkeypatch, which restores them."""

    def __init__(self, source: Source, converter: MethodConverter) -> None:
        super().__init__()
        self.source, self.converter = source, converter

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        match updated_node.body:
            case [
                cst.Assign(
                    targets=[cst.AssignTarget(target=cst.Subscript(value=target, slice=[index]))], value=value
                )
            ]:
                if self.source.code(target) == "os.environ" and isinstance(index.slice, cst.Index):
                    patch = self.converter.fixture("monkeypatch")
                    args = [cst.Arg(index.slice.value), cst.Arg(value)]
                    call = cst.Call(cst.parse_expression(f"{patch}.setenv"), args)
                    return updated_node.with_changes(body=[cst.Expr(call)])
        return updated_node
