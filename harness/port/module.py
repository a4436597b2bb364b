"""Converts a file: its classes, the statements about them at module level, and its imports."""

from __future__ import annotations

from dataclasses import dataclass, field

import libcst as cst

from lockstep.port.classes import ClassConverter, ClassReport, Setting
from lockstep.port.groups import FamilyGroups, scan_family
from lockstep.port.imports import fix_imports
from lockstep.port.limits import check_limits
from lockstep.port.methods import NOT_CONVERTED
from lockstep.port.plans import ClassPlan, classes_out_of_sight, plan_classes
from lockstep.port.setup import SETUP_METHODS
from lockstep.port.source import (
    Rename,
    Source,
    attribute_of_self,
    find_all,
    lone_call,
    read,
    with_comments,
)

DEEPSPEED_COMM = '''\
@pytest.fixture
def deepspeed_comm(world):
    """Let deepspeed.comm use the process group of the rank; skip where DeepSpeed's own launcher does."""
    accelerator = get_accelerator()
    if not accelerator.is_available():
        pytest.skip("only supported in accelerator environments.")
    if accelerator.device_count() < world.size:
        pytest.skip(f"{world.size} accelerators required, {accelerator.device_count()} available")
    deepspeed.init_distributed(dist_backend=world.backend)
'''


@dataclass
class Ported:
    """A converted file.

    Attributes:
        code: text of the file; that of the original where there was nothing to convert.
        whole: number of tests that were converted wholly, with the helpers and the set-up they use.
        commented: number of tests that hold, or use, something that is not converted, by a comment.
        left: number of tests in classes that are left as they are.
        notes: what was not converted: `Class.method: reason`.
    """

    code: str
    whole: int = 0
    commented: int = 0
    left: int = 0
    notes: list[str] = field(default_factory=list)


def port(code: str, ranks: int = 2) -> Ported:
    """Convert the multi-process test classes of a file.

    Args:
        code: the file's text.
        ranks: the world size to write where a class takes as many ranks as there are GPUs.

    Raises:
        libcst.ParserSyntaxError: the text is no Python.
        NotPorted: it is too much for libcst, or a class is derived from itself.
        RecursionError: it is nested more deeply than the visitors of libcst can go.
    """
    check_limits(code)
    source = read(code)
    plans = plan_classes(source)
    unseen = classes_out_of_sight(source, plans)
    if not plans and not unseen:
        return Ported(code)
    families: dict[str, FamilyGroups] = {}
    for plan in plans.values():
        if plan.name not in families and not plan.reason:
            scanned = scan_family(plan.family(), source)
            families |= dict.fromkeys((one.name for one in plan.family()), scanned)
    devices = _device_tests(source, plans)
    setting = Setting(source, families, devices, ranks)
    reports = {
        name: ClassConverter(plan, setting).convert() for name, plan in plans.items() if not plan.reason
    }
    converter = _ModuleConverter(source, plans, reports, unseen)
    tree = source.tree.visit(converter)
    needed = set().union(*(report.imports for report in reports.values()))
    if any(plan.kind and plan.kind.is_deepspeed and not plan.reason for plan in plans.values()):
        tree = _with_deepspeed_comm(tree, reports)
        needed |= {"deepspeed", "deepspeed.accelerator.get_accelerator"}
    tree = fix_imports(source.tree, tree, needed) if reports else tree
    ported = Ported(tree.code, notes=converter.notes)
    _count(ported, plans, reports)
    for node in unseen:
        ported.left += sum(name.startswith("test") for name in ClassPlan(node).methods)
    return ported


def _count(ported: Ported, plans: dict[str, ClassPlan], reports: dict[str, ClassReport]) -> None:
    for name, plan in plans.items():
        if plan.reason:
            ported.left += len(plan.tests)
            ported.notes.append(f"{name}: left: {plan.reason}")
            continue
        if reports[name].question:
            ported.notes.append(f"{name}: {reports[name].question}")
        for method, reasons in reports[name].reasons.items():
            where = f"{name}.{method}" if method else name
            ported.notes += [f"{where}: {reason}" for reason in dict.fromkeys(reasons)]
        for test in plan.tests:
            clean = _is_clean(plan, test, reports)
            ported.whole += clean
            ported.commented += not clean


def _is_clean(plan: ClassPlan, test: cst.FunctionDef, reports: dict[str, ClassReport]) -> bool:
    """Return whether nothing is left to do in a test, in the methods it uses, and for its class."""
    family = {one.name: one for one in plan.mro()}
    waiting, seen = [test.name.value, *SETUP_METHODS], set()
    if any(reports[owner].reasons.get("") for owner in family):
        return False
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if any(reports[owner].reasons.get(name) for owner in family):
            return False
        methods = [one.methods[name] for one in family.values() if name in one.methods]
        named = [attribute_of_self(node) for method in methods for node in find_all(method, cst.Attribute)]
        waiting += [one for one in named if one]
    return True


def _device_tests(source: Source, plans: dict[str, ClassPlan]) -> dict[str, str]:
    """Return the fixture `device` for each class that `instantiate_device_type_tests` is called with."""
    found = {}
    for line in source.tree.body:
        call = lone_call(line)
        if call is None or source.testing_name(call.func) != "instantiate_device_type_tests":
            continue
        name = source.code(call.args[0].value) if call.args else ""
        keywords = {arg.keyword.value: source.code(arg.value) for arg in call.args if arg.keyword is not None}
        keywords = {key: value for key, value in keywords.items() if not key.startswith("allow_")}
        plan = plans.get(name)
        if plan is None or plan.reason:
            continue
        if keywords.keys() - {"only_for", "except_for"}:
            plan.reason = "instantiate_device_type_tests with other arguments than only_for and except_for"
            continue
        conditions = {"only_for": "not in", "except_for": "in"}
        lines = [
            f"    if world.device.type {conditions[key]} {_choices(value)}:\n"
            f'        pytest.skip(f"not for {{world.device.type}}")\n'
            for key, value in keywords.items()
        ]
        found[name] = (
            f"@pytest.fixture(autouse=True)\ndef device(self, world):\n{''.join(lines)}"
            "    return world.device.type\n"
        )
    return found


def _choices(code: str) -> str:
    return f"({code},)" if code.startswith(("'", '"')) else code


def _with_deepspeed_comm(tree: cst.Module, reports: dict[str, ClassReport]) -> cst.Module:
    body = list(tree.body)
    at = next(
        index
        for index, item in enumerate(body)
        if isinstance(item, cst.ClassDef) and item.name.value in reports
    )
    fixture = cst.parse_statement(DEEPSPEED_COMM)
    body.insert(at, fixture.with_changes(leading_lines=[cst.EmptyLine(), cst.EmptyLine()]))
    return tree.with_changes(body=body)


class _ModuleConverter(cst.CSTTransformer):
    """Puts the converted classes into the file, under names that pytest collects, and drops the runner."""

    def __init__(
        self,
        source: Source,
        plans: dict[str, ClassPlan],
        reports: dict[str, ClassReport],
        unseen: dict[cst.ClassDef, str],
    ) -> None:
        super().__init__()
        self.source, self.plans, self.reports, self.unseen = source, plans, reports, unseen
        self.notes = [f"{node.name.value}: left: {reason}" for node, reason in unseen.items()]
        self.names = _new_names(plans, source)
        others = [one for one in source.tree.body if isinstance(one, cst.ClassDef) and one.bases]
        is_plain = any(one.name.value not in plans and ClassPlan(one).tests for one in others)
        self.any_left = is_plain or bool(unseen) or any(plan.reason for plan in plans.values())

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        if original_node in self.unseen:
            return with_comments(updated_node, [f"{NOT_CONVERTED} {self.unseen[original_node]}"])
        plan = self.plans.get(original_node.name.value)
        if plan is None or plan.node is not original_node:
            return updated_node
        if plan.reason:
            return with_comments(updated_node, [f"{NOT_CONVERTED} {plan.reason}"])
        renamed = self.reports[plan.name].node.visit(Rename(self.names))
        assert isinstance(renamed, cst.ClassDef)
        return renamed

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        renamed = updated_node.visit(Rename(self.names)) if self.names else updated_node
        assert isinstance(renamed, cst.Module)
        return renamed

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.RemovalSentinel:
        call = lone_call(original_node)
        if call is None or not call.args:
            return updated_node
        name = self.source.code(call.args[0].value)
        makers = ("instantiate_parametrized_tests", "instantiate_device_type_tests")
        if self.source.testing_name(call.func) in makers and name in self.reports:
            return cst.RemoveFromParent()
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If | cst.RemovalSentinel:
        calls = [lone_call(item) for item in original_node.body.body]
        runs = any(call is not None and self.source.testing_name(call.func) == "run_tests" for call in calls)
        is_main = self.source.code(original_node.test).startswith("__name__ ==")
        if not (runs and is_main and original_node.orelse is None) or self.any_left:
            return updated_node
        if all(_means_nothing_to_pytest(item, self.source) for item in original_node.body.body):
            return cst.RemoveFromParent()
        reason = "pytest does not run this block"
        self.notes.append(f'if __name__ == "__main__": {reason}')
        return with_comments(updated_node, [f"{NOT_CONVERTED} {reason}"])


def _means_nothing_to_pytest(statement: cst.CSTNode, source: Source) -> bool:
    """Return whether a statement runs the tests of the file, or asserts what holds before they run."""
    call = lone_call(statement)
    if call is not None:
        return source.testing_name(call.func) == "run_tests"
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    return all(isinstance(one, cst.Assert | cst.Pass) for one in statement.body)


def _new_names(plans: dict[str, ClassPlan], source: Source) -> dict[str, str]:
    """Return new names for classes with tests that pytest does not collect; unittest takes any name."""
    taken = {name.value for name in find_all(source.tree, cst.Name)}
    found: dict[str, str] = {}
    for name, plan in plans.items():
        has_tests = any(one.tests for one in plan.mro())
        if plan.reason or plan.kind is None or not has_tests or name.startswith("Test"):
            continue
        stem = name.strip("_")
        stem = next(
            (stem.removesuffix(end) for end in ("TestCase", "Tests", "Test") if stem.endswith(end)), stem
        )
        new = f"Test{stem}"
        while new in taken or len(new) == len("Test"):
            new += "OnRanks"
        found[name] = new
        taken.add(new)
    return found
