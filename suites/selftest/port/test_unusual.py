"""Constructs that `python -m lockstep port` must not convert by guess."""

from __future__ import annotations

import textwrap

import pytest

from lockstep.port.module import port
from suites.selftest.port.test_constructs import method, statement

CASE = """\
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

class TestOne(MultiProcessTestCase):
    exec_timeout = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_one(self):
        self.assertEqual(x, y)
"""


def comments(code: str) -> list[str]:
    marked = [line.strip() for line in code.splitlines() if "lockstep: not converted" in line]
    return [line.removeprefix("# lockstep: not converted: ") for line in marked]


def test_the_exception_is_read_where_pytest_has_it_or_left() -> None:
    code = """
        with self.assertRaises(ValueError) as found:
            x()
        y(found.exception)
        y(found)
        with self.assertRaises(ValueError) as self.found:
            x()
        raises = self.assertRaises(ValueError)"""
    lines = statement(code).splitlines()
    assert "y(found.value)" in lines
    assert lines[lines.index("y(found)") - 1].endswith("found is used for something other than its exception")
    assert "with self.assertRaises(ValueError) as self.found:" in lines
    assert "raises = self.assertRaises(ValueError)" in lines


def test_a_group_that_is_expected_to_fail_stays() -> None:
    code = "with self.assertRaises(ValueError):\n    dist.init_process_group('gloo', rank=self.rank)"
    lines = [line.strip() for line in statement(code).splitlines()]
    assert lines[1:] == [
        "# lockstep: not converted: a process group that is expected to fail",
        "dist.init_process_group('gloo', rank=self.rank)",
    ]


def test_a_test_that_reads_a_global_named_world_finds_the_fixture_on_self() -> None:
    assert method("x(world, self.rank)").endswith("    x(world, self.world.rank)")


def test_a_fixture_for_helpers_holds_what_those_of_a_base_need() -> None:
    helper = "    def help_{0}(self):\n        return self.{1}\n"
    base = CASE + helper.format("one", "run_subtests({}, x)")
    derived = "class TestTwo(TestOne):\n" + helper.format("two", "rank")
    code = port(base + derived).code
    assert "def _on_ranks(self, world, run_subtests):" in code[code.index("class TestTwo") :]


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ("def test_two(self): self.assertTrue(x)", "an assertion behind a colon, on the same line"),
        ("async def test_two(self):\n    await x()", "an async test: pytest needs a plugin for it"),
        ("def test_two(this):\n    this.assertTrue(x)", "its first parameter is not `self`"),
        ("if x:\n    def test_two(self):\n        self.fail()", "methods below another statement"),
        ("@classmethod\n@x\ndef setUpClass(cls):\n    x()", "a set-up with decorators"),
        ("@classmethod\ndef setUpClass(cls): x()", "a set-up on the line of its def"),
    ],
)
def test_a_member_that_is_not_known_stays_with_a_comment(members: str, why: str) -> None:
    ported = port(CASE + textwrap.indent(members, "    ") + "\n")
    assert comments(ported.code) == [why]
    assert textwrap.indent(members, "    ") in ported.code
    assert ported.commented > 0 or "below" in why


@pytest.mark.parametrize(
    ("tear_down", "why"),
    [
        ("if x:\n    return\ny()", "a set-up that returns early"),
        ("z = 3\ny(z)", "z is a local name in tearDown alone"),
    ],
)
def test_a_set_up_stays_whole_where_its_tear_down_stays(tear_down: str, why: str) -> None:
    code = CASE.replace("_processes()\n", "_processes()\n        x(z)\n")
    ported = port(f"{code}    def tearDown(self):\n{textwrap.indent(tear_down, ' ' * 8)}\n")
    assert comments(ported.code) == [why, why]
    assert "        x(z)\n" in ported.code


def test_set_ups_of_two_mixins_get_a_comment() -> None:
    mixins = "".join(f"class {name}:\n    def setUp(self):\n        x()\n" for name in "AB")
    both = port(mixins + CASE.replace("(Multi", "(A, B, Multi"))
    assert comments(both.code) == ["A and B have a set-up; pytest would run one of them alone"]
    base = CASE.replace("_processes()\n", "_processes()\n        x()\n")
    derived = "class TestTwo(TestOne):\n    def setUp(self):\n        self._spawn_processes()\n"
    assert comments(port(base + derived).code) == ["it takes the place of that of a base"]


def test_comments_at_the_end_of_a_set_up_are_kept() -> None:
    code = CASE.replace("_processes()\n", "_processes()\n        x()\n        # last\n")
    assert "        x()\n        # last\n" in port(code).code


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("import MultiProcessTestCase", "import *", "MultiProcessTestCase comes from an import of `*`"),
        (
            "class TestOne",
            "from x import assert_equal\n\nclass TestOne",
            "the file has a function assert_equal",
        ),
        ("class TestOne", "class Outer:\n class TestOne", "it is not at module level, or another class has"),
    ],
)
def test_a_class_that_is_out_of_sight_is_left(before: str, after: str, why: str) -> None:
    code = CASE.replace(before, after)
    if "Outer" in after:
        head, _, body = code.partition("class Outer:\n ")
        code = f"{head}class Outer:\n{textwrap.indent(body, '    ')}"
    ported = port(code + 'if __name__ == "__main__":\n    run_tests()\n')
    assert (ported.whole, ported.commented, ported.left) == (0, 0, 1)
    assert comments(ported.code)[0].startswith(why)
    assert "run_tests()" in ported.code


def test_a_name_of_another_object_is_not_changed_with_that_of_the_class() -> None:
    code = CASE.replace("TestOne", "OneTest") + "        x.OneTest(OneTest=OneTest)\n"
    assert "x.OneTest(OneTest=TestOne)" in port(code).code


def test_a_main_block_that_does_more_and_plain_tests_keep_their_runner() -> None:
    main = 'if __name__ == "__main__":\n    {}run_tests()\n'
    assert "run_tests" not in port(CASE + main.format("assert x\n    ")).code
    more = port(CASE + main.format("x()\n    "))
    assert comments(more.code) == ["pytest does not run this block"]
    plain = "class Plain(TestCase):\n    def test_two(self):\n        pass\n"
    assert main.format("") in port(CASE + plain + main.format("")).code


def test_imports_stand_above_the_first_class() -> None:
    code = port(CASE + "import zipfile\n").code
    assert code.index("import pytest") < code.index("class TestOne")


def test_line_ends_and_tabs_are_kept() -> None:
    code = CASE.replace("    ", "\t").replace("\n", "\r\n") + "\t\tself.assertNotEqual(x, y)\r\n"
    converted = port(code).code
    assert "\t\twith pytest.raises(AssertionError):\r\n\t\t\tassert_equal(x, y)\r\n" in converted
    assert "\n" not in converted.replace("\r\n", "")
    assert "    " not in converted


def test_a_copy_of_distributed_test_is_not_taken_for_deepspeeds() -> None:
    code = (
        "from dist_common import DistributedTest\nclass TestX(DistributedTest):\n    def test_x(self): pass\n"
    )
    assert port(code).code == code
