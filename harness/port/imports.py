"""Imports of a converted file: those it needs are added, those that the conversion made superfluous go."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lockstep.port.source import bound_name, is_docstring


def fix_imports(before: cst.Module, after: cst.Module, needed: set[str]) -> cst.Module:
    """Add imports of dotted names, and remove those that the conversion made unused.

    Args:
        needed: modules such as `pytest`, and names such as `lockstep.assertions.assert_equal`.
    """
    # First what goes: a line that is added beside others of its module keeps them.
    unused = _used_names(before) - _used_names(after)
    pruned = after.visit(_Remover(unused))
    for dotted in sorted(needed):
        module, _, name = dotted.rpartition(".")
        if name not in _imported_names(pruned):
            pruned = _with_import(pruned, module, name)
    return pruned


def _imported_names(tree: cst.Module) -> set[str]:
    lines = [line for line in tree.body if isinstance(line, cst.SimpleStatementLine)]
    statements = [one for line in lines for one in line.body if isinstance(one, cst.Import | cst.ImportFrom)]
    return {
        bound_name(alias)
        for statement in statements
        if not isinstance(statement.names, cst.ImportStar)
        for alias in statement.names
    }


def _with_import(tree: cst.Module, module: str, name: str) -> cst.Module:
    """Add an import where one that sorts its imports would, among those at the start of the file."""
    line = cst.parse_statement(f"from {module} import {name}\n" if module else f"import {name}\n")
    code = cst.ClassDef | cst.FunctionDef
    head = next((at for at, item in enumerate(tree.body) if isinstance(item, code)), len(tree.body))
    places = [_sort_key(item) for item in tree.body[:head]]
    key = _sort_key(line)
    assert key is not None
    before = [at for at, other in enumerate(places) if other is not None and other < key]
    behind = [at for at, other in enumerate(places) if other is not None and other > key]
    body = list(tree.body)
    if behind and (not before or behind[0] > before[-1]):
        first = body[behind[0]]
        same_block = not before or places[before[-1]][0] == key[0]  # type: ignore[index]
        lines = getattr(first, "leading_lines", ())
        if not (before and same_block) or not lines:
            # The first of its block takes the blank line above it.
            body[behind[0]] = first.with_changes(leading_lines=[])
            line = line.with_changes(leading_lines=lines)
        body.insert(behind[0], line)
    elif before:
        body.insert(before[-1] + 1, line)
    else:
        body.insert(1 if body and is_docstring(body[0]) else 0, line)
    return tree.with_changes(body=body)


def _sort_key(item: cst.CSTNode) -> tuple[int, int, str] | None:
    """Return what imports at module level are sorted by: block, form, module."""
    match item:
        case cst.SimpleStatementLine(body=[cst.Import(names=[alias, *_])]):
            module, form = get_full_name_for_node(alias.name) or "", 0
        case cst.SimpleStatementLine(body=[cst.ImportFrom(module=node, relative=())]) if node is not None:
            module, form = get_full_name_for_node(node) or "", 1
        case _:
            return None
    root = module.partition(".")[0]
    block = 0 if root == "__future__" else 1 if root in sys.stdlib_module_names else 2
    return block, form, module


def _used_names(tree: cst.Module) -> set[str]:
    """Return the names that a file uses outside of its imports, those that strings name included."""
    collector = _Uses()
    tree.visit(collector)
    return collector.names


class _Uses(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        for part in (node.annotation, node.default):
            if part is not None:
                part.visit(self)
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        for part in (*node.decorators, node.params, node.returns, node.body):
            if part is not None:
                part.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and text.replace(".", "").isidentifier():
            self.names.add(text.partition(".")[0])


class _Remover(cst.CSTTransformer):
    """Removes the imports of unused names at module level."""

    def __init__(self, unused: set[str]) -> None:
        super().__init__()
        self.unused = unused

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        return False

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.RemovalSentinel:
        names = list(self._kept(updated_node.names))
        return updated_node.with_changes(names=names) if names else cst.RemoveFromParent()

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        names = list(self._kept(updated_node.names))
        if len(names) == len(updated_node.names):
            return updated_node
        return updated_node.with_changes(names=names) if names else cst.RemoveFromParent()

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.RemovalSentinel:
        return updated_node if updated_node.body else cst.RemoveFromParent()

    def _kept(self, names: Sequence[cst.ImportAlias]) -> Iterator[cst.ImportAlias]:
        kept = [alias for alias in names if bound_name(alias) not in self.unused]
        for index, alias in enumerate(kept):
            is_new_last = index == len(kept) - 1 and alias is not names[-1]
            yield alias.with_changes(comma=names[-1].comma) if is_new_last else alias
