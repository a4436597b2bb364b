"""An engine that offers shards and mixed precision, and no look inside: what the suites ask it, and find."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.conformance.stored import load
from lockstep.conformance.table import Outcome, Table
from suites.selftest.warm_pytest import run_to_end

PROJECT = Path(__file__).parents[3]


def run(directory: Path, engines: list[str], *claims: str, others: Sequence[str] = ()) -> Table:
    """Hold engines of `plain_engine.py` to claims of the suites, with other arguments of pytest."""
    arguments = [f"--engine=plain_engine:{name}" for name in engines]
    arguments += [str(PROJECT / "suites" / claim) for claim in claims]
    command = ("conformance", *arguments, "--assert=plain", "--tb=native", *others)
    path = os.pathsep.join(map(str, (PROJECT, Path(__file__).parent)))
    environ = os.environ | {"PYTHONPATH": path}
    _, output = run_to_end(command, directory, environ, timeout=300, module="lockstep")
    assert "cases held" in output, output
    return load(directory / "conformance-report" / "conformance.json")


def test_warnings_of_a_foreign_engine_are_listed_and_fail_nothing(tmp_path: Path) -> None:
    claim = "core/test_reduction.py::test_sparse_gradients_are_reduced_like_dense_ones"
    table = run(tmp_path, ["Warns"], claim)
    outcomes = {cell.outcome for cells in table.cells.values() for cell in cells.values()}
    assert outcomes == {Outcome.HELD, Outcome.NOT_OFFERED}  # of replicas
    warnings = table.warnings["plain_engine:Warns"]
    assert warnings["FutureWarning: old_name is deprecated"] == 3  # tests: a strategy each
    markdown = (tmp_path / "conformance-report" / "conformance.md").read_text()
    assert "\n* plain\\_engine:Warns, 3: FutureWarning: old\\_name is deprecated\n" in markdown
    page = (tmp_path / "conformance-report" / "conformance.html").read_text()
    assert page.count("old_name is deprecated") == 1


def test_an_engine_that_promises_nothing_of_reads_outside_units_is_not_asked(tmp_path: Path) -> None:
    file = "core/test_outside.py"
    refused = f"{file}::test_a_weight_that_is_freed_is_refused_by_its_name[tied_head-2-ranks]"
    cast = f"{file}::test_a_kept_weight_is_read_in_the_dtype_of_computation[bf16-tied_head-2-ranks]"
    table = run(tmp_path, ["Zero3"], refused, cast)
    assert len(table.claims) == 2
    cells = [table.cell(claim, "plain_engine:Zero3") for claim in table.claims.values()]
    assert {case.reason for cell in cells for case in cell.cases} == {"weights read outside their unit"}


TWO = "FULL_SHARD-orig-2-ranks"
MEAN = f"core/test_reduction.py::test_gradients_are_the_mean_over_ranks[{TWO}]"
SMALL = f"core/test_reduction.py::test_small_parameters_in_a_group_have_their_gradients[{TWO}]"
TWICE = "core/test_accumulation.py::test_two_backwards_over_one_graph_give_exactly_twice[FULL_SHARD-orig]"
NORM = f"core/test_clipping.py::test_norm_and_clipped_gradients_equal_the_unsharded_ones[{TWO}]"
LATEST = f"core/test_evaluation.py::test_an_evaluation_has_the_weights_of_the_last_step[{TWO}]"
WIRE = (
    "mixed_precision/test_numerics.py::"
    "test_reduce_dtype_holds_for_every_bit_of_every_gradient[FULL_SHARD-orig-fp16-2-ranks]"
)
SCALER = "grad_scaler/test_agreement.py::test_a_bad_gradient_in_any_one_shard_stops_all_ranks[inf-2-ranks]"
CLAIMS = [MEAN, SMALL, TWICE, NORM, LATEST, WIRE, SCALER]

FIRST = {
    "Zero3": None,
    "SumsGradients": MEAN,
    "LosesTheRest": MEAN,  # in the cases of one and of seven elements
    "TakesTheNeighboursSlice": MEAN,  # in the same
    "ForgetsTheFirstBackward": TWICE,
    "ClipsByItsOwnNorm": NORM,
    "StaleInEval": LATEST,
    "ReducesInParamDtype": WIRE,
    "SkipsAlone": SCALER,
}
"""By engine, the first claim that it breaks: the fault's name."""


def test_the_first_broken_claim_names_the_fault(tmp_path: Path) -> None:
    # No engine runs what comes after the first claim that it breaks.
    later = [
        f"--deselect=suites/{claim.removesuffix(']')}-plain_engine:{name}"
        for name, first in FIRST.items()
        for claim in CLAIMS[CLAIMS.index(first or SCALER) + 1 :]
    ]
    # One path each: given in another order, they are put into that of the suites.
    table = run(tmp_path, list(FIRST), *reversed(CLAIMS), others=later)
    assert [claim.removeprefix("suites/") for claim in table.claims] == CLAIMS
    broken = {
        name: [
            claim.id.removeprefix("suites/")
            for claim in table.claims.values()
            if table.cell(claim, f"plain_engine:{name}").outcome == Outcome.BROKEN
        ]
        for name in FIRST
    }
    assert {name: next(iter(found), None) for name, found in broken.items()} == FIRST
