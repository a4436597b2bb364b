"""Mutations of a Python file: small edits of expressions and statements that run."""

from __future__ import annotations

import ast
import bisect
import functools
import itertools
from dataclasses import dataclass

# Libraries that mutate Python (mutmut, cosmic-ray) also mutate annotations and messages, leave no wait and no
# copy out, and run tests in an order of their own.
SYMBOLS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
}
"""An operator as it is written, and the one that takes its place."""
OTHER = {
    name: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("reduce_dtype", "param_dtype"),
        ("compute", "reduce"),
        ("gradient", "compute"),
        ("start", "stop"),
        ("size", "rank"),
        ("num_shards", "index"),
        ("shard_numel", "padded_numel"),
        ("zeros", "ones"),
        ("empty_like", "zeros_like"),
        ("append", "remove"),
    )
    for name, other in (pair, pair[::-1])
}
"""Names of the engine, and of what it calls, that stand beside each other."""
DROPPED = {"wait", "detach", "clone", "contiguous", "float", "double", "flatten", "items", "copy"}
"""Methods whose result is of the same kind as what they are called on."""


@dataclass(frozen=True)
class Mutant:
    """One edit of one file.

    Attributes:
        line: of the edit, counted from 1.
        lines: the first of them that any claim runs says that it runs; none where it runs as it is imported.
        branches: where the statements begin that its condition, or loop, leads to.
        function: the qualified name of what it is in; empty outside of all.
        before, after: the text there, in one line.
    """

    file: str
    function: str
    line: int
    lines: tuple[int, ...]
    branches: tuple[int, ...]
    kind: str
    before: str
    after: str
    start: int
    stop: int
    text: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The names that survive a move of the lines."""
        return self.file, self.function, self.before, self.after

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]


class Finder(ast.NodeVisitor):
    """Collects the mutants of a file; skips annotations, messages and docstrings."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        self.source = source
        lines = source.encode().splitlines(keepends=True)
        self.offsets = [0]
        for line in lines:
            self.offsets.append(self.offsets[-1] + len(line.decode()))
        self.lines = source.splitlines()
        self.names: list[str] = []
        self.statement = 0  # the line of the one that a function runs, 0 outside of all
        self.branches: tuple[int, ...] = ()
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def add(self, node: ast.stmt | ast.expr, kind: str, text: str, line: int | None = None) -> None:
        start, stop = self.span(node)
        first = self.source.rfind("\n", 0, start) + 1
        last = self.source.find("\n", stop)
        before, after = self.source[first:last], self.source[first:start] + text + self.source[stop:last]
        self.found.append(
            Mutant(
                self.file,
                ".".join(self.names),
                line or node.lineno,
                (line or node.lineno, self.statement) if self.statement else (),
                self.branches,
                kind,
                " ".join(before.split()),
                " ".join(after.split()),
                start,
                stop,
                text,
            )
        )

    def at(self, line: int, column: int) -> int:
        """Return the place in the text of a column, which `ast` counts in bytes."""
        return self.offsets[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def text(self, node: ast.stmt | ast.expr) -> str:
        return self.source[slice(*self.span(node))]

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and self.statement:
            around = self.statement, self.branches
            self.statement = node.lineno
            blocks = (*getattr(node, "body", ()), *getattr(node, "orelse", ()))
            self.branches = tuple(each.lineno for each in blocks)
            super().visit(node)
            self.statement, self.branches = around
        else:
            super().visit(node)

    # What is not mutated.

    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append(node.name)
        around, self.statement = self.statement, node.body[-1].lineno  # for what the defaults are worth
        for each in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(each)
        self.names.pop()
        self.statement = around

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for each in node.body:
            self.visit(each)
        self.names.pop()

    # Statements.

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring, or `...`
            return
        if not isinstance(node.value, ast.Yield | ast.YieldFrom):
            self.add(node, "call left out", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self.add(node, "assignment left out", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "assignment left out", "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self.add(node, "return left out", "pass")
        elif not isinstance(node.value, ast.Constant):
            self.add(node, "return None", "return None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break", "break")

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in self.text(node.test):
            self.condition(node.test)
            self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for each in node.items:
            if self.text(each.context_expr) in ("torch.no_grad()", "outside_transforms()"):
                self.add(each.context_expr, "context left out", "__import__('contextlib').nullcontext()")
        self.generic_visit(node)

    # Expressions.

    def condition(self, node: ast.expr) -> None:
        # A name that the condition binds is still bound.
        text = self.text(node)
        for value in ("True", "False"):
            binds = any(isinstance(each, ast.NamedExpr) for each in ast.walk(node))
            self.add(node, "condition", f"(({text}), {value})[1]" if binds else value)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def operator(self, node: ast.expr, left: ast.expr, kind: ast.AST, right: ast.expr) -> None:
        if type(kind) in SYMBOLS:
            symbol, other = SYMBOLS[type(kind)]
            (start, stop), (_, after), (before, _) = map(self.span, (node, left, right))
            between = self.source[after:before].replace(symbol, other)
            self.add(node, "operator", self.source[start:after] + between + self.source[before:stop])

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            self.operator(node, node.left, node.ops[0], node.comparators[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, ast.BitOr):  # of types, often
            self.operator(node, node.left, node.op, node.right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = " or " if isinstance(node.op, ast.And) else " and "
        self.add(node, "operator", f"({other.join(f'({self.text(value)})' for value in node.values)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add(node, "operator", f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "constant", str(not node.value))
        elif isinstance(node.value, int | float):
            self.add(node, "constant", str(node.value + 1))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if other := OTHER.get(node.attr):
            self.add(node, "name", f"{self.text(node.value)}.{other}", node.end_lineno)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if (other := OTHER.get(node.id)) and node.id in ("min", "max", "any", "all"):
            self.add(node, "name", other)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in DROPPED and not node.args:
            self.add(node, "call left out", self.text(called.value), node.end_lineno)
        if isinstance(called, ast.Name) and called.id == "isinstance":
            return  # the types among its arguments are no values
        self.generic_visit(node)


@functools.cache
def mutants_of(file: str, source: str) -> tuple[Mutant, ...]:
    """Return the mutants of a file that are still Python, each of a function once."""
    finder = Finder(file, source)
    ends, indented = [0], []
    for node in ast.parse(source).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        ends += [finder.at(each.end_lineno or 0, each.end_col_offset or 0) for each in inside]
        indented += [place > 0 for place in range(len(inside))]

    def tree(place: int, part: str) -> tuple[int, str]:
        return place, ast.dump(ast.parse(f"if True:{part}" if indented[place] else part))

    parts = [source[start:stop] for start, stop in itertools.pairwise(ends)]
    seen = {tree(place, part) for place, part in enumerate(parts)}
    found = []
    for mutant in finder.found:
        place = bisect.bisect_right(ends, mutant.start) - 1
        start, stop = (where - ends[place] for where in (mutant.start, mutant.stop))
        try:
            mutated = tree(place, parts[place][:start] + mutant.text + parts[place][stop:])
        except SyntaxError:
            continue
        if mutated not in seen:
            seen.add(mutated)
            found.append(mutant)
    return tuple(found)
