"""Unit tests of the imports of a ported file, and of the questions that are asked about its code."""

from __future__ import annotations

import libcst as cst
import pytest

from lockstep.port import source as sources
from lockstep.port.imports import fix_imports
from lockstep.port.module import _choices, _means_nothing_to_pytest, _new_names
from lockstep.port.plans import plan_classes
from lockstep.port.source import Rename, Source, read


def fixed(before: str, after: str | None = None, *needed: str) -> str:
    return fix_imports(cst.parse_module(before), cst.parse_module(after or before), {*needed}).code


@pytest.mark.parametrize(
    ("code", "needed", "expected"),
    [
        ("x = 1\n", "pytest", "import pytest\nx = 1\n"),
        ('"""Doc."""\nx = 1\n', "pytest", '"""Doc."""\nimport pytest\nx = 1\n'),
        ("import pytest\n", "pytest", "import pytest\n"),
        ("import pytest as p\n", "pytest", "import pytest\nimport pytest as p\n"),
        ("from a import pytest\n", "pytest", "from a import pytest\n"),
        ("import os\n\nimport torch\n", "pytest", "import os\n\nimport pytest\nimport torch\n"),
        ("import os\n\nimport torch\n", "re", "import os\nimport re\n\nimport torch\n"),
        ("import os\n\nimport torch\n", "ast", "import ast\nimport os\n\nimport torch\n"),
        ("\nimport torch\n", "os", "\nimport os\nimport torch\n"),
        ("from b import c\n", "a", "import a\nfrom b import c\n"),
        ("import b\n", "a.c", "import b\nfrom a import c\n"),
        ("import a\nfrom .b import c\n", "z", "import a\nimport z\nfrom .b import c\n"),
        ("from __future__ import x\n", "os", "from __future__ import x\nimport os\n"),
        ("import a\nclass A: pass\nimport b\n", "c", "import a\nimport c\nclass A: pass\nimport b\n"),
        ("import a\ndef f(): pass\nimport b\n", "c", "import a\nimport c\ndef f(): pass\nimport b\n"),
        ("from a import *\n", "a.b", "from a import b\nfrom a import *\n"),
    ],
)
def test_an_import_stands_where_imports_are_sorted(code: str, needed: str, expected: str) -> None:
    assert fixed(code, None, needed) == expected


def test_imports_are_added_in_order_and_once() -> None:
    assert fixed("x\n", None, "pytest", "a.b", "c.d", "re") == (
        "import re\nimport pytest\nfrom a import b\nfrom c import d\nx\n"
    )


@pytest.mark.parametrize(
    ("imports", "used", "still", "left"),
    [
        ("import a\n", "a", "b", ""),
        ("import a\n", "c", "b", "import a\n"),
        ("import a\n", "a", "a", "import a\n"),
        ("import a.b\n", "a.b", "c", ""),
        ("import a as c\n", "c", "b", ""),
        ("import a, b\n", "a", "b", "import b\n"),
        ("import a, b\n", "b", "a", "import a\n"),
        ("import a; import b\n", "a", "b", "import b\n"),
        ("from a import (\n    b,\n    c,\n)\n", "b, c", "b", "from a import (\n    b,\n)\n"),
        ("from a import b, c\n", "b", "c", "from a import c\n"),
        ("from a import b\n", "b", "c", ""),
        ("from a import *\n", "b", "c", "from a import *\n"),
        ("def f():\n    import a\n", "a", "b", "def f():\n    import a\n"),
        ("class A:\n    import a\n", "a", "b", "class A:\n    import a\n"),
        # What names a module without using it
        ("import a\n", "x = a", "x.a", ""),
        ("import a\n", "x = a", "f(a=1)", ""),
        ("import a\n", "x = a", "def f(a): pass", ""),
        ("import a\n", "x = a", "def a(): pass", ""),
        # What uses it
        ("import a\n", "x = a", "a.x", "import a\n"),
        ("import a\n", "x = a", "f(x=a)", "import a\n"),
        ("import a\n", "x = a", "def f(x: a): pass", "import a\n"),
        ("import a\n", "x = a", "def f(x=a): pass", "import a\n"),
        ("import a\n", "x = a", "def f() -> a: pass", "import a\n"),
        ("import a\n", "x = a", "@a\ndef f(): pass", "import a\n"),
        ("import a\n", "x = a", "def f(): a", "import a\n"),
        ("import a\n", "x = a", "patch('a.b')", "import a\n"),
        ("import a\n", "x = a", "patch('of a')", ""),
        ("import a\n", "x = a", "patch(b'a')", ""),
    ],
)
def test_imports_go_that_the_conversion_made_unused(imports: str, used: str, still: str, left: str) -> None:
    assert fixed(f"{imports}{used}\n", f"{imports}{still}\n") == f"{left}{still}\n"


# The file as it is read

FILE = """\
import a.b
import c.d as e
from torch.distributed import init_process_group as init, barrier
from torch.testing._internal.x import y
from . import near
from ..far import thing
from star import *
ONE = 1
TWO = 2
TWO = 3
x.y = z = 4
if A:
    THREE = 5
elif B:
    FOUR = 6
else:
    import inner
try:
    FIVE = 7
except E:
    SIX = 8
with A:
    SEVEN = 9

def joins():
    init("gloo")

def other():
    barrier()

class A:
    EIGHT = 10
"""


def expression(code: str) -> cst.BaseExpression:
    return cst.parse_expression(code)


def test_names_of_a_file_are_those_at_module_level() -> None:
    file = read(FILE)
    assert file.imports == {
        "a": "a",
        "e": "c.d",
        "init": "torch.distributed.init_process_group",
        "barrier": "torch.distributed.barrier",
        "y": "torch.testing._internal.x.y",
        "near": "..near",
        "thing": "..far.thing",
        "inner": "inner",
    }
    constants = {name: file.code(value) for name, value in file.constants.items()}
    numbers = {"ONE": "1", "z": "4", "THREE": "5", "FOUR": "6", "FIVE": "7", "SIX": "8", "SEVEN": "9"}
    assert constants == numbers
    assert file.joining == {"joins"}
    assert file.mentioned == {"b", "d", "distributed", "testing", "_internal", "x", "y"}
    assert [file.code(call) for call in file.lone_calls] == ['init("gloo")', "barrier()"]


def test_the_origin_of_a_name_is_that_of_its_import() -> None:
    file = read(FILE)
    names = ("e.f", "e", "init", "nothing", "init()", "a.b.c")
    assert [file.origin(expression(name)) for name in names] == [
        *("c.d.f", "c.d", "torch.distributed.init_process_group", "", "", "a.b.c")
    ]
    assert [file.testing_name(expression(name)) for name in ("y", "init", "z")] == ["y", "", ""]
    assert [file.distributed_name(expression(name)) for name in ("init", "y", "z")] == [
        *("init_process_group", "", "")
    ]


@pytest.mark.parametrize(
    ("code", "is_own"),
    [
        ("", False),
        ("from lockstep.assertions import assert_equal", False),
        ("from other import assert_equal", True),
        ("def assert_equal(): pass", True),
        ("assert_equal = 1", True),
    ],
)
def test_another_function_of_the_name_assert_equal_is_seen(code: str, is_own: bool) -> None:
    assert read(f"{code}\n").has_own_assert_equal is is_own


def test_small_questions_about_code() -> None:
    of_self = [
        sources.attribute_of_self(expression(code)) for code in ("self.a", "cls.b", "x.c", "self", "self.a.b")
    ]
    assert of_self == ["a", "b", "", "", ""]
    assert sources.attribute_of_self(expression("cls.b"), ("self",)) == ""
    supers = [sources.super_call(expression(code)) for code in ("super().a()", "super().a", "x().a()")]
    assert supers == ["a", "", ""]
    assert [sources.is_self(expression(code)) for code in ("self", "other", "self.a")] == [True, False, False]
    statements = [
        cst.parse_statement(f"{code}\n") for code in ('"x"', '"x" "y"', "x", "x()", "x(); y()", "y = x()")
    ]
    assert [sources.is_docstring(each) for each in statements] == [True, True, *[False] * 4]
    calls = [sources.lone_call(each) is not None for each in statements]
    assert calls == [False, False, False, True, False, False]
    function = cst.ensure_type(cst.parse_statement("def f(a, /, b, *c, d, **e): pass\n"), cst.FunctionDef)
    assert [each.name.value for each in sources.parameters(function)] == ["a", "b", "d"]


def test_comments_stand_above_a_statement_once() -> None:
    (statement,) = cst.parse_module("# old\nx\n").body
    made = sources.with_comments(cst.parse_statement("# one\nx\n"), ["one", "two", "two"])  # type: ignore[type-var]
    assert cst.Module([made]).code == "# one\n# two\nx\n"
    assert statement is not made


@pytest.mark.parametrize(
    ("code", "blocks"),
    [
        ("if a:\n    b\nelif c:\n    d\nelse:\n    e\n", ["b", "d", "e"]),
        ("if a:\n    b\n", ["b"]),
        ("with a:\n    b\n", ["b"]),
        ("try:\n    a\nexcept E:\n    b\nfinally:\n    c\n", ["a", "c"]),
        ("try:\n    a\nexcept E:\n    b\n", ["a"]),
        ("def f():\n    a\n", []),
        ("a\n", []),
    ],
)
def test_the_blocks_of_a_statement(code: str, blocks: list[str]) -> None:
    found = list(sources.blocks_of(cst.parse_statement(code)))
    assert [cst.Module(list(block)).code.strip() for block in found] == blocks  # type: ignore[arg-type]


def test_names_are_replaced_but_not_those_of_attributes_and_keywords() -> None:
    code = "a + (a) + x.a + f(a=a) + a.x + b\n"
    assert cst.parse_module(code).visit(Rename({"a": "c.d"})).code == (
        "c.d + (c.d) + x.a + f(a=c.d) + c.d.x + b\n"
    )


# What is said of a file as a whole


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("OneTest", "TestOne"),
        ("OneTests", "TestOne"),
        ("OneTestCase", "TestOne"),
        ("_One_", "TestOne"),
        ("Test_", None),
        ("TestOne", None),
        ("Tests", None),
        ("_Test", "TestOnRanks"),
    ],
)
def test_a_class_gets_a_name_that_pytest_collects(name: str, new: str | None) -> None:
    head = "from torch.testing._internal.common_distributed import MultiProcessTestCase\n"
    set_up = "    def setUp(self):\n        super().setUp()\n        self._spawn_processes()\n"
    source = read(f"{head}class {name}(MultiProcessTestCase):\n{set_up}    def test_a(self): pass\n")
    assert _new_names(plan_classes(source), source) == ({} if new is None else {name: new})


def test_blocks_that_only_run_tests_mean_nothing_to_pytest() -> None:
    source = read("from torch.testing._internal.common_utils import run_tests\n")
    meant = [
        _means_nothing_to_pytest(cst.parse_statement(f"{code}\n"), source)
        for code in ("run_tests()", "assert x", "pass", "pass; assert x", "pass; x", "x()", "if x: pass")
    ]
    assert meant == [True, True, True, True, False, False, False]
    assert [_choices(code) for code in ("'cpu'", '"cpu"', "('cpu', 'cuda')")] == [
        *("('cpu',)", '("cpu",)', "('cpu', 'cuda')")
    ]


def test_the_code_of_a_node_is_that_of_the_file() -> None:
    assert Source(cst.parse_module("")).code(expression("a + b")) == "a + b"
