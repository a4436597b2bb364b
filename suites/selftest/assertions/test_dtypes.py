"""Assertions of dtypes: patterns of names, and what is said of wrong ones."""

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    assert_buffer_dtypes,
    assert_gradient_dtypes,
    assert_parameter_dtypes,
)

F16, F32 = torch.float16, torch.float32


# dtypes


def test_dtypes_that_are_as_expected_pass():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).half())
    assert_parameter_dtypes(model, {"1.*": F16, "*": F32})
    assert_buffer_dtypes(model, F16)


def test_each_wrong_dtype_is_listed_with_the_expected_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    with pytest.raises(AssertionError) as failure:
        assert_parameter_dtypes(model, F32)
    assert str(failure.value).splitlines() == [
        "parameter dtypes:",
        "1.weight is torch.float16, expected torch.float32",
        "1.bias is torch.float16, expected torch.float32",
    ]


def test_gradient_dtype_is_seen():
    model = nn.Linear(2, 2).half()
    model.weight.grad = torch.ones(2, 2, dtype=F16)
    assert_gradient_dtypes(model, F16)
    with pytest.raises(AssertionError, match=r"weight is torch.float16, expected torch.float32"):
        assert_gradient_dtypes(model, F32)


def test_pattern_that_fits_nothing_fails():
    with pytest.raises(AssertionError, match=r"no parameter is named like 'typo\.\*'"):
        assert_parameter_dtypes(nn.Linear(2, 2), {"typo.*": F16, "*": F32})


def test_patterns_count_in_order_and_wrong_ones_come_first():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(AssertionError) as failure:
        assert_parameter_dtypes(model, {"?.bias": F16, "0.*": F32, "1.bias": F32, "typo": F16})
    assert str(failure.value).splitlines() == [
        "parameter dtypes:",
        "no parameter is named like '1.bias'",
        "no parameter is named like 'typo'",
        "0.bias is torch.float32, expected torch.float16",
        "1.weight is torch.float32, and no pattern matches it",
        "1.bias is torch.float32, expected torch.float16",
    ]
    with pytest.raises(AssertionError, match=r"\Abuffer dtypes:\n1\.running_mean is torch.float32, expected"):
        assert_buffer_dtypes(model, F16)


def test_name_without_a_pattern_fails():
    with pytest.raises(AssertionError, match=r"bias is torch.float32, and no pattern"):
        assert_parameter_dtypes(nn.Linear(2, 2), {"weight": F32})


@pytest.mark.parametrize(
    ("check", "module"),
    [
        (assert_parameter_dtypes, nn.ReLU()),
        (assert_gradient_dtypes, nn.Linear(2, 2)),
        (assert_buffer_dtypes, nn.Linear(2, 2)),
    ],
)
def test_dtype_check_that_looked_at_nothing_fails(check, module):
    with pytest.raises(AssertionError, match="there is no floating-point"):
        check(module, F32)
