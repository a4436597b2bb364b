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
        ("yield", "a set-up that is a generator or a coroutine"),
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
    more = derived.replace("self._spawn_processes()", "super().setUp()\n        y()")
    assert comments(port(base + more).code) == [
        "a base has a set-up, too; pytest would run them in an order of its own"
    ]


@pytest.mark.parametrize(
    ("tear_down", "goes"),
    [
        ("try:\n    os.remove(self.file_name)\nexcept OSError:\n    pass", True),
        ("try:\n    os.remove(self.file_name)\nexcept OSError:\n    raise", False),
        ("with contextlib.suppress(OSError):\n    os.remove(self.file_name)", True),
        ("with contextlib.suppress(OSError):\n    os.remove(self.file_name)\n    x()", False),
        ("with x():\n    os.remove(self.file_name)", False),
        ("if x:\n    os.remove(self.file_name)", True),
        ("if z := x:\n    os.remove(self.file_name)", False),
        ("if x:\n    os.remove(self.file_name)\nelse:\n    y()", False),
    ],
)
def test_a_tear_down_that_removes_the_file_of_the_launcher_goes(tear_down: str, goes: bool) -> None:
    code = f"{CASE}    def tearDown(self):\n{textwrap.indent(tear_down, ' ' * 8)}\n"
    converted = port(code).code
    assert ("os.remove" not in converted) == ("yield" not in converted) == goes


def test_what_is_set_in_the_environment_is_restored_and_other_items_are_not_touched() -> None:
    set_up = "        os.environ['A'] = x\n        y['A'] = x\n"
    converted = port(CASE.replace("_processes()\n", f"_processes()\n{set_up}")).code
    assert "(self, monkeypatch):\n        monkeypatch.setenv('A', x)\n        y['A'] = x\n" in converted


@pytest.mark.parametrize(
    ("size", "ranks", "question"),
    [
        ("world_size = (2, 3)", "2, 3", ""),
        ("world_size: int = 3", "3", ""),
        ("world_size = int(3)", "3", ""),
        ("world_size = DEFAULT_WORLD_SIZE", "4", ""),
        ("world_size = x()", "2", "it was x()"),
        ("world_size = [3, x]", "2", "it was [3, x]"),
        ("if x:\n    world_size = 3", "2", "it depends on the conditions in the class"),
        ("if y:\n    x()\nelse:\n    world_size = 3", "2", "it depends on the conditions in the class"),
        ("try:\n    world_size = 3\nfinally:\n    x()", "2", "it depends on the conditions in the class"),
        ("try:\n    x()\nexcept E:\n    world_size = 3", "2", "it depends on the conditions in the class"),
        ("@property\ndef world_size(self):\n    return SIZE", "SIZE", "SIZE depends on the machine"),
        ("@property\ndef world_size(self):\n    x()\n    return 3", "2", "its property computes it"),
    ],
)
def test_a_world_size_that_depends_on_something_is_asked_for(size: str, ranks: str, question: str) -> None:
    imports = "from torch.testing._internal.common_distributed import DEFAULT_WORLD_SIZE\nSIZE = x()\n"
    code = imports + CASE.replace("    exec_timeout = 3\n", textwrap.indent(size, "    ") + "\n")
    converted = port(code)
    asked = f"world size: {question}; say how many ranks"
    assert f"@pytest.mark.ranks({ranks})\nclass TestOne" in converted.code
    assert converted.notes == ([f"TestOne: {asked}"] if question else [])
    assert (f"# lockstep: {asked}\n@" in converted.code) == bool(question)


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
        ("TestCase):", "TestCase, metaclass=x):", "it has a metaclass or other keywords"),
        ("exec_timeout =", "special_return_code_checks =", "it expects ranks to end with certain exit codes"),
        ("self._spawn_", "self.", "its setUp does not start the processes by _spawn_processes"),
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


def test_a_class_gets_a_name_that_no_other_class_has() -> None:
    code = CASE.replace("TestOne", "OneTest") + "class TestOne:\n    pass\n"
    assert "class TestOneOnRanks:\n" in port(code).code


def test_comments_above_what_goes_are_kept() -> None:
    imports = "from torch.testing._internal.distributed._tensor.common_dtensor import with_comms\n"
    decorators = "    @pytest.mark.slow\n    # of the test\n    @with_comms\n"
    code = imports + CASE.replace("    def test_one", f"{decorators}    def test_one")
    converted = port(code.replace("    def setUp", "    # of the set-up\n    def setUp")).code
    kept = decorators.replace("    @with_comms\n", "")
    assert f"    # of the set-up\n{kept}    def test_one(self):\n" in converted.replace("\n\n", "\n")


def test_a_class_and_a_method_of_which_nothing_stays_are_empty() -> None:
    test = CASE.replace("self.assertEqual(x, y)", "# why\n        dist.init_process_group('gloo')")
    converted = port(test + "class TestTwo(TestOne):\n    def setUp(self):\n        super().setUp()\n").code
    assert "    def test_one(self):\n        # why\n        pass\n" in converted
    assert converted.endswith("class TestTwo(TestOne):\n    pass\n")


def test_a_method_of_two_groups_gets_a_comment() -> None:
    groups = "".join(f"        dist.init_process_group('{name}')\n" for name in ("gloo", "nccl"))
    ported = port(f"{CASE}    def test_two(self):\n{groups}")
    why, of_lines = 'several backends: "gloo", "nccl"', "one of several process groups"
    assert comments(ported.code) == [why, of_lines, of_lines]
    assert ported.notes == [f"TestOne.test_two: {reason}" for reason in (of_lines, why)]
    assert [line for line in groups.splitlines() if line not in ported.code.splitlines()] == []


def test_a_class_of_device_tests_with_other_arguments_is_left() -> None:
    head = "from torch.testing._internal.common_device_type import instantiate_device_type_tests\n"
    more = port(f"{head}{CASE}instantiate_device_type_tests(TestOne, globals(), other=1)\n")
    assert comments(more.code) == [
        "instantiate_device_type_tests with other arguments than only_for and except_for"
    ]
    assert port(f"{head}{CASE}instantiate_device_type_tests(x, globals(), other=1)\n").whole == 1


@pytest.mark.parametrize(
    ("test", "why"),
    [
        (
            "def test_one(self, tmpdir):\n    x(tmpdir.join('a'))",
            "tmpdir is shared by all ranks, and used as",
        ),
        ("def test_one(self, class_tmpdir):\n    x(class_tmpdir)", "class_tmpdir is shared by the ranks of"),
        ("@pytest.mark.world_size(x)\ndef test_one(self):\n    x()", "a world size that is computed"),
    ],
)
def test_a_test_of_deepspeed_that_is_not_known_stays_with_a_comment(test: str, why: str) -> None:
    head = "from unit.common import DistributedTest\n\nclass TestOne(DistributedTest):\n    world_size = 2\n"
    converted = port(f"{head}\n{textwrap.indent(test, '    ')}\n").code
    (comment,) = comments(converted)
    assert comment.startswith(why)
    assert textwrap.indent(test, "    ") in converted


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
