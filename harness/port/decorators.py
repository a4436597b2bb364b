"""Decorators of torch's and unittest's tests as pytest marks, with the same meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lockstep.port.asserts import EQUAL, NotConverted
from lockstep.port.kinds import LauncherKind
from lockstep.port.source import Source, find_all

_DEVICES = "torch.accelerator.device_count()"

_CONDITIONS: dict[str, tuple[str, str]] = {
    "requires_gloo": ("not torch.distributed.is_gloo_available()", "needs the backend gloo"),
    "requires_nccl": ("not torch.distributed.is_nccl_available()", "needs the backend nccl"),
    "requires_ucc": ("not torch.distributed.is_ucc_available()", "needs the backend ucc"),
    "requires_mpi": ("not torch.distributed.is_mpi_available()", "needs the backend mpi"),
    "skip_if_rocm_multiprocess": ("torch.version.hip is not None", "does not run on ROCm"),
    "skipIfRocm": ("torch.version.hip is not None", "does not run on ROCm"),
    "skip_if_no_gpu": (f"{_DEVICES} == 0", "needs an accelerator"),
    "skip_unless_torch_gpu": (f"{_DEVICES} < 2", "needs 2 accelerators"),
}
"""torch's decorators without arguments that matter: when a test is skipped, and why.

As of torch 2.13. skip_if_no_gpu also asks for one GPU a rank; `ranks` under nccl asks for that itself.
"""

_KEPT = {
    *("patch", "patch.object", "patch.dict", "mock.patch", "mock.patch.object", "mock.patch.dict"),
    *("unittest.mock.patch", "unittest.mock.patch.object", "unittest.mock.patch.dict"),
    *(
        "torch.no_grad",
        "torch.enable_grad",
        "torch.inference_mode",
        "staticmethod",
        "classmethod",
        "property",
    ),
    *("functools.wraps", "wraps", "contextmanager", "contextlib.contextmanager", "functools.lru_cache"),
    *("abstractmethod", "abc.abstractmethod", "functools.cached_property", "override", "typing.override"),
    *("torch._inductor.config.patch", "torch._dynamo.config.patch", "config.patch"),
}
"""Decorators that mean the same on any function, with fixtures as arguments, too."""

_PASSES_THROUGH = {
    "fresh_inductor_cache",
    "skipIfTorchDynamo",
    "with_nccl_blocking_wait",
    "suppress_warnings",
}
"""Decorators of `torch.testing._internal` that pass all arguments on, and do not look at `self`."""


@dataclass
class Decorated:
    """The decorators of a function or class, converted.

    Attributes:
        decorators: decorators that stay and that are new.
        imports: dotted names that they need.
        reasons: what was not converted.
        backend: backend of the test's group, as code; "" where they name none.
        size: size of the test's world, as code.
        joined: whether the process group is up when the next decorator is entered.
        comments: comments above decorators that went, if none came after them.
    """

    decorators: list[cst.Decorator] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    backend: str = ""
    size: str = ""
    joined: bool = False
    comments: list[cst.EmptyLine] = field(default_factory=list)


def convert_decorators(
    decorators: Sequence[cst.Decorator], source: Source, kind: LauncherKind | None
) -> Decorated:
    """Convert the decorators of a test, a helper or a class."""
    result = Decorated(joined=kind is not None and kind.joins)
    is_deepspeed = kind is not None and kind.is_deepspeed
    for decorator in decorators:
        try:
            new = _Convert(source, result, is_deepspeed, decorator).convert()
        except NotConverted as reason:
            result.reasons.append(str(reason))
            new = decorator
        if new is None:  # what is said above it is said of the test
            result.comments += [line for line in decorator.leading_lines if line.comment]
        else:
            lines = [*result.comments, *new.leading_lines]
            result.decorators.append(new.with_changes(leading_lines=lines))
            result.comments = []
    return result


@dataclass
class _Convert:
    source: Source
    result: Decorated
    is_deepspeed: bool
    decorator: cst.Decorator

    @property
    def args(self) -> list[cst.Arg]:
        node = self.decorator.decorator
        return list(node.args) if isinstance(node, cst.Call) else []

    def convert(self) -> cst.Decorator | None:
        """Return the decorator that takes this one's place; None if it has none.

        Raises:
            NotConverted: it is not known what the decorator does to the test.
        """
        node = self.decorator.decorator
        func = node.func if isinstance(node, cst.Call) else node
        name = get_full_name_for_node(func) or ""
        origin = self.source.origin(func)
        testing = self.source.testing_name(func)
        if name.startswith("pytest."):
            return self._pytest(name)
        if origin.startswith("unittest.") and not origin.startswith("unittest.mock"):
            return self._unittest(origin.rpartition(".")[2])
        if testing and (handler := getattr(self, f"_{testing}", None)):
            convert: Callable[[], cst.Decorator | None] = handler
            return convert()
        if testing in _CONDITIONS and not self.args:
            condition, reason = _CONDITIONS[testing]
            return self._skipif(condition, f'"{reason}"')
        if name in _KEPT or name.endswith((".setter", ".deleter")) or testing in _PASSES_THROUGH:
            return self.decorator
        raise NotConverted(f"the decorator {name}")

    def _mark(self, code: str) -> cst.Decorator:
        self.result.imports.add("pytest")
        return self.decorator.with_changes(decorator=cst.parse_expression(f"pytest.mark.{code}"))

    def _mark_with(self, mark: str, args: list[cst.Arg]) -> cst.Decorator:
        """Return a mark with these arguments, laid out as the decorator's are."""
        self.result.imports.add("pytest")
        func = cst.parse_expression(f"pytest.mark.{mark}")
        return self.decorator.with_deep_changes(self.decorator.decorator, func=func, args=args)

    def _skipif(self, condition: str, reason: str) -> cst.Decorator:
        if condition.startswith(("torch.", "not torch.")):
            self.result.imports.add("torch")
        return self._mark(f"skipif({condition}, reason={reason})")

    def _pytest(self, name: str) -> cst.Decorator | None:
        if name == "pytest.mark.world_size" and self.is_deepspeed:
            match self.args:
                case [cst.Arg(value=cst.Integer(value=value), star="")]:
                    self.result.size = value
                    return None
            raise NotConverted("a world size that is computed")
        return self.decorator

    def _unittest(self, name: str) -> cst.Decorator:
        match name, self.decorator.decorator:
            case "skip", cst.Call():
                return self._skip("skip")
            case "skip", _:
                return self._mark("skip")
            case "skipIf" | "skipUnless", cst.Call():
                return self._skip(name)
            case "expectedFailure", cst.Name() | cst.Attribute():
                return self._mark("xfail(strict=True)")
        raise NotConverted(f"the decorator {name}")

    def _skip(self, name: str) -> cst.Decorator:
        """Convert a skip, or one with a condition; keep how its arguments are laid out."""
        args = self.args
        names = ["reason"] if name == "skip" else ["condition", "reason"]
        given = [arg.keyword.value if arg.keyword else names[at] for at, arg in enumerate(args[: len(names)])]
        if len(args) != len(names) or given != names or any(arg.star for arg in args):
            raise NotConverted(f"{name} with arguments of another form")
        args[-1] = args[-1].with_changes(keyword=cst.Name("reason"), equal=EQUAL)
        if name != "skip":
            args[0] = args[0].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
        if name == "skipUnless":
            args[0] = args[0].with_changes(value=cst.UnaryOperation(cst.Not(), _closed(args[0].value)))
        return self._mark_with("skip" if name == "skip" else "skipif", args)

    # One method for each decorator of torch.testing._internal that takes arguments; named as it is.

    def _skip_if_lt_x_gpu(self) -> cst.Decorator:
        match [(arg.keyword and arg.keyword.value, self.source.code(arg.value)) for arg in self.args]:
            case [(None, count)]:
                return self._skipif(f"{_DEVICES} < {count}", f'"needs {_text(count)} accelerators"')
            case [(None, count), ("allow_cpu", "True")]:
                return self._skipif(
                    f"0 < {_DEVICES} < {count}", f'"needs {_text(count)} accelerators, or none"'
                )
        raise NotConverted("skip_if_lt_x_gpu with arguments by name")

    def _require_n_gpus_for_nccl_backend(self) -> cst.Decorator:
        return self._gpus_for_nccl(reverse=False)

    def _nccl_skip_if_lt_x_gpu(self) -> cst.Decorator:
        return self._gpus_for_nccl(reverse=True)

    def _gpus_for_nccl(self, *, reverse: bool) -> cst.Decorator:
        if len(self.args) != 2 or any(arg.keyword or arg.star for arg in self.args):
            raise NotConverted("the number of GPUs for nccl, by name")
        codes = [self.source.code(arg.value) for arg in self.args]
        count, backend = reversed(codes) if reverse else codes
        condition = f'{backend} == "nccl" and torch.cuda.device_count() < {count}'
        self.result.imports.add("torch")
        return self._skipif(condition, f'"needs {_text(count)} GPUs"')

    def _requires_world_size(self) -> cst.Decorator:
        count = self._only_argument("requires_world_size")
        self.result.size = count
        return self._skipif(f"torch.cuda.device_count() < {count}", f'"needs {_text(count)} GPUs"')

    def _skip_but_pass_in_sandcastle_if(self) -> cst.Decorator:
        return self._skip("skipIf")

    def _skip_but_pass_in_sandcastle(self) -> cst.Decorator:
        return self._skip("skip")

    def _requires_nccl_version(self) -> cst.Decorator:
        if len(self.args) != 2 or any(arg.keyword or arg.star for arg in self.args):
            raise NotConverted("requires_nccl_version with arguments by name")
        version, reason = (self.source.code(arg.value) for arg in self.args)
        # torch asks for the version only where there is CUDA.
        condition = f"torch.cuda.is_available() and torch.cuda.nccl.version() < {version}"
        return self._skipif(condition, reason)

    def _with_comms(self) -> None:
        self.result.joined = True
        for arg in self.args:
            match arg:
                case cst.Arg(keyword=cst.Name("backend"), value=cst.SimpleString() as value) if (
                    value.evaluated_value in ("gloo", "nccl")
                ):
                    self.result.backend = f'"{value.evaluated_value}"'
                case cst.Arg(keyword=cst.Name("eager_init")):
                    pass  # on ranks a group always knows its device
                case _:
                    raise NotConverted("with_comms with a backend that a world may not have")

    def _with_temp_dir(self) -> None:
        if not self.result.joined:
            raise NotConverted("with_temp_dir where no group is up: each rank had a directory of its own")

    def _instantiate_parametrized_tests(self) -> None:
        return None

    def _parametrize(self) -> cst.Decorator:
        args = self.args
        if len(args) not in (2, 3) or any(arg.star for arg in args):
            raise NotConverted("parametrize with arguments of another form")
        if [arg.keyword.value for arg in args if arg.keyword] not in ([], ["name_fn"]):
            raise NotConverted("parametrize with arguments by name")
        if len(args) == 3:
            names = args[0].value
            if isinstance(names, cst.SimpleString) and "," not in str(names.evaluated_value):
                args[2] = args[2].with_changes(keyword=cst.Name("ids"), equal=EQUAL)
            else:
                self.result.reasons.append("name_fn, dropped: it takes several values, pytest's ids take one")
                args = [args[0], args[1].with_changes(comma=args[2].comma)]
        args[1] = args[1].with_changes(value=self._values(args[1].value, args[0].value))
        return self._mark_with("parametrize", args)

    def _values(self, node: cst.BaseExpression, names: cst.BaseExpression) -> cst.BaseExpression:
        """Return the values of a parametrization, each `subtest` as a `pytest.param`."""
        listed = self.source.constants.get(node.value, node) if isinstance(node, cst.Name) else node
        if not any(self.source.testing_name(call.func) == "subtest" for call in find_all(listed, cst.Call)):
            return node
        if not isinstance(node, cst.List | cst.Tuple) or not isinstance(names, cst.SimpleString):
            raise NotConverted("parametrize with subtests that are not listed here")
        several = "," in str(names.evaluated_value)
        elements = [
            element.with_changes(value=self._param(element.value, several)) for element in node.elements
        ]
        return node.with_changes(elements=elements)

    def _param(self, node: cst.BaseExpression, several: bool) -> cst.BaseExpression:
        if not (isinstance(node, cst.Call) and self.source.testing_name(node.func) == "subtest"):
            return node
        keywords = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
        positional = [arg.value for arg in node.args if arg.keyword is None]
        if len(positional) != 1 or keywords.keys() - {"name"} or any(arg.star for arg in node.args):
            raise NotConverted("a subtest with decorators")
        values = positional[0]
        if several and not isinstance(values, cst.Tuple | cst.List):
            raise NotConverted("a subtest with values that are not listed here")
        args = [cst.Arg(values)]
        if several and isinstance(values, cst.Tuple | cst.List):
            args = [cst.Arg(element.value) for element in values.elements]
        args += [cst.Arg(value, keyword=cst.Name("id"), equal=EQUAL) for value in keywords.values()]
        return cst.Call(cst.parse_expression("pytest.param"), args)

    def _only_argument(self, name: str) -> str:
        match self.args:
            case [cst.Arg(value=value, keyword=None, star="")]:
                return self.source.code(value)
        raise NotConverted(f"{name} with other arguments than one")


def _closed(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression that `not` can stand before."""
    if isinstance(node, cst.Name | cst.Attribute | cst.Call | cst.Subscript) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _text(code: str) -> str:
    return code.replace('"', "'")
