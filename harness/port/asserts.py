"""Assertions of unittest and of torch's `TestCase`, as plain asserts, `pytest.raises` and `assert_equal`.

torch's `assertEqual` compares numbers and tensors with tolerances, and containers element by element; so it
becomes `lockstep.assertions.assert_equal`, and a plain `==` only where the code shows that it means the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.helpers import get_full_name_for_node

from lockstep.port.source import attribute_of_self, find_all

ASSERT_EQUAL = "lockstep.assertions.assert_equal"
LINE_LENGTH = 88

_OPERATORS: dict[str, cst.BaseCompOp] = {
    "assertIs": cst.Is(),
    "assertIsNot": cst.IsNot(),
    "assertIn": cst.In(),
    "assertNotIn": cst.NotIn(),
    "assertGreater": cst.GreaterThan(),
    "assertGreaterEqual": cst.GreaterThanEqual(),
    "assertLess": cst.LessThan(),
    "assertLessEqual": cst.LessThanEqual(),
}
_RAISES = {"assertRaises": "raises", "assertWarns": "warns"}
_OWN_TYPE = {"assertDictEqual": "dict", "assertListEqual": "list", "assertSetEqual": "set"}
_DTYPES = ("float", "double", "half", "bfloat", "int", "uint", "long", "short", "bool", "complex", "cfloat")


class NotConverted(Exception):
    """A construct that stays as it is; the message is the reason."""


@dataclass
class Converted:
    """The statement that an assertion becomes.

    Attributes:
        statement: a small statement, or a `with` statement.
        imports: dotted names that it needs.
        comments: comments that stood between the arguments, and have no place in the statement.
    """

    statement: cst.BaseSmallStatement | cst.With
    imports: set[str] = field(default_factory=set)
    comments: list[cst.Comment] = field(default_factory=list)


@dataclass(frozen=True)
class Arguments:
    """The arguments of an assertion: its values, its message, its other keywords."""

    values: Sequence[cst.Arg]
    message: cst.BaseExpression | None
    others: Sequence[cst.Arg]


def arguments_of(call: cst.Call, values: int) -> Arguments:
    """Split the arguments of an assertion that takes this many values and then a message.

    Raises:
        NotConverted: there are starred arguments, or too few or too many.
    """
    if any(arg.star for arg in call.args):
        raise NotConverted("starred arguments")
    positional = [arg for arg in call.args if arg.keyword is None]
    keywords = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
    message = keywords.pop("msg", None)
    if len(positional) == values + 1 and message is None:
        message = positional.pop()
    if len(positional) != values:
        raise NotConverted("arguments that are given by name")
    return Arguments(positional, message.value if message is not None else None, list(keywords.values()))


def convert_statement(name: str, call: cst.Call, source_code: str) -> Converted:
    """Return the statement in the place of the statement `self.<name>(...)`.

    Args:
        call: the call, its arguments converted.
        source_code: the call's code, to see how it was laid out.

    Raises:
        NotConverted: the assertion is not known, or its arguments leave its meaning open.
    """
    if name in ("assertEqual", "assertEquals", "assertNotEqual", "assertAlmostEqual"):
        return _equality(name, call, source_code)
    if name.removesuffix("Regex") in _RAISES:
        return _raising_call(name, call)
    if name in ("assertIsInstance", "assertNotIsInstance", "assertRegex"):
        return _calling(name, call, source_code)
    if name in _OPERATORS:
        found = arguments_of(call, 2)
        _refuse_keywords(found)
        left, right = (_operand(arg.value) for arg in found.values)
        return _assert(_compare(left, _OPERATORS[name], right), found, call, source_code)
    if name in ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone"):
        return _single(name, call, source_code)
    if name in (*_OWN_TYPE, "assertCountEqual"):
        return _container(name, call, source_code)
    raise NotConverted(f"{name} has no counterpart here")


def convert_context(name: str, call: cst.Call) -> cst.Call:
    """Return the call for `self.assertRaises(E)` and its like, used as a context manager.

    Raises:
        NotConverted: the assertion is not one of these, or has arguments of another form.
    """
    base = name.removesuffix("Regex")
    if base not in _RAISES:
        raise NotConverted(f"{name} inside an expression")
    patterns = name.endswith("Regex")
    if len(call.args) != 1 + patterns or any(arg.star for arg in call.args):
        raise NotConverted(
            f"{name} with other arguments than the {'type and the pattern' if patterns else 'type'}"
        )
    names = [arg.keyword.value for arg in call.args if arg.keyword is not None]
    if names not in (
        [],
        ["expected_regex"],
        ["expected_exception"],
        ["expected_exception", "expected_regex"],
    ):
        raise NotConverted(f"{name} with the keywords {', '.join(names)}")
    first = call.args[0].with_changes(keyword=None, equal=cst.MaybeSentinel.DEFAULT)
    args = [first]
    if patterns:
        pattern = call.args[1]
        if isinstance(pattern.value, cst.SimpleString) and pattern.value.evaluated_value == "":
            args = [first.with_changes(comma=cst.MaybeSentinel.DEFAULT)]
        else:
            args.append(pattern.with_changes(keyword=cst.Name("match"), equal=EQUAL))
    return call.with_changes(func=cst.parse_expression(f"pytest.{_RAISES[base]}"), args=args)


def _equality(name: str, call: cst.Call, source_code: str) -> Converted:
    if name == "assertAlmostEqual":
        return _almost(call)
    found = arguments_of(call, 2)
    left, right = (_operand(arg.value) for arg in found.values)
    if not found.others and (operator := _exact_operator(left, right, negated="Not" in name)) is not None:
        if _is_none(left):
            left, right = right, left
        return _assert(_compare(left, operator, right), found, call, source_code)
    check_keywords(found.others)
    plain = call.with_changes(func=cst.Name("assert_equal"))
    if "Not" not in name:
        return Converted(cst.Expr(plain), {ASSERT_EQUAL})
    statement = _with_block("pytest.raises(AssertionError)", plain)
    return Converted(statement, {ASSERT_EQUAL, "pytest"})


def check_keywords(args: Sequence[cst.Arg]) -> None:
    """Check that `assert_equal` means the same by the keywords of an `assertEqual`.

    Raises:
        NotConverted: one is of torch's alone, which compares more, or rtol or atol stands alone.
    """
    keywords = {arg.keyword.value for arg in args if arg.keyword is not None}
    if unknown := sorted(
        keywords - {"msg", "rtol", "atol", "equal_nan", "exact_dtype", "exact_device", "exact_stride"}
    ):
        raise NotConverted(f"assertEqual with {unknown[0]}")
    if ("rtol" in keywords) != ("atol" in keywords):
        raise NotConverted("assertEqual with one of rtol and atol")


def _almost(call: cst.Call) -> Converted:
    if len([arg for arg in call.args if arg.keyword is None]) != 2:
        raise NotConverted("assertAlmostEqual with other positional arguments than two")
    found = arguments_of(call, 2)
    keywords = {arg.keyword.value: arg.value for arg in found.others if arg.keyword is not None}
    match keywords:
        case {"delta": delta, **rest} if not rest:
            atol = delta
        case {"places": cst.Integer(value=places), **rest} if not rest:
            atol = cst.parse_expression(f"5e-{int(places) + 1}")
        case {**rest} if not rest:
            atol = cst.parse_expression("5e-8")  # unittest: 7 places
        case _:
            raise NotConverted("assertAlmostEqual with places that are computed")
    names = {"rtol": cst.Integer("0"), "atol": atol}
    names |= {"equal_nan": cst.Name("False"), "exact_dtype": cst.Name("False")}
    args = [arg.with_changes(comma=_COMMA) for arg in found.values]
    args += [_keyword(key, value) for key, value in names.items()]
    if found.message is not None:
        args.append(_keyword("msg", found.message))
    return Converted(cst.Expr(_call("assert_equal", args)), {ASSERT_EQUAL}, _comments(call))


def _single(name: str, call: cst.Call, source_code: str) -> Converted:
    found = arguments_of(call, 1)
    _refuse_keywords(found)
    value = found.values[0].value
    if isinstance(value, cst.Tuple | cst.GeneratorExp):
        raise NotConverted(f"{name} of something that is always true")
    if name in ("assertIsNone", "assertIsNotNone"):
        operator: cst.BaseCompOp = cst.Is() if name == "assertIsNone" else cst.IsNot()
        return _assert(_compare(_operand(value), operator, cst.Name("None")), found, call, source_code)
    if name == "assertTrue":
        loose = isinstance(value, cst.NamedExpr | cst.Yield) and not value.lpar
        return _assert(_parenthesised(value) if loose else value, found, call, source_code)
    inverted = {cst.In: cst.NotIn(), cst.NotIn: cst.In(), cst.Is: cst.IsNot(), cst.IsNot: cst.Is()}
    match value:
        case cst.Comparison(comparisons=[target]) if type(target.operator) in inverted:
            operator = inverted[type(target.operator)]
            test: cst.BaseExpression = value.with_changes(
                comparisons=[target.with_changes(operator=operator)]
            )
        case cst.BooleanOperation() | cst.IfExp() | cst.Lambda() | cst.NamedExpr() if not value.lpar:
            test = cst.UnaryOperation(cst.Not(), _parenthesised(value))
        case _:
            test = cst.UnaryOperation(cst.Not(), value)
    return _assert(test, found, call, source_code)


def _calling(name: str, call: cst.Call, source_code: str) -> Converted:
    found = arguments_of(call, 2)
    _refuse_keywords(found)
    values = [arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in found.values]
    if name == "assertRegex":
        test: cst.BaseExpression = _call("re.search", [values[1].with_changes(comma=_COMMA), values[0]])
        converted = _assert(test, found, call, source_code)
        converted.imports.add("re")
        return converted
    test = _call("isinstance", [values[0].with_changes(comma=_COMMA), values[1]])
    if name == "assertNotIsInstance":
        test = cst.UnaryOperation(cst.Not(), test)
    return _assert(test, found, call, source_code)


def _container(name: str, call: cst.Call, source_code: str) -> Converted:
    """Convert a comparison that asks for a type too, where one side is a display of that type."""
    found = arguments_of(call, 2)
    _refuse_keywords(found)
    displays = {
        "dict": (cst.Dict, cst.DictComp),
        "list": (cst.List, cst.ListComp),
        "set": (cst.Set, cst.SetComp),
    }
    wanted = _OWN_TYPE.get(name)
    values = [arg.value for arg in found.values]
    makers = {wanted, "sorted"} if wanted == "list" else {wanted}
    is_shown = wanted is not None and any(
        isinstance(value, displays[wanted])
        or (isinstance(value, cst.Call) and get_full_name_for_node(value.func) in makers)
        for value in values
    )
    if not is_shown:
        raise NotConverted(f"{name}: the types of both sides are open")
    left, right = (_operand(value) for value in values)
    return _assert(_compare(left, cst.Equal(), right), found, call, source_code)


def _raising_call(name: str, call: cst.Call) -> Converted:
    """Convert the statement `self.assertRaises(E, function, *args)`."""
    count = 2 if name.endswith("Regex") else 1
    head, rest = call.args[:count], call.args[count:]
    if not rest or rest[0].star or rest[0].keyword or any(arg.keyword or arg.star for arg in head):
        raise NotConverted(f"{name} without the function it calls")
    context = convert_context(name, call.with_changes(args=_without_commas(head)))
    context = _call(get_full_name_for_node(context.func) or "", context.args)
    function = _operand(rest[0].value)
    body = cst.Call(function, _without_commas(rest[1:]))
    return Converted(_with_block(context, body), {"pytest"}, _comments(call))


def _exact_operator(
    left: cst.BaseExpression, right: cst.BaseExpression, *, negated: bool
) -> cst.BaseCompOp | None:
    """Return the operator that means the same as torch's assertEqual for these two, or None."""
    if _is_none(left) or _is_none(right):
        return cst.IsNot() if negated else cst.Is()
    both = (left, right)
    text = cst.SimpleString | cst.FormattedString | cst.ConcatenatedString
    is_exact = any(isinstance(side, text) or _is_dtype(side) for side in both)
    if is_exact or all(map(_is_whole_number, both)):
        return cst.NotEqual() if negated else cst.Equal()
    return None


def _is_none(node: cst.BaseExpression) -> bool:
    return isinstance(node, cst.Name) and node.value == "None"


def _is_dtype(node: cst.BaseExpression) -> bool:
    match node:
        case cst.Attribute(value=cst.Name("torch"), attr=cst.Name(name)):
            return name.startswith(_DTYPES) and (name[-1].isdigit() or name in _DTYPES)
    return False


def _is_whole_number(node: cst.BaseExpression) -> bool:
    """Return whether the code alone shows that an expression is an int."""
    match node:
        case cst.Integer():
            return True
        case cst.UnaryOperation(operator=cst.Minus(), expression=expression):
            return _is_whole_number(expression)
        case cst.BinaryOperation(left=left, operator=operator, right=right):
            keeps = isinstance(operator, cst.Add | cst.Subtract | cst.Multiply | cst.FloorDivide | cst.Modulo)
            return keeps and _is_whole_number(left) and _is_whole_number(right)
        case cst.Call(func=func):
            name = get_full_name_for_node(func) or ""
            return name == "len" or name.rpartition(".")[2] in ("get_rank", "get_world_size", "numel", "dim")
        case cst.Attribute():
            name = get_full_name_for_node(node) or ""
            return name in ("world.rank", "world.size", "self.world.rank", "self.world.size")
    return False


def _refuse_keywords(found: Arguments) -> None:
    if found.others:
        raise NotConverted("arguments that are given by name")


def _operand(node: cst.BaseExpression) -> cst.BaseExpression:
    """Return an expression as one side of a comparison, in parentheses where it binds less."""
    loose = cst.BooleanOperation | cst.Comparison | cst.IfExp | cst.Lambda | cst.NamedExpr | cst.Yield
    is_loose = isinstance(node, loose) or (
        isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not)
    )
    if (is_loose or isinstance(node, cst.GeneratorExp)) and not node.lpar:
        return _parenthesised(node)
    return node


def _parenthesised(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _compare(left: cst.BaseExpression, operator: cst.BaseCompOp, right: cst.BaseExpression) -> cst.Comparison:
    return cst.Comparison(left, [cst.ComparisonTarget(operator, right)])


_COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
_BREAK = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))


def _assert(test: cst.BaseExpression, found: Arguments, call: cst.Call, source_code: str) -> Converted:
    """Return `assert test, message`, in parentheses where it would not fit or not parse on one line."""
    comma = _COMMA if found.message is not None else cst.MaybeSentinel.DEFAULT
    plain = cst.Assert(test, found.message, comma)
    code = cst.Module([]).code_for_node(plain)
    own_lines = isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace)
    fits = "\n" not in code and (len(code) <= LINE_LENGTH - 8 or "\n" not in source_code)
    if not fits and (own_lines or not _parses(code)) and not test.lpar:
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            target = test.comparisons[0]
            operator = target.operator.with_changes(whitespace_before=_BREAK)
            test = test.with_changes(comparisons=[target.with_changes(operator=operator)])
        broken = test.with_changes(
            lpar=[cst.LeftParen(whitespace_after=_BREAK)],
            rpar=[cst.RightParen(whitespace_before=cst.ParenthesizedWhitespace(indent=True))],
        )
        plain = plain.with_changes(test=broken)
    if found.message is not None and not _parses(f"x({(cst.Module([]).code_for_node(found.message))})"):
        raise NotConverted("a message that does not stand alone")
    if found.message is not None and not _parses(cst.Module([]).code_for_node(found.message)):
        plain = plain.with_changes(msg=_parenthesised(found.message))
    return Converted(plain, set(), _comments(call))


def _parses(code: str) -> bool:
    try:
        return len(cst.parse_module(code).body) == 1
    except cst.ParserSyntaxError:
        return False


def _comments(call: cst.Call) -> list[cst.Comment]:
    """Return the comments between the arguments of a call."""
    places: list[cst.CSTNode] = [call.whitespace_before_args]
    for arg in call.args:
        places += [arg.comma] if isinstance(arg.comma, cst.Comma) else []
        places.append(arg.whitespace_after_arg)
    return [comment for place in places for comment in find_all(place, cst.Comment)]


def _with_block(context: str | cst.BaseExpression, call: cst.Call) -> cst.With:
    item = cst.parse_expression(context) if isinstance(context, str) else context
    body = cst.IndentedBlock([cst.SimpleStatementLine([cst.Expr(call)])])
    return cst.With([cst.WithItem(item)], body)


EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    return cst.Arg(value, keyword=cst.Name(name), equal=EQUAL)


def _call(function: str, args: Sequence[cst.Arg]) -> cst.Call:
    return cst.Call(cst.parse_expression(function), _without_commas(args))


def _without_commas(args: Sequence[cst.Arg]) -> list[cst.Arg]:
    return [cst.Arg(arg.value, keyword=arg.keyword, equal=arg.equal, star=arg.star) for arg in args]


def is_assertion(name: str) -> bool:
    return name.startswith("assert") and name[6:7].isupper()


def assertion_of(call: cst.Call) -> str:
    """Return the name of the assertion that a call makes, else ""."""
    name = attribute_of_self(call.func)
    return name if is_assertion(name) else ""
