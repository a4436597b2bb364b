"""Converts one class: its marks, its set-up, its tests and helpers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lockstep.port.decorators import Decorated, convert_decorators
from lockstep.port.groups import FamilyGroups
from lockstep.port.kinds import DROPPED_MEMBERS
from lockstep.port.methods import NOT_CONVERTED, MethodConverter
from lockstep.port.plans import PLAIN_BASES, ClassPlan, Size, size_of
from lockstep.port.setup import (
    CLASS_SETUP,
    INSTANCE_SETUP,
    SETUP_METHODS,
    convert_setup,
    setup_reason,
    several_setups,
)
from lockstep.port.source import (
    Rename,
    Source,
    find_all,
    is_docstring,
    is_self,
    parameters,
    with_comments,
)

ON_RANKS = "_on_ranks"
"""The fixture that gives the fixtures of ranks to helpers, which cannot take them as parameters."""


@dataclass
class ClassReport:
    """A converted class, and what to report of it.

    Attributes:
        node: the converted class.
        imports: dotted names that it needs.
        reasons: for each method, and "" for the class, what was not converted.
        question: what the user is asked about its world size.
    """

    node: cst.ClassDef
    imports: set[str] = field(default_factory=set)
    question: str = ""
    reasons: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """The input of the conversion that all classes of a file share.

    Attributes:
        families: the scans of process groups, by name of the class.
        devices: for classes with tests for each device type the condition of `instantiate_device_type_tests`.
        ranks: the world size where it depends on GPUs.
    """

    source: Source
    families: dict[str, FamilyGroups]
    devices: dict[str, str]
    ranks: int


class ClassConverter:
    """Converts a class of a plan that is not left."""

    def __init__(self, plan: ClassPlan, setting: Setting) -> None:
        self.plan, self.setting = plan, setting
        self.source, self.family = setting.source, setting.families[plan.name]
        self.is_deepspeed = plan.kind is not None and plan.kind.is_deepspeed
        self.report = ClassReport(plan.node)
        self.on_self: dict[str, None] = {}
        self.decorated = {
            name: convert_decorators(method.decorators, self.source, plan.kind)
            for name, method in plan.methods.items()
        }

    def convert(self) -> ClassReport:
        body: list[cst.BaseStatement] = []
        comments: list[cst.EmptyLine] = []
        for item in self.plan.node.body.body:
            assert isinstance(item, cst.BaseStatement)
            new = self._member(item)
            if new is None:
                comments += [line for line in getattr(item, "leading_lines", ()) if line.comment]
                continue
            if comments:
                new = new.with_changes(leading_lines=[*comments, *getattr(new, "leading_lines", ())])
                comments = []
            body.append(new)
        first = next((at for at, one in enumerate(body) if isinstance(one, cst.FunctionDef)), len(body))
        body[first:first] = self._fixtures()
        if not any(not is_docstring(one) for one in body):
            body.append(cst.SimpleStatementLine([cst.Pass()]))
        plain = PLAIN_BASES | {one.name for one in self.plan.bases}
        bases = [base for base in self.plan.node.bases if self.source.code(base.value) in plain]
        node = self.plan.node.with_changes(
            bases=_without_last_comma(bases),
            body=self.plan.node.body.with_changes(body=_spaced(body)),
        )
        if not bases:
            node = node.with_changes(lpar=cst.MaybeSentinel.DEFAULT, rpar=cst.MaybeSentinel.DEFAULT)
        self.report.node = self._with_marks(node)
        return self.report

    # Members

    def _member(self, item: cst.BaseStatement) -> cst.BaseStatement | None:
        """Return what a statement of the class's body becomes; None if it goes."""
        if isinstance(item, cst.FunctionDef):
            name = item.name.value
            if name in DROPPED_MEMBERS or name in self.family.emptied:
                return None
            if name in SETUP_METHODS:
                return self._setup(item)
            return self._method(item)
        methods = [] if isinstance(item, cst.ClassDef) else list(find_all(item, cst.FunctionDef))
        if methods:
            reason = "methods below another statement"
            self.report.reasons[methods[0].name.value] = [reason]
            return with_comments(item, [f"{NOT_CONVERTED} {reason}"])  # type: ignore[type-var]
        match item:
            case cst.SimpleStatementLine(
                body=[
                    cst.Assign(targets=[cst.AssignTarget(target=cst.Name(name))])
                    | cst.AnnAssign(target=cst.Name(name))
                ]
            ) if name in DROPPED_MEMBERS or (name == "backend" and self.is_deepspeed):
                return None
        return item

    def _method(self, method: cst.FunctionDef) -> cst.FunctionDef:
        name = method.name.value
        is_test = name.startswith("test")
        decorated = self.decorated[name]
        # Code that calls a test by its name could not give it fixtures.
        takes_fixtures = is_test and name not in self.source.mentioned
        converter = MethodConverter(
            self.plan, method, self.source, self.family, takes_fixtures, self._attributes()
        )
        new = method.with_changes(body=method.body.visit(converter), decorators=decorated.decorators)
        above = [*decorated.reasons, *_reasons_of_signature(method, is_test)]
        if isinstance(method.body, cst.SimpleStatementSuite):
            above += converter.needs.reasons  # no statement of its own could hold the comment
        if is_test and self.is_deepspeed:
            new = self._shared_directory(new, converter, above)
        for fixture in converter.needs.fixtures:
            new = _with_parameter(new, fixture)
        self.on_self |= converter.needs.on_self
        self.report.imports |= decorated.imports | converter.needs.imports
        self.report.reasons[name] = [*above, *converter.needs.reasons]
        if is_test:
            new = self._with_mark_of_test(new, decorated)
        if decorated.comments:
            new = new.with_changes(lines_after_decorators=[*decorated.comments, *new.lines_after_decorators])
        return with_comments(new, [f"{NOT_CONVERTED} {reason}" for reason in above])

    def _attributes(self) -> dict[str, str]:
        """Return what replaces attributes of `self` here, beside those of the kind."""
        found = {}
        family = self.plan.family()
        if any(one.name in self.setting.devices for one in family):
            found["device_type"] = "{}.device.type"
        with_directory = [
            convert_decorators(method.decorators, self.source, one.kind)
            for one in family
            for method in one.tests
            if any(self.source.testing_name(two.decorator) == "with_temp_dir" for two in method.decorators)
        ]
        if with_directory and all(one.joined for one in with_directory):
            found["temp_dir"] = "str({}.shared_tmp_path)"
        return found

    def _shared_directory(
        self, method: cst.FunctionDef, converter: MethodConverter, reasons: list[str]
    ) -> cst.FunctionDef:
        """Give a DeepSpeed test the directory of all ranks for its `tmpdir`, which was the same on all."""
        given = {param.name.value for param in parameters(method)}
        if "class_tmpdir" in given:
            reasons.append("class_tmpdir is shared by the ranks of all tests of the class")
        if "tmpdir" not in given:
            return method
        if any(
            isinstance(one.value, cst.Name) and one.value.value == "tmpdir"
            for one in find_all(method, cst.Attribute)
        ):
            reasons.append("tmpdir is shared by all ranks, and used as a py.path")
            return method
        replaced = Rename({"tmpdir": f"{converter.fixture('world')}.shared_tmp_path"})
        body = method.body.visit(replaced)
        params = [param for param in method.params.params if param.name.value != "tmpdir"]
        return method.with_changes(body=body, params=method.params.with_changes(params=_param_commas(params)))

    # Set-up

    def _setup(self, method: cst.FunctionDef) -> cst.FunctionDef | None:
        """Return None, as a fixture takes the method's place, or the method with a comment why none does."""
        name = method.name.value
        names = INSTANCE_SETUP if name in INSTANCE_SETUP else CLASS_SETUP
        reason = setup_reason(self.plan, self.source, self.family, names)
        if not reason:
            return None
        self.report.reasons[name] = [reason]
        return with_comments(method, [f"{NOT_CONVERTED} {reason}"])

    def _fixtures(self) -> list[cst.FunctionDef]:
        found = []
        for names in (CLASS_SETUP, INSTANCE_SETUP):
            if any(self.report.reasons.get(name) for name in names):
                continue
            setup = convert_setup(self.plan, self.source, self.family, names, self._attributes())
            if setup is not None:
                self.report.imports |= {"pytest", *setup.needs.imports}
                self.report.reasons[names[0]] = setup.needs.reasons
                self.on_self |= setup.needs.on_self
                found.append(setup.node)
        if self.plan.name in self.setting.devices:
            found.append(_function(self.setting.devices[self.plan.name]))
            self.report.imports.add("pytest")
        if self.plan.kind is not None:
            for base in self.plan.mro():
                # A mixin has no ranks of its own; the fixture of a base is overridden by the one here.
                if base is not self.plan and (base.kind is None or self.on_self):
                    converter = ClassConverter(base, self.setting)
                    converter.convert()
                    self.on_self.update(converter.on_self)
        if self.on_self and self.plan.kind is not None:
            self.report.imports.add("pytest")
            found.insert(0, _give_to_self(list(self.on_self)))
        return found

    # Marks

    def _backends(self, test: str) -> set[str]:
        found = {*self.family.backends(self.plan, test)}
        if test in self.decorated and self.decorated[test].backend:
            found.add(self.decorated[test].backend)
        return found - {""}

    def class_backend(self) -> str:
        """Return the backend that all tests with a group name, as code; "" if they differ or name none."""
        stated = _literal_backend(self.plan)
        found = {
            frozenset(backends) for test in self.plan.tests if (backends := self._backends(test.name.value))
        }
        (only,) = found if len(found) == 1 else (frozenset(),)
        return stated or (next(iter(only)) if len(only) == 1 else "")

    def _with_marks(self, node: cst.ClassDef) -> cst.ClassDef:
        decorated = convert_decorators(node.decorators, self.source, self.plan.kind)
        self.report.imports |= decorated.imports
        reasons = [*decorated.reasons, *several_setups(self.plan, self.source, self.family)]
        self.report.reasons[""] = reasons
        decorators = list(decorated.decorators)
        if self.plan.kind is not None:
            decorators += self._marks()
        node = node.with_changes(decorators=decorators)
        if decorated.comments:
            node = node.with_changes(
                lines_after_decorators=[*decorated.comments, *node.lines_after_decorators]
            )
        return with_comments(node, [f"{NOT_CONVERTED} {reason}" for reason in reasons])

    def _marks(self) -> list[cst.Decorator]:
        """Return the marks of the class that its bases in this file do not have already."""
        assert self.plan.kind is not None
        size, backend = self._size(), self.class_backend()
        for base in self.plan.bases:
            if base.kind is not None:
                other = ClassConverter(base, self.setting)
                if other._size().arguments == size.arguments and backend in ("", other.class_backend()):
                    return []
        self.report.imports.add("pytest")
        mark = _decorator(f"pytest.mark.ranks({self._ranks(size.arguments, backend)})")
        if size.question:
            comment = cst.EmptyLine(comment=cst.Comment(f"# lockstep: {size.question}"))
            mark = mark.with_changes(leading_lines=[comment])
            self.report.question = size.question
        marks = [mark]
        if self.plan.kind.needs_gpus:
            self.report.imports.add("torch")
            condition = f"torch.accelerator.device_count() < {size.arguments}"
            marks.insert(
                0, _decorator(f'pytest.mark.skipif({condition}, reason="needs an accelerator for each rank")')
            )
        if self.is_deepspeed:
            marks.insert(0, _decorator('pytest.mark.usefixtures("deepspeed_comm")'))
        return marks

    def _ranks(self, sizes: str, backend: str) -> str:
        """Return the arguments of a mark."""
        # DeepSpeed keeps process groups in its modules, and they end with the test.
        fresh = ", fresh=True" if self.is_deepspeed else ""
        return f"{sizes}, backend={backend}{fresh}" if backend else f"{sizes}{fresh}"

    def _size(self) -> Size:
        return size_of(self.plan, self.source, self.setting.ranks)

    def _with_mark_of_test(self, method: cst.FunctionDef, decorated: Decorated) -> cst.FunctionDef:
        if self.plan.kind is None:
            return method
        backends = self._backends(method.name.value)
        if len(backends) > 1:
            reason = f"several backends: {', '.join(sorted(backends))}"
            self.report.reasons[method.name.value].append(reason)
            return with_comments(method, [f"{NOT_CONVERTED} {reason}"])
        backend = next(iter(backends), "")
        if not decorated.size and backend in ("", self.class_backend()):
            return method
        self.report.imports.add("pytest")
        arguments = self._ranks(decorated.size or self._size().arguments, backend)
        return method.with_changes(
            decorators=[*method.decorators, _decorator(f"pytest.mark.ranks({arguments})")]
        )


def _reasons_of_signature(method: cst.FunctionDef, is_test: bool) -> list[str]:
    """Return what pytest, or the conversion, cannot do with a method for how it is declared."""
    reasons = []
    if is_test and method.asynchronous is not None:
        reasons.append("an async test: pytest needs a plugin for it")
    named = [get_full_name_for_node(one.decorator) for one in method.decorators]
    if not {"staticmethod", "classmethod"} & {*named} and not any(
        is_self(param.name) for param in parameters(method)[:1]
    ):
        reasons.append("its first parameter is not `self`")
    return reasons


def _literal_backend(plan: ClassPlan) -> str:
    """Return the backend that a class states for all of its tests, as code."""
    for one in plan.mro():
        value = one.assigned.get("backend") if one.kind and one.kind.is_deepspeed else None
        method = one.methods.get("backend_str")
        returned = [node.value for node in find_all(method, cst.Return)] if method is not None else [value]
        for node in returned:
            if isinstance(node, cst.SimpleString) and node.evaluated_value in ("gloo", "nccl"):
                return f'"{node.evaluated_value}"'
    return ""


def _decorator(code: str) -> cst.Decorator:
    return cst.Decorator(cst.parse_expression(code))


def _function(code: str) -> cst.FunctionDef:
    statement = cst.parse_statement(code)
    assert isinstance(statement, cst.FunctionDef)
    return statement


def _give_to_self(fixtures: Sequence[str]) -> cst.FunctionDef:
    lines = "".join(f"    self.{name} = {name}\n" for name in fixtures)
    return _function(f"@pytest.fixture(autouse=True)\ndef {ON_RANKS}(self, {', '.join(fixtures)}):\n{lines}")


def _with_parameter(method: cst.FunctionDef, name: str) -> cst.FunctionDef:
    """Add a parameter behind those without defaults; keep one line or one line each."""
    params = list(method.params.params)
    at = next((index for index, param in enumerate(params) if param.default is not None), len(params))
    params.insert(at, cst.Param(cst.Name(name)))
    before = method.whitespace_before_params
    return method.with_changes(params=method.params.with_changes(params=_param_commas(params, before)))


def _param_commas(
    params: Sequence[cst.Param], before: cst.BaseParenthesizableWhitespace | None = None
) -> list[cst.Param]:
    """Give all parameters but the last a comma, as the others have it."""
    broken = isinstance(before, cst.ParenthesizedWhitespace)
    between = cst.Comma(whitespace_after=before if broken and before else cst.SimpleWhitespace(" "))
    last = next((one.comma for one in params[-2:-1]), cst.MaybeSentinel.DEFAULT)
    found = []
    for index, param in enumerate(params):
        is_last = index == len(params) - 1
        keeps = isinstance(param.comma, cst.Comma) and index < len(params) - 2
        comma: cst.Comma | cst.MaybeSentinel = between
        if is_last:
            comma = last if broken else cst.MaybeSentinel.DEFAULT
        elif keeps and isinstance(param.comma, cst.Comma):
            comma = param.comma
        found.append(param.with_changes(comma=comma))
    return found


def _without_last_comma(bases: Sequence[cst.Arg]) -> list[cst.Arg]:
    return [
        base.with_changes(comma=cst.MaybeSentinel.DEFAULT) if index == len(bases) - 1 else base
        for index, base in enumerate(bases)
    ]


def _spaced(body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Put one blank line between methods, and none before the first statement."""
    found: list[cst.BaseStatement] = []
    for index, statement in enumerate(body):
        lines = list(getattr(statement, "leading_lines", ()))
        is_method = isinstance(statement, cst.FunctionDef) or (
            index > 0 and isinstance(body[index - 1], cst.FunctionDef)
        )
        has_blank = any(line.comment is None for line in lines[:1])
        if index == 0:
            while lines and lines[0].comment is None:
                del lines[0]
        elif is_method and not has_blank:
            lines.insert(0, cst.EmptyLine(indent=False))
        found.append(statement.with_changes(leading_lines=lines))
    return found
