"""Masks of dropout: replicas have one, and ranks with other inputs have others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.layouts import Layout, assert_dropout_follows_inputs
from lockstep.layouts import dropout as module
from lockstep.layouts.dropout import _Call, _Recorder, _wrong
from suites.selftest.layouts.model import OnPaper


def build() -> nn.Module:
    """Return a model with dropout before and inside of what tensor parallelism cuts."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 16), nn.Dropout(0.2)).double()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Plan:
    """A plan over dp and tp, of which the seeds of the two dropouts differ on some axes."""

    def __init__(
        self, model: nn.Module, layout: Layout, first: tuple[str, ...], second: tuple[str, ...]
    ) -> None:
        self.model, self.layout, self.seeds = model, layout, (first, second)

    def __call__(self, batch: torch.Tensor, microbatches: int) -> torch.Tensor:
        x = self.layout.slice(batch, "dp")
        torch.manual_seed(self.layout.part(self.seeds[0])[0])
        x = self.model[2](self.model[1](self.model[0](x)))
        torch.manual_seed(10 + self.layout.part(self.seeds[1])[0])
        loss = self.model[3](self.layout.slice(x, "tp", 1)).square().sum() / batch.shape[0] / 16
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        return total


def check(layout: Layout, first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """Return what is wrong with the masks, "" if nothing is."""
    batch = torch.randn(48, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        assert_dropout_follows_inputs(
            layout, build, lambda model, layout: Plan(model, layout, first, second), batch, loss
        )
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.layouts(dp=(1, 2), tp=(1, 2), at_most=4)
def test_masks_that_follow_inputs_hold(layout: Layout) -> None:
    assert check(layout, ("dp",), ("dp", "tp")) == ""


@pytest.mark.layouts(dp=(1, 2))
def test_equal_masks_of_other_rows_are_named(layout: Layout) -> None:
    where = "dp2: call 0 of dropout ([24, 8]): ranks 0 and 1, apart on dp, drop the same elements of"
    assert check(layout, (), ("dp",)) == f"{where} other inputs: they draw from one seed"


@pytest.mark.layouts(tp=(1, 2))
def test_other_masks_of_replicas_are_named(layout: Layout) -> None:
    where = "tp2: call 0 of dropout ([48, 8]): ranks 0 and 1, apart on tp, drop other elements of"
    assert check(layout, ("tp",), ("tp",)) == f"{where} equal inputs: replicas diverge"


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_equal_masks_of_other_columns_are_named(layout: Layout) -> None:
    where = "dp2-tp2: call 1 of dropout ([24, 8]): ranks 0 and 1, apart on tp, drop the same elements of"
    assert check(layout, ("dp",), ("dp",)) == f"{where} other inputs: they draw from one seed"


def test_calls_that_cannot_be_compared_are_passed_over() -> None:
    rows = torch.arange(1.0, 65.0)
    longer, own = _Call(torch.ones(80), torch.ones(80) > 0, 0.5), _Call(rows, rows > 9, 0.5)
    same = _Call(rows + 1, rows > 9, 0.5)
    layout = OnPaper(dp=2)
    assert list(_wrong({0: [longer, own], 1: [same]}, layout)) == []
    where = "call 1 of dropout ([64]): ranks 0 and 1, apart on dp,"
    assert list(_wrong({0: [longer, own], 1: [same, same]}, layout)) == [
        f"{where} drop the same elements of other inputs: they draw from one seed"
    ]


@pytest.mark.layouts(dp=(1, 2))
def test_a_model_without_dropout_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"no rank called torch\.nn\.functional\.dropout"):
        assert_dropout_follows_inputs(
            layout, lambda: build().eval(), lambda model, layout: model, torch.ones(4, 8).double(), loss
        )


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, batch: torch.Tensor, microbatches: int) -> torch.Tensor:
        assert microbatches == 1
        return self.model(batch).sum()


def test_the_calls_of_all_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[_Call] = []
    monkeypatch.setattr(module, "gathered", lambda calls: {0: calls, 1: others or calls[: len(calls) // 2]})

    def compare(training: bool = True) -> None:
        assert_dropout_follows_inputs(
            *(OnPaper(dp=2), lambda: build().train(training), lambda model, _: Trainer(model)),
            *(torch.ones(8, 8, dtype=torch.float64), loss),
        )

    compare()
    others.append(_Call(torch.ones(3), torch.ones(3) > 2, 0.5))
    compare()
    compare(training=False)
    others[:] = [_Call(torch.ones(8, 8), torch.ones(8, 8) > 0, 0.2)]
    with pytest.raises(AssertionError) as caught:
        assert_dropout_follows_inputs(
            *(OnPaper(dp=2), lambda: nn.Dropout(0.2), lambda model, _: Trainer(model)),
            *(torch.ones(8, 8), loss),
        )
    assert str(caught.value) == (
        "on paper: call 0 of dropout ([8, 8]): ranks 0 and 1, apart on dp, drop other elements of "
        "equal inputs: replicas diverge"
    )
    others.clear()
    with pytest.raises(
        ValueError, match=r"\Ano rank called torch\.nn\.functional\.dropout in training, with"
    ):
        compare(training=False)


def test_calls_of_dropout_are_recorded_where_it_drops() -> None:
    rows = torch.tensor([[1.0, 0.0, 2.0]] * 40, requires_grad=True)
    with _Recorder() as recorder:
        first = nn.functional.dropout(rows)
        nn.functional.dropout(rows, 0.25, True)
        nn.functional.dropout(input=rows, p=0.75, inplace=False)
        nn.functional.dropout(rows, training=False)
        nn.functional.dropout(rows, 0.5, False)
        nn.functional.dropout(rows, 0.0)
        nn.functional.dropout(rows, 1.0)
        nn.functional.dropout(torch.zeros(0))
        assert nn.functional.relu(rows).equal(rows)
        assert nn.functional.leaky_relu(rows, negative_slope=0.5).equal(rows)
        own = torch.ones(8)
        nn.functional.dropout(own, inplace=True)
    assert [call.p for call in recorder.calls] == [0.5, 0.25, 0.75, 0.5]
    call = recorder.calls[0]
    assert call.given.equal(rows.detach())
    assert not call.given.requires_grad
    assert call.dropped.equal((first == 0) & (rows != 0))
    assert not call.dropped[:, 1].any()
    assert recorder.calls[-1].given.tolist() == [1.0] * 8


def test_masks_are_compared_where_both_inputs_are_not_zero() -> None:
    given, dropped = torch.tensor([0.0, 1.0, 2.0, 4.0]), torch.tensor([True, True, False, False])
    call = _Call(given, dropped, 0.5)
    assert call.has_mask_of(_Call(given, torch.tensor([False, True, False, False]), 0.5))
    assert not call.has_mask_of(_Call(given, ~dropped, 0.5))
    assert call.has_mask_of(_Call(torch.tensor([1.0, 0.0, 2.0, 4.0]), torch.zeros(4) > 0, 0.5))
    assert call.is_alike(_Call(given + 3e-9, dropped, 0.5))
    assert not call.is_alike(_Call(given - 5e-9, dropped, 0.5))
    zeros = _Call(torch.zeros(4), dropped, 0.5)
    assert zeros.is_alike(zeros)
    for numel, p, may in ((29, 0.5, False), (30, 0.5, True), (109, 0.1, True), (60, 0.1, False)):
        ones = torch.ones(numel + 5)
        ones[:5] = 0
        one = _Call(ones, ones > 2, p)
        assert one.may_differ(one) is may
        assert one.may_differ(_Call(torch.ones(numel + 5), ones > 2, p)) is may


def test_ranks_apart_on_one_axis_are_compared_first() -> None:
    rows = torch.arange(1.0, 65.0)
    layout = OnPaper(dp=2, tp=2)
    calls = {rank: [_Call(rows + rank, rows > 9 * (rank in (0, 3)), 0.5)] for rank in range(4)}
    of = "drop the same elements of other inputs: they draw from one seed"
    assert list(_wrong(calls, layout)) == [
        f"call 0 of dropout ([64]): ranks {first} and {second}, apart on dp and tp, {of}"
        for first, second in ((0, 3), (1, 2))
    ]
    calls = {rank: [_Call(rows, rows > 9 * (rank in (0, 1)), 0.5)] for rank in range(4)}
    of = "drop other elements of equal inputs: replicas diverge"
    assert list(_wrong(calls, layout)) == [
        f"call 0 of dropout ([64]): ranks {first} and {second}, apart on {axes}, {of}"
        for first, second, axes in ((0, 2, "dp"), (1, 3, "dp"), (0, 3, "dp and tp"), (1, 2, "dp and tp"))
    ]
