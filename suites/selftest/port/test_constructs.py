"""Each construct that `python -m lockstep port` converts, and what it leaves with a comment."""

from __future__ import annotations

import textwrap

import pytest

from lockstep.port.module import port

HEAD = """\
import os
import unittest
from unittest import mock
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import *
from torch.testing._internal.common_distributed import MultiProcessTestCase, TEST_SKIPS, run_subtests
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu, requires_world_size
from torch.testing._internal.common_distributed import skip_but_pass_in_sandcastle_if
from torch.testing._internal.common_distributed import nccl_skip_if_lt_x_gpu, requires_nccl_version
from torch.testing._internal.common_distributed import require_n_gpus_for_nccl_backend
from torch.testing._internal.common_distributed import skip_but_pass_in_sandcastle
from torch.testing._internal.common_fsdp import check_sharded_parity
from torch.testing._internal.common_utils import parametrize, subtest
from torch.testing._internal.distributed._tensor.common_dtensor import with_comms

def join(rank):
    dist.init_process_group("gloo", rank=rank)

class TestOne(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

"""


def method(code: str, *, name: str = "test_one", decorators: str = "") -> str:
    """Return a class with one method that has this body, converted; its lines from the method on."""
    body = textwrap.indent(textwrap.dedent(code).strip("\n"), " " * 8)
    text = f"{HEAD}{textwrap.indent(decorators, ' ' * 4)}    def {name}(self, x, y):\n{body}\n"
    converted = port(text).code
    lines = converted[converted.index("class TestOne") :].splitlines()[1:]
    return textwrap.dedent("\n".join(lines))


def statement(code: str) -> str:
    converted = method(code)
    return textwrap.dedent(converted.partition("\n")[2])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self.assertTrue(x)", "assert x"),
        ("self.assertTrue(x, 'why')", "assert x, 'why'"),
        ("self.assertTrue(z := x)", "assert (z := x)"),
        ("self.assertFalse(x)", "assert not x"),
        ("self.assertFalse(x or y)", "assert not (x or y)"),
        ("self.assertFalse(x in y)", "assert x not in y"),
        ("self.assertIs(x, y)", "assert x is y"),
        ("self.assertIsNot(x, y)", "assert x is not y"),
        ("self.assertIsNone(x)", "assert x is None"),
        ("self.assertIsNotNone(x)", "assert x is not None"),
        ("self.assertIn(x, y)", "assert x in y"),
        ("self.assertNotIn(x, y, msg='why')", "assert x not in y, msg='why'".replace("msg=", "")),
        ("self.assertIsInstance(x, (int, str))", "assert isinstance(x, (int, str))"),
        ("self.assertNotIsInstance(x, int)", "assert not isinstance(x, int)"),
        ("self.assertGreater(x, y)", "assert x > y"),
        ("self.assertGreaterEqual(x, y)", "assert x >= y"),
        ("self.assertLess(x, y)", "assert x < y"),
        ("self.assertLessEqual(x if y else 1, y)", "assert (x if y else 1) <= y"),
        ("self.assertRegex(x, 'a.')", "assert re.search('a.', x)"),
        ("self.assertDictEqual(x, {1: 2})", "assert x == {1: 2}"),
        ("self.assertListEqual(sorted(x), y)", "assert sorted(x) == y"),
        # torch's assertEqual: close numbers and tensors, containers by element; `==` where no other is meant
        ("self.assertEqual(x, y)", "assert_equal(x, y)"),
        ("self.assertEqual(x, 1)", "assert_equal(x, 1)"),
        ("self.assertEqual(x, y, 'why')", "assert_equal(x, y, 'why')"),
        ("self.assertEqual(x, y, atol=0, rtol=0)", "assert_equal(x, y, atol=0, rtol=0)"),
        ("self.assertEqual(x, y, exact_dtype=False)", "assert_equal(x, y, exact_dtype=False)"),
        ("self.assertEqual(len(x), 2)", "assert len(x) == 2"),
        ("self.assertEqual(x, None)", "assert x is None"),
        ("self.assertEqual(None, x)", "assert x is None"),
        ("self.assertEqual(x, 'a')", "assert x == 'a'"),
        ("self.assertEqual(x.dtype, torch.float32)", "assert x.dtype == torch.float32"),
        ("self.assertEqual(x, [1])", "assert_equal(x, [1])"),
        ("self.assertEqual(x, True)", "assert_equal(x, True)"),
        ("self.assertNotEqual(x, 'a')", "assert x != 'a'"),
        ("self.assertNotEqual(x, y)", "with pytest.raises(AssertionError):\n    assert_equal(x, y)"),
        (
            "self.assertAlmostEqual(x, y, delta=2)",
            "assert_equal(x, y, rtol=0, atol=2, equal_nan=False, exact_dtype=False)",
        ),
        *(
            (
                f"self.assertAlmostEqual(x, y{given})",
                f"assert_equal(x, y, rtol=0, atol={atol}, equal_nan=False, exact_dtype=False{more})",
            )
            for given, atol, more in (
                ("", "5e-8", ""),
                (", places=2", "5e-3", ""),
                (", msg='why'", "5e-8", ", msg='why'"),
            )
        ),
        ("self.assertEqual(-1, len(x))", "assert -1 == len(x)"),
        ("self.assertEqual(2 * self.rank + 1, len(x))", "assert 2 * world.rank + 1 == len(x)"),
        ("self.assertEqual(self.rank / 2, len(x))", "assert_equal(world.rank / 2, len(x))"),
        ("self.assertTrue(x, z := y)", "assert x, (z := y)"),
        ("x = self.assertEqual", "x = assert_equal"),
        ("[self.assertEqual(i, x) for i in y]", "[assert_equal(i, x) for i in y]"),
        ("self.assertRaises(ValueError, x, 1, k=2)", "with pytest.raises(ValueError):\n    x(1, k=2)"),
        ("with self.assertRaises(ValueError):\n    x()", "with pytest.raises(ValueError):\n    x()"),
        (
            "with self.assertRaisesRegex(ValueError, 'a'):\n    x()",
            "with pytest.raises(ValueError, match='a'):\n    x()",
        ),
        (
            "with self.assertRaisesRegex(ValueError, ''):\n    x()",
            "with pytest.raises(ValueError):\n    x()",
        ),
        (
            "with self.assertWarnsRegex(UserWarning, 'a'):\n    x()",
            "with pytest.warns(UserWarning, match='a'):\n    x()",
        ),
        ("self.skipTest('why')", "pytest.skip('why')"),
        ("self.fail('why')", "pytest.fail('why')"),
        ("self.fail(msg='why')", "pytest.fail(reason='why')"),
        ("sys.exit(TEST_SKIPS['no_cuda'].exit_code)", "pytest.skip(TEST_SKIPS['no_cuda'].message)"),
    ],
)
def test_a_statement_becomes(before: str, after: str) -> None:
    assert statement(before) == after


def test_a_long_assertion_keeps_its_lines_and_its_comments() -> None:
    before = """
        self.assertTrue(
            # of both
            first_condition_of_some_length
            and second_condition_of_some_length_and_more,  # or none
        )
        """
    after = """\
        # of both
        # or none
        assert (
            first_condition_of_some_length
            and second_condition_of_some_length_and_more
        )"""
    assert statement(before) == textwrap.dedent(after)


STATEMENTS = [
    ("self.assertFalse(x not in y)", "assert x in y"),
    ("self.assertFalse(x is y)", "assert x is not y"),
    ("self.assertFalse(x is not y)", "assert x is y"),
    ("self.assertFalse(x < y)", "assert not x < y"),
    ("self.assertFalse((x or y))", "assert not (x or y)"),
    ("self.assertFalse(x if y else 1)", "assert not (x if y else 1)"),
    ("self.assertFalse(lambda: x)", "assert not (lambda: x)"),
    ("self.assertFalse(z := x)", "assert not (z := x)"),
    ("self.assertFalse([x])", "assert not [x]"),
    ("self.assertTrue((z := x))", "assert (z := x)"),
    ("self.assertTrue(x, msg=(yield))", "assert x, (yield)"),
    ("self.assertIs(x == y, not x)", "assert (x == y) is (not x)"),
    ("self.assertIs(-x, (x == y))", "assert -x is (x == y)"),
    ("self.assertIsNone(x or y)", "assert (x or y) is None"),
    ("self.assertIn(x, (i for i in y))", "assert x in (i for i in y)"),
    ("self.assertIsInstance(x, int, 'why')", "assert isinstance(x, int), 'why'"),
    ("self.assertRegex(x, 'a', msg='why')", "assert re.search('a', x), 'why'"),
    ("self.assertDictEqual(dict(x), y)", "assert dict(x) == y"),
    ("self.assertDictEqual({i: i for i in x}, y or z)", "assert {i: i for i in x} == (y or z)"),
    ("self.assertListEqual(x, [1])", "assert x == [1]"),
    ("self.assertListEqual(list(x), y)", "assert list(x) == y"),
    ("self.assertListEqual(x, [i for i in y])", "assert x == [i for i in y]"),
    ("self.assertSetEqual(x, {1})", "assert x == {1}"),
    ("self.assertSetEqual({i for i in x}, y)", "assert {i for i in x} == y"),
    ("self.assertSetEqual(set(x), y)", "assert set(x) == y"),
    ("self.assertEquals(x, y)", "assert_equal(x, y)"),
    ("self.assertEqual(x, f'a')", "assert x == f'a'"),
    ("self.assertEqual('a' 'b', x)", "assert 'a' 'b' == x"),
    ("self.assertEqual(x, torch.bool)", "assert x == torch.bool"),
    ("self.assertEqual(x, torch.float_power)", "assert_equal(x, torch.float_power)"),
    ("self.assertEqual(x, torch.log2)", "assert_equal(x, torch.log2)"),
    ("self.assertEqual(x, other.float32)", "assert_equal(x, other.float32)"),
    ("self.assertEqual(dist.get_rank(), 1)", "assert dist.get_rank() == 1"),
    ("self.assertEqual(x.numel(), x.dim() % 2)", "assert x.numel() == x.dim() % 2"),
    ("self.assertEqual(x.numel(), len(x) // 2 - 1)", "assert x.numel() == len(x) // 2 - 1"),
    ("self.assertEqual(x.numel(), +2)", "assert_equal(x.numel(), +2)"),
    ("self.assertEqual(x.numel(), 2 * y)", "assert_equal(x.numel(), 2 * y)"),
    ("self.assertEqual(x.numel(), y * 2)", "assert_equal(x.numel(), y * 2)"),
    ("self.assertEqual(x.size, 2)", "assert_equal(x.size, 2)"),
    ("self.assertEqual(self.world_size, 2)", "assert world.size == 2"),
    ("self.assertEqual(x or y, None)", "assert (x or y) is None"),
    ("self.assertEqual(x, None, msg='why')", "assert x is None, 'why'"),
    ("self.assertEqual(x, None, rtol=0, atol=0)", "assert_equal(x, None, rtol=0, atol=0)"),
    (
        "self.assertEqual(x, y, equal_nan=True, exact_device=True, exact_stride=True)",
        "assert_equal(x, y, equal_nan=True, exact_device=True, exact_stride=True)",
    ),
    ("self.assertNotEqual(None, x)", "assert x is not None"),
    ("self.assertNotEqual(len(x), 2)", "assert len(x) != 2"),
    ("self.assertRaises(ValueError, x or y)", "with pytest.raises(ValueError):\n    (x or y)()"),
    ("self.assertWarns(UserWarning, x)", "with pytest.warns(UserWarning):\n    x()"),
    (
        "self.assertRaisesRegex(ValueError, 'a', x, 1)",
        "with pytest.raises(ValueError, match='a'):\n    x(1)",
    ),
    (
        "with self.assertRaises(expected_exception=ValueError):\n    x()",
        "with pytest.raises(ValueError):\n    x()",
    ),
    *(
        (f"with self.assertRaisesRegex({given}):\n    x()", "with pytest.raises(E, match='a'):\n    x()")
        for given in ("expected_exception=E, expected_regex='a'", "E, expected_regex='a'")
    ),
    (
        "self.assertRaises(ValueError,  # first\n    x, 1)",
        "# first\nwith pytest.raises(ValueError):\n    x(1)",
    ),
    ("self.assertIs(x,  # first\n    None  # second\n    )", "# first\n# second\nassert x is None"),
    ("self.assertTrue(f(x,\n    y))", "assert f(x,\n    y)"),
    ("self.assertTrue(x ==\n    y, 'why')", "assert (\n    x\n    ==\n    y\n), 'why'"),
    ("with self.subTest(x=1):\n    y()", "with subtests.test(x=1):\n    y()"),
    ("with self.assertRaises(E), x() as y:\n    z()", "with pytest.raises(E), x() as y:\n    z()"),
    ("y(self.assertRaises(E))", "y(pytest.raises(E))"),
    ("self.run_subtests({'a': x}, y)", "run_subtests({'a': x}, y)"),
    ("run_subtests(x, {'a': x}, y)", "run_subtests(x, {'a': x}, y)"),
    ("x = self.create_pg(y)", "x = world.group"),
    ("x = lambda self: self.rank", "x = lambda self: self.rank"),
    ("self.skipTest(reason='why')", "pytest.skip(reason='why')"),
    ("sys.exit(3)", "sys.exit(3)"),
    ("exit(TEST_SKIPS['no_cuda'].exit_code)", "exit(TEST_SKIPS['no_cuda'].exit_code)"),
    ("y(); z()", "y(); z()"),
    ("if x: y()", "if x: y()"),
]


def test_each_statement_of_a_method_becomes() -> None:
    before, after = ("\n".join(of) for of in zip(*STATEMENTS, strict=True))
    assert statement(before).splitlines() == after.splitlines()


@pytest.mark.parametrize(("letters", "is_broken"), [(35, False), (36, True)])
def test_an_assertion_is_broken_where_its_line_would_be_too_long(letters: int, is_broken: bool) -> None:
    left, right = "a" * 34, "b" * letters
    converted = statement(f"self.assertTrue(\n    {left} == {right})")
    broken = f"assert (\n    {left}\n    == {right}\n)"
    assert converted == (broken if is_broken else f"assert {left} == {right}")
    assert statement(f"self.assertTrue({left} == {right})") == f"assert {left} == {right}"


def test_a_warning_that_is_read_gets_a_comment() -> None:
    code = "with self.assertWarns(UserWarning) as found:\n    x()\ny(found.warning)"
    assert statement(code).splitlines() == [
        "with pytest.warns(UserWarning) as found:",
        "    x()",
        "# lockstep: not converted: the warning that assertWarns found",
        "y(found.warning)",
    ]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("self.assertExpectedInline(x, y)", "assertExpectedInline has no counterpart here"),
        ("self.assertTrue(*x)", "starred arguments"),
        ("self.assertTrue((x, y))", "assertTrue of something that is always true"),
        ("self.assertEqual(x, y, exact_layout=True)", "assertEqual with exact_layout"),
        ("self.assertEqual(x, y, atol=1)", "assertEqual with one of rtol and atol"),
        ("[self.assertEqual(i, x, exact_layout=True) for i in y]", "assertEqual with exact_layout"),
        ("[self.assertEqual(i, x, atol=1) for i in y]", "assertEqual with one of rtol and atol"),
        ("self.assertEqual(first=x, second=y)", "arguments that are given by name"),
        ("self.assertIn(x, y, strict=True)", "arguments that are given by name"),
        ("self.assertRaises(ValueError)", "assertRaises without the function it calls"),
        (
            "with self.assertRaises(ValueError, msg=x):\n    y()",
            "assertRaises with other arguments than the type",
        ),
        ("with self.assertRaises(error=ValueError):\n    y()", "assertRaises with the keywords error"),
        ("self.assertAlmostEqual(x, y, places=x)", "assertAlmostEqual with places that are computed"),
        ("self.assertDictEqual(x, y)", "assertDictEqual: the types of both sides are open"),
        ("self.assertAlmostEqual(x, y, 3)", "assertAlmostEqual with other positional arguments than two"),
        ("if x: self.assertTrue(y)", "an assertion behind a colon, on the same line"),
        ("x(); self.assertTrue(y)", "several statements on one line"),
        ("run_subtests(self, x, test_fn=y)", "run_subtests with its own arguments by name"),
        ("sys.exit(TEST_SKIPS['no_cuda'])", "the exit status of a skip"),
        ("x(cls.rank)", "cls.rank: a world belongs to an instance"),
        ("self.rank = x", "self.rank is set, which is of the world"),
        ("x(TestOne.world_size)", "TestOne.world_size is of the launcher"),
        ("x(self.exec_timeout)", "self.exec_timeout is of the class MultiProcessTestCase"),
        ("x = self.create_pg(y, 2)", "create_pg with other arguments than the device"),
        ("x(self)", "`self` is passed on, perhaps as a test case"),
        ("x(self.file_name)", "self.file_name is of the class MultiProcessTestCase"),
        ("self.id()", "self.id is of the class MultiProcessTestCase"),
        ("x = self.assertNotEqual", "self.assertNotEqual as a value"),
        ("super().test_one()", "super().test_one() is of the class MultiProcessTestCase"),
        ("dist.init_process_group('gloo', timeout=x)", "init_process_group with timeout"),
        ("return dist.init_process_group('gloo')", "init_process_group whose result is used"),
        ("join(x)", "join joins a process group"),
        (
            "dist.Backend.register_backend('x', y)",
            "a backend stays registered on warm ranks; ranks(fresh=True) has new ones",
        ),
        ("dist.get_node_local_rank()", "ranks have LOCAL_RANK in their environment"),
        ("dist.init_process_group('mpi')", "init_process_group with the backend 'mpi'"),
        ("dist.init_process_group('gloo', rank=0)", "init_process_group with a rank of its own"),
        *(
            (f"dist.init_process_group({given})", f"init_process_group with {why}")
            for given, why in (
                ("*x", "starred or more positional arguments"),
                ("'gloo', 'env://', 0", "starred or more positional arguments"),
                ("'gloo', world_size=2", "a world size of its own"),
                ("'gloo', store=x", "a store of its own"),
                ("'gloo', init_method='tcp://x'", "an init_method of its own"),
            )
        ),
    ],
)
def test_what_is_not_known_stays_with_a_comment(before: str, why: str) -> None:
    assert statement(before) == f"# lockstep: not converted: {why}\n{before}"


LEFT = [
    ("self.assertSetEqual(sorted(x), y)", "assertSetEqual: the types of both sides are open"),
    ("self.assertListEqual(x, {1})", "assertListEqual: the types of both sides are open"),
    ("self.assertCountEqual(x, [1])", "assertCountEqual: the types of both sides are open"),
    ("self.assertTrue(x for x in y)", "assertTrue of something that is always true"),
    ("self.assertIs(x, *y)", "starred arguments"),
    (
        "with self.assertRaisesRegex(ValueError, *x):\n    y()",
        "assertRaisesRegex with other arguments than the type and the pattern",
    ),
    ("self.assertIs(x)", "arguments that are given by name"),
    ("self.assertIs(x, y, 'why', z)", "arguments that are given by name"),
    ("self.assertIs(x, y, 'why', msg=z)", "arguments that are given by name"),
    ("self.assertRaises(ValueError, *x)", "assertRaises without the function it calls"),
    ("self.assertRaises(*x, y)", "assertRaises without the function it calls"),
    ("self.assertRaises(ValueError, callable=x)", "assertRaises without the function it calls"),
    ("self.assertRaisesRegex(ValueError, 'a')", "assertRaisesRegex without the function it calls"),
    ("with self.assertRaises(*x):\n    y()", "assertRaises with other arguments than the type"),
    (
        "with self.assertRaisesRegex(ValueError):\n    x()",
        "assertRaisesRegex with other arguments than the type and the pattern",
    ),
    (
        "with self.assertRaisesRegex(expected_regex='a', expected_exception=x):\n    x()",
        "assertRaisesRegex with the keywords expected_regex, expected_exception",
    ),
    ("with self.assertLogs(x):\n    y()", "assertLogs inside an expression"),
    ("self.assertAlmostEqual(x, 1, delta=2, places=y)", "assertAlmostEqual with places that are computed"),
    ("self.assert_(x)", "self.assert_ is of the class MultiProcessTestCase"),
    ("x = self.rank + self.device", "self.device is of the class MultiProcessTestCase"),
]


def test_each_statement_of_a_method_that_is_not_known_stays_with_a_comment() -> None:
    after = [f"# lockstep: not converted: {why}\n{before}" for before, why in LEFT]
    converted = statement("\n".join(before for before, _ in LEFT))
    assert converted.splitlines() == "\n".join(after).splitlines()
