"""The fixture `compiles`: what each rank has compiled, and ranks that disagree on it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.compiles.compilation import in_one_line, without_addresses
from lockstep.features.compiles.torch_internals import module_stack
from suites.selftest.project import Run, line_of

PROJECT = "compiles"
OPTIONS = ("test_compiles.py", "-v", "--world-timeout=60", "-p", "no:cacheprovider")

PASS = (
    *("test_frames", "test_a_break", "test_a_break_in_a_hook", "test_a_constant_that_ranks_may_have"),
    "test_a_slice_of_a_batch",
    *(f"test_compiled_again_in_each_test[{number}]" for number in range(3)),
    *("test_few_shapes", "test_a_dynamic_dimension", "test_many_shapes"),
    "test_nothing_compiled",
)
FAIL = (
    *("test_a_recompilation_in_each_step", "test_something_new", "test_a_shape_of_one_rank"),
    *("test_a_constant_of_one_rank", "test_a_break_of_one_rank", "test_a_hang_of_one_rank"),
    *("test_a_rank_that_fails", "test_an_unknown_backend", "test_no_reason"),
)


def place(run: Run, code: str) -> str:
    return f"test_compiles.py:{line_of(code, run.path / 'test_compiles.py')}"


@pytest.mark.parametrize("name", PASS)
def test_the_record_of_sound_code_is_right(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed", run.failure(name)


def test_all_others_fail(run: Run) -> None:
    assert {name for name in run.cases if run.outcome(name) != "passed"} == set(FAIL)


def test_a_recompilation_is_shown_with_the_guard_that_failed(run: Run) -> None:
    text = run.failure("test_a_recompilation_in_each_step")
    assert re.search(r"rank [01] has compiled again:", text), "of the rank that failed first"
    assert f"stepped ({place(run, 'def stepped')}): number == 0" in text


def test_what_is_compiled_too_late_is_named(run: Run) -> None:
    text = run.failure("test_something_new")
    assert "has compiled what should have been compiled before:" in text
    assert "tensor 'x' rank mismatch. expected 1, actual 2" in text


def test_a_shape_of_one_rank_fails_all(run: Run) -> None:
    text = run.failure("test_a_shape_of_one_rank")
    assert "all 2 ranks failed" in text
    again = f"rank 1 compiled summed ({place(run, 'def summed')}) again, as tensor 'x' size mismatch"
    assert f"ranks disagree on what they compiled: compilation 2: rank 0 compiled nothing; {again}" in text
    assert "compiles.ranks_may_differ(...)" in text


def test_a_constant_of_one_rank_is_shown_with_both_values(run: Run) -> None:
    text = run.failure("test_a_constant_of_one_rank")
    frame = f"scaled ({place(run, 'def scaled')})"
    assert f"compilation 1: {frame}: the graphs differ: rank 0 `" in text
    assert "l_x_ * 2" in text
    assert "l_x_ * 3" in text


def test_a_graph_break_of_one_rank_is_named(run: Run) -> None:
    text = run.failure("test_a_break_of_one_rank")
    at = f"graph break at {place(run, 'on this rank alone')}: Call to `torch._dynamo.graph_break()`"
    assert f"rank 0 no graph break; rank 1 {at}" in text


def test_the_report_of_a_hang_says_what_ranks_compiled(run: Run) -> None:
    text = run.failure("test_a_hang_of_one_rank")
    _, _, section = text.partition("compiled by torch.compile")
    assert "ranks disagree on what they compiled: compilation 1: before_the_hang" in section
    assert "rank 0: 1 frame" in section


def test_the_report_of_a_failure_lists_what_was_compiled(run: Run) -> None:
    text = run.failure("test_a_rank_that_fails")
    _, _, section = text.partition("compiled by torch.compile")
    assert "all ranks: 1 frame" in section
    assert "<lambda> (test_compiles.py:" in section
    assert "1 operation" in section


def test_bad_input_gets_a_sentence(run: Run) -> None:
    # torch 2.15 names backends that are spelt alike before it says where all are.
    of_torch = (
        r"Invalid backend: 'lighning'.* [sS]ee `torch\._dynamo\.list_backends\(\)` for available backends\."
    )
    assert re.search(of_torch, run.failure("test_an_unknown_backend"))
    sentence = "compiles.ranks_may_differ: write why ranks compile different code in this test"
    assert sentence in run.failure("test_no_reason")


def test_ranks_agree_on_a_reason_with_addresses_of_their_own() -> None:
    reason = "Skip inlining <function called at 0x{}> since it was wrapped\n  Explanation: of {} at 0x{}"
    assert {in_one_line(reason.format(each, "it", each)) for each in ("7f17650", "7f1765a")} == {
        "Skip inlining <function called> since it was wrapped: of it"
    }
    guard = "___check_obj_id(self.act, {}), type=<class 'function'>"
    assert {without_addresses(guard.format(each)) for each in (139736412345120, 94325879512)} == {
        "___check_obj_id(self.act, ...), type=<class 'function'>"
    }
    assert without_addresses("size mismatch at index 0. expected 4096, actual 65536") == (
        "size mismatch at index 0. expected 4096, actual 65536"
    )


def test_paths_of_modules_begin_below_the_one_that_is_compiled() -> None:
    sources = ("L['self']", "L['self']._modules['blocks']._modules['0']", "L['self'].blocks.0.inner")
    node: Any = SimpleNamespace(meta={"nn_module_stack": {each: (each, object) for each in sources}})
    assert module_stack(node) == ("blocks.0", "blocks.0.inner")
    node.meta.clear()
    assert module_stack(node) == ()
