"""A file as the conversion reads it: where its names come from, and small questions about expressions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import libcst as cst
from libcst.helpers import get_full_name_for_node

TESTING = "torch.testing._internal."
NodeT = TypeVar("NodeT", bound=cst.CSTNode)
StatementT = TypeVar("StatementT", bound=cst.SimpleStatementLine | cst.BaseCompoundStatement)


@dataclass
class Source:
    """A parsed file.

    Attributes:
        tree: the file.
        imports: for each name that an import at module level binds, the dotted name of what it is bound to.
        constants: names that are assigned once at module level, with their values.
    """

    tree: cst.Module
    imports: dict[str, str] = field(default_factory=dict)
    constants: dict[str, cst.BaseExpression] = field(default_factory=dict)

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """The names of all attributes that the file mentions."""
        return frozenset(node.attr.value for node in find_all(self.tree, cst.Attribute))

    @cached_property
    def lone_calls(self) -> list[cst.Call]:
        """The calls that stand alone as statements."""
        calls = [lone_call(line) for line in find_all(self.tree, cst.SimpleStatementLine)]
        return [call for call in calls if call is not None]

    @cached_property
    def joining(self) -> frozenset[str]:
        """The functions at module level that call `init_process_group`."""
        return frozenset(
            item.name.value
            for item in self.tree.body
            if isinstance(item, cst.FunctionDef)
            and any(
                self.distributed_name(call.func) == "init_process_group" for call in find_all(item, cst.Call)
            )
        )

    @cached_property
    def has_own_assert_equal(self) -> bool:
        """True if the file has another function of the name `assert_equal` than Lockstep's."""
        defined = {one.name.value for one in self.tree.body if isinstance(one, cst.FunctionDef)}
        ours = "lockstep.assertions.assert_equal"
        is_imported = self.imports.get("assert_equal", ours) != ours
        return is_imported or "assert_equal" in {*defined, *self.constants}

    def origin(self, node: cst.CSTNode) -> str:
        """Return the dotted name of what an expression names, by its import; "" for other expressions."""
        name = get_full_name_for_node(node) if isinstance(node, cst.Name | cst.Attribute) else None
        root, _, rest = (name or "").partition(".")
        if root not in self.imports:
            return ""
        return f"{self.imports[root]}.{rest}" if rest else self.imports[root]

    def testing_name(self, node: cst.CSTNode) -> str:
        """Return the last part of a name that comes from `torch.testing._internal`, else ""."""
        origin = self.origin(node)
        return origin.rpartition(".")[2] if origin.startswith(TESTING) else ""

    def distributed_name(self, node: cst.CSTNode) -> str:
        """Return the last part of a name that comes from `torch.distributed`, else ""."""
        origin = self.origin(node)
        return origin.rpartition(".")[2] if origin.startswith("torch.distributed") else ""

    def code(self, node: cst.CSTNode) -> str:
        return self.tree.code_for_node(node)


def read(code: str) -> Source:
    """Parse a file.

    Raises:
        libcst.ParserSyntaxError: it is no Python.
    """
    source = Source(cst.parse_module(code))
    assigned: dict[str, list[cst.BaseExpression | None]] = {}
    for statement in simple_statements(source.tree.body):
        match statement:
            case cst.Import(names=names):
                for alias in names:
                    dotted = get_full_name_for_node(alias.name) or ""
                    if alias.asname:
                        source.imports[bound_name(alias)] = dotted
                    else:
                        source.imports[dotted.partition(".")[0]] = dotted.partition(".")[0]
            case cst.ImportFrom(names=names, relative=relative) if not isinstance(names, cst.ImportStar):
                module = "." * len(relative) + (
                    get_full_name_for_node(statement.module) or "" if statement.module else ""
                )
                for alias in names:
                    source.imports[bound_name(alias)] = f"{module}.{get_full_name_for_node(alias.name)}"
            case cst.Assign(targets=targets, value=value):
                for target in targets:
                    if isinstance(target.target, cst.Name):
                        assigned.setdefault(target.target.value, []).append(value)
    source.constants.update(
        {name: values[0] for name, values in assigned.items() if len(values) == 1 and values[0] is not None}
    )
    return source


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return (get_full_name_for_node(alias.name) or "").partition(".")[0]


def simple_statements(body: Sequence[cst.CSTNode]) -> Iterator[cst.BaseSmallStatement]:
    """Yield the small statements of a body, those below `if`, `try` and `with` included."""
    for statement in body:
        match statement:
            case cst.SimpleStatementLine(body=small):
                yield from small
            case cst.If(body=block, orelse=orelse):
                yield from simple_statements(block.body)
                yield from simple_statements([orelse] if orelse else [])
            case cst.Else(body=block) | cst.With(body=block) | cst.Finally(body=block):
                yield from simple_statements(block.body)
            case cst.Try(body=block, handlers=handlers):
                yield from simple_statements(block.body)
                for handler in handlers:
                    yield from simple_statements(handler.body.body)


def find_all(node: cst.CSTNode, kind: type[NodeT]) -> Iterator[NodeT]:
    """Yield the nodes of a kind in a tree, its root included."""
    if isinstance(node, kind):
        yield node
    for child in node.children:
        yield from find_all(child, kind)


def is_self(node: cst.CSTNode, name: str = "self") -> bool:
    return isinstance(node, cst.Name) and node.value == name


def attribute_of_self(node: cst.CSTNode, names: Sequence[str] = ("self", "cls")) -> str:
    """Return X of the expression `self.X`, else ""."""
    if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value in names:
        return node.attr.value
    return ""


def super_call(node: cst.CSTNode) -> str:
    """Return X of the call `super().X()`, else ""."""
    match node:
        case cst.Call(func=cst.Attribute(value=cst.Call(func=cst.Name("super")), attr=cst.Name(name))):
            return name
    return ""


def parameters(function: cst.FunctionDef) -> list[cst.Param]:
    """Return the parameters of a function that can be given by keyword, `self` included."""
    params = function.params
    return [*params.posonly_params, *params.params, *params.kwonly_params]


def lone_call(statement: cst.CSTNode) -> cst.Call | None:
    """Return the call that a statement is, if it is one."""
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call() as call)]):
            return call
    return None


def is_docstring(statement: cst.CSTNode) -> bool:
    match statement:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]):
            return True
    return False


def with_comments(statement: StatementT, comments: Sequence[str]) -> StatementT:
    """Put lines of comment above a statement, those that are not there already."""
    present = {line.comment.value for line in statement.leading_lines if line.comment}
    new = [f"# {text}" for text in dict.fromkeys(comments) if f"# {text}" not in present]
    lines = [cst.EmptyLine(comment=cst.Comment(text)) for text in new]
    changed: StatementT = statement.with_changes(leading_lines=[*statement.leading_lines, *lines])  # type: ignore[assignment]
    return changed


def blocks_of(statement: cst.CSTNode) -> Iterator[Sequence[cst.CSTNode]]:
    """Yield the bodies below a compound statement, those of functions and classes in it not included."""
    match statement:
        case cst.If(body=block, orelse=orelse):
            yield block.body
            if orelse is not None:
                yield from blocks_of(orelse)
        case cst.Else(body=block) | cst.With(body=block) | cst.Finally(body=block):
            yield block.body
        case cst.Try(body=block, finalbody=final):
            yield block.body
            if final is not None:
                yield from blocks_of(final)


class Rename(cst.CSTTransformer):
    """Puts names, or other expressions, in the place of names; those of attributes and keywords stay.

    Args:
        code: the code for each name that goes.
    """

    def __init__(self, code: Mapping[str, str]) -> None:
        super().__init__()
        self.code = code

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        code = self.code.get(original_node.value)
        if code is None:
            return updated_node
        return cst.parse_expression(code).with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)
