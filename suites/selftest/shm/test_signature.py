"""The description of a call that ranks compare, and the checks before one is sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.shm import signature
from lockstep.shm.arguments import (
    check_length,
    check_numel,
    check_root,
    check_splits,
    check_tensors,
    premultiplied,
    reduction_of,
)
from lockstep.shm.reduce import PREMUL_SUM, divide, reduce_into, why_not
from lockstep.shm.signature import DTYPES, OPS, REDUCTIONS, contents, explain, pack

F32, I64 = torch.float32, torch.int64
MANY = tuple(range(41))


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (pack("barrier"), "barrier"),
        (pack("all_reduce", F32, (4,), 0), "all_reduce (SUM) of 4 float32"),
        (pack("reduce", I64, (0,), 8, 0), "reduce (PREMUL_SUM) of 0 int64 with root 0"),
        (pack("broadcast", F32, (3,), root=2), "broadcast of 3 float32 with root 2"),
        (pack("all_to_all", torch.bool), "all_to_all of bool"),
        (pack("all_gather", F32, (3, 3)), "all_gather of 2 tensors of 3 float32"),
        (pack("all_gather", F32, (3, 4)), "all_gather of 2 tensors of [3, 4] float32"),
        (pack("all_gather", F32, (1,) * 40), "all_gather of 40 tensors of 1 float32"),
        (pack("all_gather", F32, MANY), "all_gather of 820 elements in many tensors float32"),
    ],
)
def test_a_call_is_explained(packed: bytes, words: str) -> None:
    assert explain(packed) == words
    assert explain(packed + b"more") == words


def test_calls_that_differ_are_described_by_other_bytes() -> None:
    calls = [
        pack("all_gather", F32, MANY),
        pack("all_gather", F32, MANY[::-1]),
        pack("all_gather", I64, MANY),
        pack("all_gather", F32, MANY[:40]),
        pack("reduce", F32, (4,), 0, 0),
        pack("reduce", F32, (4,), 1, 0),
        pack("reduce", F32, (4,), 0, 1),
        pack("reduce", F32, (5,), 0, 0),
        pack("reduce", I64, (4,), 0, 0),
        pack("broadcast", F32, (4,), 0, 0),
    ]
    assert len(set(calls)) == len(calls)
    assert max(map(len, calls)) == signature.MAX_BYTES == 8 + 8 * 40


def test_a_message_has_dtype_and_size() -> None:
    assert contents(pack("send", torch.int16, (7,))) == (torch.int16, 7)


def test_every_operation_and_dtype_has_a_number() -> None:
    for op in OPS:
        assert explain(pack(op)) == op
    for dtype in (torch.uint8, torch.complex128, torch.float8_e4m3fn):
        assert dtype in DTYPES
    assert list(DTYPES) == sorted(DTYPES, key=str)
    assert len(set(DTYPES)) == len(DTYPES)


def test_tensors_must_be_of_the_cpu_dense_and_of_one_dtype() -> None:
    ones, wide = torch.ones(4), torch.ones(4, 1).expand(4, 3)
    check_tensors("op", [ones, wide, torch.ones(0)], F32, filled=[ones, ones.view(2, 2).T])
    check_tensors("op", [], F32, filled=[torch.ones(1).expand(1, 1), torch.ones(1, 0).expand(5, 0)])
    check_tensors("op", [], F32, filled=[ones.as_strided((1, 4), (0, 1)), ones.as_strided((1, 2), (0, 2))])
    for tensor, text in (
        (
            torch.ones(4, device="meta"),
            "op: backend shm is for CPU tensors, and one is on device meta; use nccl or gloo",
        ),
        (
            torch.eye(3).to_sparse(),
            "op: backend shm is for dense tensors, and one is torch.sparse_coo",
        ),
        (torch.ones(4, dtype=I64), "op: its tensors have different dtypes, torch.float32 and torch.int64"),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            check_tensors("op", [ones, tensor], F32)
        assert str(error.value) == text
    turned = torch.ones(1, dtype=torch.complex64).conj()
    for tensor in (turned, turned.imag):
        with pytest.raises(ValueError, match=r"^op: a tensor is a conjugated or negated view; call "):
            check_tensors("op", [tensor], tensor.dtype)
    with pytest.raises(ValueError, match=r"^op: an output of shape \(4, 3\) is expanded: its elements over"):
        check_tensors("op", [], F32, filled=[ones, wide])


def test_numbers_of_elements_tensors_and_ranks_must_fit() -> None:
    check_numel("op", torch.ones(6), torch.ones(3), 2)
    check_length("op", [torch.ones(1)] * 2, 2)
    check_root("op", 0, 2)
    check_root("op", 1, 2)
    for call, text in (
        (
            lambda: check_numel("op", torch.ones(4), torch.ones(2), 1),
            "op: an output of 4 elements, for an input of 2",
        ),
        (
            lambda: check_numel("op", torch.ones(4), torch.ones(3), 2),
            "op: a tensor of 4 elements is not 2 times one of 3, as it must be for 2 ranks",
        ),
        (lambda: check_length("op", [torch.ones(1)], 2), "op: a list of 1 tensors, for a group of 2 ranks"),
        (
            lambda: check_length("op", [torch.ones(1)] * 3, 2),
            "op: a list of 3 tensors, for a group of 2" + " ranks",
        ),
        (lambda: check_root("op", -1, 2), "op: root -1 is no rank of a group of 2 ranks"),
        (lambda: check_root("op", 2, 2), "op: root 2 is no rank of a group of 2 ranks"),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            call()
        assert str(error.value) == text


@pytest.mark.parametrize("splits", [(), (0, 4), (4, 0), (1, 3)])
def test_rows_are_split_in_equal_parts_or_as_given(splits: tuple[int, ...]) -> None:
    check_splits(torch.ones(4, 3), splits, 2)
    check_splits(torch.tensor(1.0), (), 1)


@pytest.mark.parametrize("splits", [(4,), (1, 1, 2), (2, 1), (5, -1)])
def test_splits_that_do_not_fit_are_refused(splits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        check_splits(torch.ones(4, 3), splits, 2)
    assert str(error.value) == f"all_to_all_single: split sizes {list(splits)} for 4 rows and 2 ranks"


def test_rows_without_splits_must_be_a_multiple_of_the_ranks() -> None:
    for tensor, rows in ((torch.ones(3, 2), 3), (torch.tensor(1.0), 1)):
        with pytest.raises(ValueError, match=r".") as error:
            check_splits(tensor, (), 2)
        assert str(error.value) == (
            f"all_to_all_single: {rows} rows cannot be split into 2 equal parts; give split sizes"
        )


def test_a_reduction_is_a_sum_unless_options_name_another() -> None:
    assert reduction_of("op", None, F32) == 0
    for number, name in enumerate(REDUCTIONS):
        chosen = getattr(dist.ReduceOp.RedOpType, name)
        assert reduction_of("op", SimpleNamespace(reduceOp=chosen), torch.int32) == number
        assert reduction_of("op", chosen, torch.int32) == number
    assert reduction_of("op", dist.ReduceOp(dist.ReduceOp.MAX), F32) == 4
    with pytest.raises(ValueError, match=r"^op: BOR needs integers or bool, not torch.float32$"):
        reduction_of("op", dist.ReduceOp.BOR, F32)


def test_only_a_premultiplied_sum_has_a_factor() -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16)
    options = SimpleNamespace(reduceOp=dist._make_nccl_premul_sum(torch.tensor([3.0])))
    assert premultiplied(options, 0, tensor) is tensor
    scaled = premultiplied(options, PREMUL_SUM, tensor)
    assert (scaled.tolist(), scaled.dtype) == ([3.0, 3.0], torch.bfloat16)


def test_reductions_that_a_dtype_does_not_have_are_named() -> None:
    byte = torch.float8_e5m2
    assert why_not(0, byte) == f"{byte} is sent as bytes and cannot be reduced; reduce it in float16 or wider"
    refused = {
        (REDUCTIONS[number], dtype): text
        for number in range(len(REDUCTIONS))
        for dtype in (F32, torch.int8, torch.complex64, torch.bool)
        if (text := why_not(number, dtype))
    }
    bitwise = {
        (op, dtype): f"{op} needs integers or bool, not {dtype}"
        for op in ("BAND", "BOR", "BXOR")
        for dtype in (F32, torch.complex64)
    }
    assert refused == bitwise | {
        ("MIN", torch.complex64): "MIN has no meaning for torch.complex64",
        ("MAX", torch.complex64): "MAX has no meaning for torch.complex64",
        ("AVG", torch.bool): "AVG needs numbers, not torch.bool",
        ("PREMUL_SUM", torch.bool): "PREMUL_SUM needs numbers, not torch.bool",
    }


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("SUM", ([6, -3], [11, -7], [14, -5])),
        ("AVG", ([6, -3], [5, -3], [4, -1])),
        ("PREMUL_SUM", ([6, -3], [11, -7], [14, -5])),
        ("PRODUCT", ([6, -3], [30, 12], [90, 24])),
        ("MIN", ([6, -3], [5, -4], [3, -4])),
        ("MAX", ([6, -3], [6, -3], [6, 2])),
        ("BAND", ([6, -3], [4, -4], [0, 0])),
        ("BOR", ([6, -3], [7, -3], [7, -1])),
        ("BXOR", ([6, -3], [3, 1], [0, 3])),
    ],
)
def test_parts_are_reduced_into_one(name: str, results: tuple[list[int], ...], size: int) -> None:
    parts = [torch.tensor(values) for values in ([6, -3], [5, -4], [3, 2])][:size]
    out = torch.zeros(2, dtype=I64)
    reduce_into(out, parts, REDUCTIONS.index(name))
    assert out.tolist() == results[size - 1]
    assert parts[0].tolist() == [6, -3]
    reduce_into(parts[-1], parts, REDUCTIONS.index(name))
    assert parts[-1].tolist() == results[size - 1]


def test_sums_of_half_precision_are_rounded_once() -> None:
    numel = (1 << 16) + 3
    parts = [torch.full((numel,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    reduce_into(out := torch.zeros(numel, dtype=torch.bfloat16), parts, 0)
    assert out.eq(258).all()
    reduce_into(out, [torch.full((numel,), value, dtype=torch.bfloat16) for value in (257.0, 259.0)], 1)
    assert out.eq(torch.tensor((256.0 + 260.0) / 2).bfloat16()).all()


def test_whole_numbers_are_divided_towards_zero() -> None:
    for dtype, expected in ((I64, [2, -2]), (F32, [2.5, -2.5]), (torch.complex64, [2.5, -2.5])):
        divide(tensor := torch.tensor([5, -5], dtype=dtype), 2)
        assert tensor.tolist() == expected
