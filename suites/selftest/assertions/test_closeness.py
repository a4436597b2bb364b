"""Closeness of tensors: tolerances by dtype, rules of a call, and differences in order."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    Tolerance,
    assert_buffer_dtypes,
    assert_gradient_dtypes,
    assert_named_close,
    assert_parameter_dtypes,
)
from lockstep.assertions.closeness import differences

F16, F32 = torch.float16, torch.float32


# closeness


def test_tensors_on_meta_agree_in_shape():
    assert_named_close({"w": torch.ones(3, device="meta")}, {"w": torch.ones(3, device="meta")})
    with pytest.raises(AssertionError, match="shape"):
        assert_named_close({"w": torch.ones(3, device="meta")}, {"w": torch.ones(4, device="meta")})


def test_tensors_of_other_shapes_differ():
    with pytest.raises(AssertionError, match="shape"):
        assert_named_close({"w": torch.ones(4, 1)}, {"w": torch.ones(4)})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_halves_are_compared():
    one, other = (torch.tensor([complex(1, part)]).to(torch.complex32) for part in (0, 0.1))
    assert differences({"w": one}, {"w": one.clone()}) == []
    assert len(differences({"w": one}, {"w": other})) == 1


def test_default_tolerance_is_the_row_of_the_looser_dtype():
    close, far = torch.tensor([1.0005], dtype=F16), torch.tensor([1.01], dtype=F16)
    one = torch.ones(1)
    assert_named_close({"w": close}, {"w": one}, same_dtype=False)
    with pytest.raises(AssertionError, match=r"w: .*absolute difference"):
        assert_named_close({"w": far}, {"w": one}, same_dtype=False)


def test_another_dtype_is_a_difference_unless_that_is_allowed():
    one, same = {"w": torch.ones(1)}, {"w": torch.ones(1, dtype=F16)}
    assert differences(same, one, same_dtype=False) == []
    assert len(differences(same, one)) == 1
    with pytest.raises(AssertionError, match=r"w: .*float16"):
        assert_named_close(same, one)


def test_integers_are_compared_exactly():
    with pytest.raises(AssertionError, match="n: "):
        assert_named_close({"n": torch.tensor([10**6])}, {"n": torch.tensor([10**6 + 1])})


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float64, 1e-7), (F32, 1.3e-6), (F16, 1e-3), (torch.bfloat16, 1.6e-2), (torch.complex128, 1e-7)],
)
def test_a_dtype_has_its_row_of_tolerances(dtype, rtol):
    expected = {"w": torch.full((1,), 1000.0, dtype=torch.complex128 if dtype.is_complex else torch.float64)}
    for of_rtol, count in (0.9, 0), (1.1, 1):
        actual = {"w": expected["w"] * (1 + of_rtol * rtol)}
        assert len(differences(actual, expected, dtype)) == count


def test_the_looser_row_is_taken_whichever_tensor_has_it():
    one, close = torch.ones(1), torch.tensor([1.0005], dtype=F16)
    assert differences({"w": one}, {"w": close}, same_dtype=False) == []


def test_a_dtype_without_a_row_needs_a_tolerance():
    one, four = ({"w": torch.tensor([value]).to(torch.float8_e8m0fnu)} for value in (1.0, 4.0))
    with pytest.raises(
        ValueError, match=r"\ATOLERANCES has no row for torch\.float8_e8m0fnu: pass a Tolerance\Z"
    ):
        differences(one, one)
    assert differences(one, one, Tolerance(0.0, 0.0)) == []
    assert differences(one, four, Tolerance(0.0, 0.0)) != []
    assert differences(one, four, Tolerance(3.0, 0.0)) == []


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float8_e4m3fn, 0.125),
        (torch.float8_e4m3fnuz, 0.125),
        (torch.float8_e5m2, 0.25),
        (torch.float8_e5m2fnuz, 0.25),
    ],
)
def test_eight_bit_floats_may_differ_by_a_unit(dtype, unit):
    one, next_one, beyond = ({"w": torch.tensor([1 + n * unit]).to(dtype)} for n in range(3))
    assert differences(next_one, one) == []
    assert differences(next_one, one, Tolerance(0.0, 0.0)) != []
    [difference] = differences(beyond, one)
    assert f"Greatest absolute difference: {2 * unit} at index (0,)" in difference
    smallest = {"w": torch.tensor([1], dtype=torch.uint8).view(dtype)}
    assert differences(smallest, {"w": torch.zeros(1).to(dtype)}) == []
    [difference] = differences(one, {"w": torch.ones(1)})
    assert difference.startswith("w: The values for attribute 'dtype' do not match")
    assert differences(one, {"w": torch.ones(1)}, same_dtype=False) == []


def test_packed_floats_are_compared_by_their_bits():
    one, other = (
        {"w": torch.tensor(bits, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)} for bits in ([1, 2], [1, 3])
    )
    assert differences(one, one, Tolerance(0.0, 0.0)) == []
    assert differences(one, other, Tolerance(0.0, 0.0)) != []


@pytest.mark.parametrize(
    ("check", "given"),
    [
        (assert_named_close, ({"w": torch.ones(1)}, {"w": torch.zeros(1)})),
        (assert_parameter_dtypes, (nn.Linear(1, 1), F16)),
        (assert_gradient_dtypes, (nn.Linear(1, 1), F16)),
        (assert_buffer_dtypes, (nn.BatchNorm1d(1), F16)),
    ],
)
def test_a_failed_assertion_points_to_its_call(check, given):
    with pytest.raises(AssertionError) as failed:
        check(*given)
    assert [entry.path for entry in failed.traceback.filter(failed)] == [Path(__file__)]


def test_tensors_that_are_not_plain_are_compared():
    sparse = {"w": torch.tensor([1.0, 0.0]).to_sparse()}
    assert differences(sparse, sparse) == []
    assert differences({"w": nn.Parameter(torch.ones(2))}, {"w": torch.ones(2)}) == []
    assert differences({"w": nn.Parameter(torch.ones(2))}, {"w": torch.zeros(2)}) != []
    assert differences({"w": torch.tensor([1, 0])}, {"w": torch.tensor([1.0, 0.0])}) == [
        "w: The values for attribute 'dtype' do not match: torch.int64 != torch.float32"
    ]


def test_differences_are_in_order_a_line_for_each_name():
    expected = {"a": torch.ones(2), "b": None, "c": torch.ones(1), "d": torch.ones(()), "e": None}
    actual = {
        "f": None,
        "e": None,
        "d": torch.zeros(()),
        "b": torch.ones(2, 3),
        "a": torch.tensor([1.0, 2.0]),
    }
    assert differences(actual, expected) == [
        "c: missing",
        "f: not expected",
        "a: Mismatched elements: 1 / 2 (50.0%);"
        " Greatest absolute difference: 1.0 at index (1,) (up to 1e-05 allowed);"
        " Greatest relative difference: 1.0 at index (1,) (up to 1.3e-06 allowed)",
        "b: a tensor [2, 3], expected None",
        "d: Expected 1.0 but got 0.0;"
        " Absolute difference: 1.0 (up to 1e-05 allowed);"
        " Relative difference: 1.0 (up to 1.3e-06 allowed)",
    ]


def test_given_tolerance_rules():
    two, three = {"w": torch.full((1,), 2.0)}, {"w": torch.full((1,), 3.0)}
    assert_named_close(two, three, Tolerance(atol=1.0, rtol=0.0))
    with pytest.raises(AssertionError, match="w: "):
        assert_named_close(two, three, Tolerance(atol=0.9, rtol=0.0))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ({}, {"w": torch.ones(1)}, "w: missing"),
        ({"w": torch.ones(1), "v": torch.ones(1)}, {"w": torch.ones(1)}, "v: not expected"),
        (
            {"w": None, "v": torch.ones(1)},
            {"w": torch.ones(1), "v": torch.ones(1)},
            "w: None, expected a tensor",
        ),
        ({"w": torch.full((1,), torch.nan)}, {"w": torch.full((1,), torch.nan)}, "w: "),
        ({}, {}, "no tensor to compare"),
        ({"w": None}, {"w": None}, "no tensor to compare"),
    ],
)
def test_missing_tensors_and_nan_differ(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_named_close(actual, expected)
