"""Converts the body of one method: what it takes from `self`, its assertions, its subtests and its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lockstep.port.asserts import (
    ASSERT_EQUAL,
    NotConverted,
    assertion_of,
    check_keywords,
    convert_context,
    convert_statement,
    is_assertion,
)
from lockstep.port.groups import FamilyGroups, is_raises
from lockstep.port.kinds import DROPPED_MEMBERS
from lockstep.port.plans import ClassPlan
from lockstep.port.source import (
    Source,
    attribute_of_self,
    find_all,
    is_self,
    super_call,
    with_comments,
)

NOT_CONVERTED = "lockstep: not converted:"

_TAKES_A_TEST_CASE = {"check_sharded_parity"}
"""Functions of `torch.testing._internal` that use nothing of a test case but its assertions."""


@dataclass
class Needs:
    """The needs of converted code.

    Attributes:
        fixtures: fixtures that it takes as parameters, in order.
        on_self: fixtures as attributes of the test's instance.
        imports: dotted names.
        reasons: what was not converted, and why.
    """

    fixtures: dict[str, None] = field(default_factory=dict)
    on_self: dict[str, None] = field(default_factory=dict)
    imports: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)


class MethodConverter(cst.CSTTransformer):
    """Converts the body of a method of a class.

    Args:
        plan: the class.
        method: the method as it is written.
        takes_fixtures: whether the method can take fixtures as parameters, as a test does; other methods find
            them on `self`.
        attributes: what replaces attributes of `self`, beside those of the kind.
    """

    def __init__(
        self,
        plan: ClassPlan,
        method: cst.FunctionDef,
        source: Source,
        family: FamilyGroups,
        takes_fixtures: bool,
        attributes: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.plan, self.source = plan, source
        self.kind = plan.kind or next(one.kind for one in plan.family() if one.kind)
        self.attributes = {**self.kind.attributes, **attributes}
        self.groups = family.of(plan, method.name.value)
        self.takes_fixtures = takes_fixtures
        self.needs = Needs()
        self._names = _names_of(method, source)
        self._dropped = DROPPED_MEMBERS | ({"backend"} if self.kind.is_deepspeed else set())
        self._members = frozenset().union(*(one.members for one in plan.family())) - self._dropped
        self._classes = {one.name for one in plan.family()}
        self._reads_exception = any(one.attr.value == "exception" for one in find_all(method, cst.Attribute))
        self._handled: list[cst.CSTNode] = []
        self._reasons: list[list[str]] = []
        self._removed: list[cst.CSTNode] = []
        self._lone_calls: list[cst.CSTNode] = []
        self._files: list[cst.CSTNode] = []
        self._contexts: list[cst.CSTNode] = []
        self._raised: set[str] = set()
        self._warned: set[str] = set()

    # What stays as it is gets a comment above the statement it is in.

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            self._reasons.append([])
        return super().on_visit(node)

    def on_leave(
        self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT
    ) -> cst.CSTNodeT | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNodeT]:
        updated = super().on_leave(original_node, updated_node)
        if not isinstance(original_node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            return updated
        reasons = self._reasons.pop()
        if not reasons:
            return updated
        self.needs.reasons += reasons
        kept: Any = original_node if isinstance(original_node, cst.SimpleStatementLine) else updated
        commented: cst.CSTNodeT = with_comments(kept, [f"{NOT_CONVERTED} {reason}" for reason in reasons])
        return commented

    def _leave_out(self, reason: str) -> None:
        if self._reasons:
            self._reasons[-1].append(reason)
        else:
            self.needs.reasons.append(reason)

    # Fixtures

    def fixture(self, name: str) -> str:
        """Return the expression for a fixture here."""
        if self.takes_fixtures and name not in self._names:
            self.needs.fixtures[name] = None
            return name
        self.needs.on_self[name] = None
        return f"self.{name}"

    def _expression(self, template: str) -> cst.BaseExpression:
        return cst.parse_expression(template.format(self.fixture("world")))

    # Scopes that have a `self` of their own are none of the test's.

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return not any(is_self(param.name) for param in node.params.params)

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        return not any(is_self(param.name) for param in node.params.params)

    # Statements

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> bool:
        if self.groups.is_dropped(node):
            return False
        if problem := self.groups.problem(node):
            self._leave_out(problem)
            return False
        return True

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement:
        if self.groups.is_dropped(original_node):
            self._removed.append(updated_node)
            return updated_node
        if len(original_node.body) > 1 and any(
            isinstance(one, cst.Expr) and isinstance(one.value, cst.Call) and assertion_of(one.value)
            for one in original_node.body
        ):
            self._leave_out("several statements on one line")
            return updated_node
        match original_node.body, updated_node.body:
            case [cst.Expr(value=cst.Call() as call)], [cst.Expr(value=cst.Call() as updated)] if (
                name := assertion_of(call)
            ):
                return self._convert_assertion(name, call, updated, updated_node)
        return updated_node

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.SimpleStatementSuite:
        calls = [one.value for one in original_node.body if isinstance(one, cst.Expr)]
        if any(isinstance(call, cst.Call) and assertion_of(call) for call in calls):
            self._leave_out("an assertion behind a colon, on the same line")
        return updated_node

    def _convert_assertion(
        self, name: str, original: cst.Call, updated: cst.Call, line: cst.SimpleStatementLine
    ) -> cst.BaseStatement:
        try:
            converted = convert_statement(name, updated, self.source.code(original))
        except NotConverted as reason:
            self._leave_out(str(reason))
            return line
        self.needs.imports |= converted.imports
        comments = [cst.EmptyLine(comment=comment) for comment in converted.comments]
        leading = [*line.leading_lines, *comments]
        if isinstance(converted.statement, cst.With):
            body = converted.statement.body.with_changes(header=line.trailing_whitespace)
            return converted.statement.with_changes(leading_lines=leading, body=body)
        return line.with_changes(body=[converted.statement], leading_lines=leading)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """Take out what is dropped; the lines above it go to the next statement."""
        body: list[cst.BaseStatement] = []
        above: list[cst.EmptyLine] = []
        for statement in updated_node.body:
            lines = [*above, *getattr(statement, "leading_lines", ())]
            if any(statement is one for one in self._removed):
                assert isinstance(statement, cst.SimpleStatementLine)
                above = lines
                if statement.trailing_whitespace.comment:
                    above.append(cst.EmptyLine(comment=statement.trailing_whitespace.comment))
                continue
            body.append(
                statement.with_changes(leading_lines=tidy(lines, first=not body)) if above else statement
            )
            above = []
        if len(body) == len(updated_node.body):
            return updated_node
        above = [line for line in above if line.comment]
        if not body:
            body = [cst.SimpleStatementLine([cst.Pass()], leading_lines=above)]
            above = []
        elif any(updated_node.body[0] is one for one in self._removed):
            body[0] = body[0].with_changes(
                leading_lines=tidy(getattr(body[0], "leading_lines", ()), first=True)
            )
        return updated_node.with_changes(body=body, footer=[*above, *updated_node.footer])

    # Expressions

    def visit_Expr(self, node: cst.Expr) -> None:
        if isinstance(node.value, cst.Call):
            self._lone_calls.append(node.value)

    def visit_WithItem(self, node: cst.WithItem) -> None:
        if not isinstance(node.item, cst.Call) or not assertion_of(node.item):
            return
        if node.asname is None:
            self._contexts.append(node.item)
        elif isinstance(node.asname.name, cst.Name):
            self._contexts.append(node.item)
            self._handled.append(node.asname.name)
            found = self._raised if is_raises(node.item) else self._warned
            found.add(node.asname.name.value)
        else:
            self._leave_out("the exception is bound to something other than a name")

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if (name := attribute_of_self(node.target, ("self",))) in self.kind.attributes:
            self._leave_out(f"self.{name} is set, which is of the world")

    def visit_Call(self, node: cst.Call) -> None:
        name = attribute_of_self(node.func)
        known = {"run_subtests", "skipTest", "fail", "subTest", "create_pg", *self.kind.calls}
        if is_assertion(name) or name in known:
            self._handled.append(node.func)
        if isinstance(node.func, cst.Name) and node.func.value == "super":
            self._handled += [arg.value for arg in node.args]
        if self.source.distributed_name(node.func) == "FileStore":
            # The test's own file: new for each test, and the same on all ranks, as this one is.
            self._files += [arg.value for arg in node.args[:1] if attribute_of_self(arg.value) == "file_name"]
        if self.source.distributed_name(node.func) == "init_process_group":
            self._leave_out("init_process_group whose result is used")
        if isinstance(node.func, cst.Name) and node.func.value in self.source.joining:
            self._leave_out(f"{node.func.value} joins a process group")
        if self.source.distributed_name(node.func) == "register_backend":
            self._leave_out("a backend stays registered on warm ranks; ranks(fresh=True) has new ones")
        is_asked = self.source.distributed_name(node.func) == "get_node_local_rank"
        if is_asked and not self.kind.is_deepspeed:
            self._leave_out("ranks have LOCAL_RANK in their environment")
        function = self.source.testing_name(node.func)
        if function in {"run_subtests", *_TAKES_A_TEST_CASE} and node.args and is_self(node.args[0].value):
            self._handled.append(node.args[0].value)
        if name := super_call(node):
            bases = [one for one in self.plan.mro() if one is not self.plan]
            if not any(name in one.methods for one in bases):
                self._leave_out(f"super().{name}() is of the class {self.kind.name}")

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = attribute_of_self(original_node.func)
        function = self.source.testing_name(original_node.func)
        first = updated_node.args[:1]
        try:
            if is_assertion(name):
                return self._assertion(name, original_node, updated_node)
            if name in self._members:
                return updated_node
            if function == "run_subtests" and first and is_self(first[0].value):
                return self._run_subtests(updated_node, updated_node.args[1:])
            if name == "run_subtests":
                return self._run_subtests(updated_node, updated_node.args)
            if function in _TAKES_A_TEST_CASE and first and is_self(first[0].value):
                self.needs.imports.add("torch.testing._internal.common_utils.TestCase")
                case = first[0].with_changes(value=cst.parse_expression("TestCase()"))
                return updated_node.with_changes(args=[case, *updated_node.args[1:]])
            if name in ("skipTest", "fail"):
                self.needs.imports.add("pytest")
                function = "pytest.skip" if name == "skipTest" else "pytest.fail"
                args = [_renamed(arg, "msg", "reason") for arg in updated_node.args]
                return updated_node.with_changes(func=cst.parse_expression(function), args=args)
            if name == "subTest":
                fixture = self.fixture("subtests")
                return updated_node.with_changes(func=cst.parse_expression(f"{fixture}.test"))
            if name == "create_pg":
                if len(original_node.args) > 1:
                    raise NotConverted("create_pg with other arguments than the device")
                return self._expression("{}.group")
            if name in self.kind.calls and not self.kind.is_deepspeed:
                if original_node.args:
                    raise NotConverted(f"{name} with arguments")
                return self._expression(self.kind.calls[name])
            if self._is_skip_by_exit(original_node):
                return self._skip(original_node, updated_node)
        except NotConverted as reason:
            self._leave_out(str(reason))
        return updated_node

    def _assertion(self, name: str, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        if name in self._members or any(original is one for one in self._lone_calls):
            return updated
        if name == "assertEqual" and not any(arg.star for arg in original.args):
            check_keywords(original.args)
            self.needs.imports.add(ASSERT_EQUAL)
            return updated.with_changes(func=cst.Name("assert_equal"))
        if self._reads_exception and not any(original is one for one in self._contexts):
            raise NotConverted(f"{name} is not directly in a `with`, and an exception is read")
        self.needs.imports.add("pytest")
        return convert_context(name, updated)

    def _run_subtests(self, call: cst.Call, args: Sequence[cst.Arg]) -> cst.Call:
        if any(arg.keyword and arg.keyword.value in ("subtest_config", "test_fn") for arg in args):
            raise NotConverted("run_subtests with its own arguments by name")
        return call.with_changes(func=cst.parse_expression(self.fixture("run_subtests")), args=args)

    def _is_skip_by_exit(self, call: cst.Call) -> bool:
        if get_full_name_for_node(call.func) != "sys.exit" or len(call.args) != 1:
            return False
        return any(self.source.testing_name(name) == "TEST_SKIPS" for name in find_all(call, cst.Name))

    def _skip(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        match updated.args[0].value:
            case cst.Attribute(value=value, attr=cst.Name("exit_code")):
                self.needs.imports.add("pytest")
                message = cst.Attribute(value, cst.Name("message"))
                return cst.Call(cst.parse_expression("pytest.skip"), [cst.Arg(message)])
        raise NotConverted("the exit status of a skip")

    def visit_Attribute(self, node: cst.Attribute) -> None:
        value = node.value.value if isinstance(node.value, cst.Name) else ""
        is_exception = value in self._raised and node.attr.value == "exception"
        if is_self(node.value) or is_exception or value in self._warned:
            self._handled.append(node.value)
        if node.attr.value in self._raised | self._warned:
            self._handled.append(node.attr)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        name = attribute_of_self(original_node, ("self",))
        if name:
            return self._attribute(name, original_node, updated_node)
        if isinstance(original_node.value, cst.Name):
            if original_node.value.value in self._raised and original_node.attr.value == "exception":
                return updated_node.with_changes(attr=cst.Name("value"))
            if original_node.value.value in self._warned:
                self._leave_out("the warning that assertWarns found")
            elif original_node.value.value == "cls" and original_node.attr.value in self.attributes:
                self._leave_out(f"cls.{original_node.attr.value}: a world belongs to an instance")
            elif original_node.value.value in self._classes and (
                original_node.attr.value in {*self.kind.attributes, *self._dropped} - self._members
            ):
                self._leave_out(f"{self.source.code(original_node)} is of the launcher")
        return updated_node

    def _attribute(self, name: str, original: cst.Attribute, updated: cst.Attribute) -> cst.BaseExpression:
        if any(original is one for one in self._handled):
            return updated
        if name == "assertEqual" and name not in self._members:
            self.needs.imports.add(ASSERT_EQUAL)
            return cst.Name("assert_equal")
        if is_assertion(name) and name not in self._members:
            self._leave_out(f"self.{name} as a value")
            return updated
        if any(original is one for one in self._files):
            return self._expression('str({}.shared_tmp_path / "store")')
        if name in self.attributes and (name == "world_size" or name not in self._members):
            return self._expression(self.attributes[name])
        if name in self.attributes and not self.plan.has(name):
            self._leave_out(f"self.{name} is set by another class of the family")
        elif name not in self._members and (name in self._dropped or not self.kind.is_deepspeed):
            self._leave_out(f"self.{name} is of the class {self.kind.name}")
        return updated

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        is_known = self.kind.is_deepspeed or any(original_node is one for one in self._handled)
        if is_self(original_node) and not is_known:
            self._leave_out("`self` is passed on, perhaps as a test case")
        name = original_node.value
        if name in self._raised | self._warned and not any(original_node is one for one in self._handled):
            self._leave_out(f"{name} is used for something other than its exception")
        return updated_node


def _names_of(method: cst.FunctionDef, source: Source) -> set[str]:
    """Return the names that a method binds or reads, which a fixture as a parameter would hide."""
    others = {id(node.attr) for node in find_all(method, cst.Attribute)}
    others |= {id(node.keyword) for node in find_all(method, cst.Arg)}
    # torch's run_subtests is replaced by the fixture of that name.
    others |= {id(node) for node in find_all(method, cst.Name) if source.testing_name(node) == "run_subtests"}
    names = {node.value for node in find_all(method, cst.Name) if id(node) not in others}
    return names | {param.name.value for param in find_all(method, cst.Param)}


def _renamed(arg: cst.Arg, before: str, after: str) -> cst.Arg:
    is_named = arg.keyword is not None and arg.keyword.value == before
    return arg.with_changes(keyword=cst.Name(after)) if is_named else arg


def tidy(lines: Sequence[cst.EmptyLine], *, first: bool) -> list[cst.EmptyLine]:
    """Return lines without a blank one at the start of a block, and without two in a row."""
    found: list[cst.EmptyLine] = []
    for line in lines:
        if line.comment is None and (first if not found else found[-1].comment is None):
            continue
        found.append(line)
    return found
