"""The engines of docs/how_to/your_engine.md under the suites, and with faults that they must see."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.conformance.stored import load
from suites.selftest.warm_pytest import run_to_end

PROJECT = Path(__file__).parents[3]

STEPS = "core/test_clipping.py::test_clipped_steps_move_the_weights_as_unsharded_ones[NO_SHARD-orig]"
EVERY = "core/test_reduction.py::test_small_parameters_in_a_group_have_their_gradients[NO_SHARD-flat-2-ranks]"
SPARSE = "core/test_reduction.py::test_sparse_gradients_are_reduced_like_dense_ones[NO_SHARD]"
DTYPES = (
    "mixed_precision/test_original_dtypes.py::test_groups_of_different_dtypes_compute_in_one[NO_SHARD-bf16]"
)
NORM = "core/test_clipping.py::test_without_any_gradient_the_norm_is_zero[NO_SHARD-2.0]"
SAMPLES = {
    "sample_engine:HandDDP": ("held", "held", "held", "not offered", "held"),
    "zero1_engine:HandZero1": ("held", "held", "held", "not offered", "held"),
    "speed_engine:HandSpeed": ("held", "held", "held", "not offered", "held"),
    "wrong_engines:NeedsNoBackward": ("broken", "broken", "broken", "not offered", "held"),
    "wrong_engines:KeepsItsPart": ("broken", "held", "held", "not offered", "held"),
    "wrong_engines:ForgetsToAverage": ("broken", "broken", "broken", "not offered", "held"),
    # Clipping to a norm hides a factor.
    "wrong_engines:ForgetsToDivide": ("held", "broken", "broken", "not offered", "held"),
    "wrong_engines:MissesOne": ("broken", "broken", "broken", "not offered", "held"),
    "wrong_engines:ForgetsToCast": ("held", "held", "held", "broken", "held"),
}


def test_the_suites_find_the_faults_of_an_engine_of_twenty_lines(tmp_path: Path) -> None:
    claims = [f"suites/{claim}" for claim in (STEPS, EVERY, SPARSE, DTYPES, NORM)]
    engines = [f"--engine={name}" for name in SAMPLES]
    command = ["conformance", *engines, *(str(PROJECT / name) for name in claims)]
    command.append("--assert=plain")  # each failure is followed by new ranks, which import the claims again
    path = os.pathsep.join(map(str, (PROJECT, Path(__file__).parent)))
    environ = os.environ | {"PYTHONPATH": path}
    _, output = run_to_end(command, tmp_path, environ, timeout=600, module="lockstep")
    table = load(tmp_path / "conformance-report" / "conformance.json")
    assert table.claims.keys() == set(claims), output
    found = {
        name: tuple(table.cell(table.claims[claim], name).outcome.value for claim in claims)
        for name in SAMPLES
    }
    assert found == SAMPLES
