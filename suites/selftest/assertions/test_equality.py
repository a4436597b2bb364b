"""`assert_equal` says what torch's `TestCase.assertEqual` says, of values of every kind."""

from __future__ import annotations

import collections
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase

from lockstep.assertions import assert_equal

NAN = float("nan")
ONES = torch.ones(2)
CASES: dict[str, tuple[Any, Any]] = {
    "ints": (1, 2),
    "equal ints": (3, 3),
    "int and float": (1, 1.0),
    "close floats": (1.0, 1.0 + 1e-6),
    "other floats": (1.0, 1.0001),
    "small floats": (0.0, 9e-6),
    "nan": (NAN, NAN),
    "infinities": (float("inf"), float("inf")),
    "infinity and a number": (float("inf"), 1.0),
    "complex": (1 + 1j, 1 + 1j),
    "bool and int": (True, 1),
    "bool and other int": (True, 2),
    "bools": (True, False),
    "number and tensor": (1.0, torch.tensor(1.0)),
    "number and tensor of one": (1, torch.tensor([1])),
    "number and tensor of two": (1, ONES),
    "bool and tensor": (torch.tensor(True), True),
    "tensors": (ONES, torch.ones(2)),
    "close tensors": (ONES, ONES + 1e-6),
    "other tensors": (ONES, ONES + 1e-3),
    "tensors with nan": (torch.tensor([NAN]), torch.tensor([NAN])),
    "dtypes": (ONES, ONES.double()),
    "shapes": (ONES, torch.ones(2, 1)),
    "parameter and tensor": (nn.Parameter(ONES), ONES),
    "tensor and list": (ONES, [1, 1]),
    "tensor and tuple": ((1, 2), ONES),
    "tensor and array": (ONES, np.ones(2, dtype=np.float32)),
    "numpy numbers": (np.float32(1), 1),
    "strings": ("a", "a"),
    "other strings": ("a", "b"),
    "string and number": ("1", 1),
    "bytes": (b"a", b"a"),
    "none": (None, None),
    "none and zero": (None, 0),
    "none and tensor": (None, ONES),
    "list and tuple": ([1, 2], (1, 2)),
    "size and list": (torch.Size([1, 2]), [1, 2]),
    "lengths": ([1], [1, 2]),
    "nested": ({"a": [ONES, {"b": 1.0}]}, {"a": (ONES + 1e-7, {"b": 1})}),
    "nested, other": ({"a": [ONES, {"b": 1.0}]}, {"a": (ONES + 1e-7, {"b": 2})}),
    "keys": ({"a": 1}, {"b": 1}),
    "order of keys": ({"a": 1, "b": 2}, collections.OrderedDict(b=2, a=1)),
    "sets": ({1, 2}, {2, 1}),
    "other sets": ({1}, {2}),
    "set and list": ({1}, [1]),
    "dtypes themselves": (torch.float32, torch.float64),
    "devices": (torch.device("cpu"), torch.device("cpu")),
    "types": (int, int),
    "module lists": (nn.ModuleList(), []),
}


def fails(compare: Any, *values: Any, **options: Any) -> bool:
    try:
        compare(*values, **options)
    except (AssertionError, ValueError, TypeError):
        return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_a_comparison_has_the_result_that_torch_has(name: str) -> None:
    actual, expected = CASES[name]
    assert fails(assert_equal, actual, expected) == fails(TestCase().assertEqual, actual, expected)
    assert fails(assert_equal, expected, actual) == fails(TestCase().assertEqual, expected, actual)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ((1.0, 1.1), {"rtol": 0, "atol": 0.2}),
        ((1.0, 1.1), {"rtol": 0, "atol": 0.01}),
        ((ONES, ONES + 0.1), {"rtol": 0.2, "atol": 0}),
        ((ONES, ONES.double()), {"exact_dtype": False}),
        ((NAN, NAN), {"equal_nan": False}),
        ((torch.tensor(NAN), torch.tensor(NAN)), {"equal_nan": False}),
        ((ONES.expand(2, 2), torch.ones(2, 2)), {"exact_stride": True}),
    ],
)
def test_an_option_means_what_it_means_in_torch(values: tuple[Any, Any], options: dict[str, Any]) -> None:
    assert fails(assert_equal, *values, **options) == fails(TestCase().assertEqual, *values, **options)


def test_a_difference_is_shown_with_its_place_and_the_message() -> None:
    with pytest.raises(AssertionError, match=r"at \['a'\]\[1\]: 2 is not equal to 3\nwhy"):
        assert_equal({"a": [1, 2]}, {"a": [1, 3]}, "why")


@pytest.mark.parametrize(
    ("actual", "expected", "difference"),
    [
        ([1, [2, 3]], [1, [2]], "at [1]: lengths differ: 2 and 1"),
        ({"a": 1}, {"b": 1}, "keys differ: ['b'] missing, ['a'] not expected"),
        ([{"a": 1}], [{}], "at [0]: keys differ: [] missing, ['a'] not expected"),
    ],
)
def test_containers_that_differ_say_how(actual: Any, expected: Any, difference: str) -> None:
    with pytest.raises(AssertionError, match=f"^{re.escape(difference)}$"):
        assert_equal(actual, expected)
    with pytest.raises(AssertionError, match=f"^so: {re.escape(difference)}$"):
        assert_equal(actual, expected, lambda found: f"so: {found}")


def test_a_tolerance_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="give both rtol and atol, or neither"):
        assert_equal(1, 1, atol=1)


@pytest.mark.ranks(2, backend="gloo")
def test_distributed_tensors_are_compared_by_their_placements_and_local_parts(world: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = world.mesh()
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    replicated = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    assert_equal(sharded, distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
    with pytest.raises(AssertionError, match="DTensors differ"):
        assert_equal(sharded, replicated)
    with pytest.raises(TypeError, match="a DTensor and another value"):
        assert_equal(replicated, torch.arange(4.0))
