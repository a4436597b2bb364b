"""The first place where two runs, or two ranks, part: as the report of a failed test says it."""

import re
from types import SimpleNamespace

import pytest
import torch

from lockstep.assertions.divergence import describe_ranks, shortened
from lockstep.exceptions import WorldError
from lockstep.features.divergence import FEATURE
from lockstep.features.divergence.recorded_run import diverged_case, run_recorded
from lockstep.protocol import REPORT_PARTS, Finished, RunItem
from lockstep.recorders import Event
from lockstep.world.outcome import ItemOutcome, RankOutcome
from suites.selftest.project import line_of

PLACE = {
    "cast": "flat = flat.to(torch.bfloat16)",
    "gather": "self.handle = dist.all_gather_into_tensor",
    "reduce": "dist.reduce_scatter_tensor(own, flat)",
    "optimizer": "optimizer.step()",
    "forward": "return model(batch).square().mean()",
}


@pytest.fixture(scope="module")
def report(shared_project):
    """The text that one run of the project prints, by test."""
    shared_project.copy("divergence", "filterwarnings = ignore::FutureWarning\n")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(shared_project.path / "inductor")}  # which torch makes for DDP
    output = shared_project.run(environ=cache)
    shared_project.assert_nothing_is_left()
    parts = re.split(r"^_{3,} (.+?) _{3,}$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)) | {"": output}


@pytest.fixture(scope="module")
def place(shared_project):
    """`file:line` of a line of the project."""

    def find(name):
        code = PLACE[name]
        file = "engine.py" if name in ("cast", "gather", "reduce") else "test_divergence.py"
        return f"{file}:{line_of(code, shared_project.path / file)}"

    return find


def errors(text):
    of_first_rank = re.split(r"^-{3,} ", text, flags=re.MULTILINE)[0]
    return [line.removeprefix("E").strip() for line in of_first_rank.splitlines() if line.startswith("E ")]


def test_a_cast_too_much_is_named_by_file_and_line(report, place):
    head, values, difference, agreed, *more = errors(report["test_one_case [fault=cast]"])
    assert "first divergence on all ranks: step 0, after backward: gradient of `0.weight`" in head
    assert re.fullmatch(
        r"candidate \S+ \(float32 \[3, 4\]\), reference \S+ \(float32 \[3, 4\]\) at .*", values
    )
    assert "greatest absolute difference" in difference
    assert "last agreement: step 0, backward: gradient of `0.weight` before it is reduced" in agreed
    assert more[0] == f"in between: cast float32 -> bfloat16 at {place('cast')} (2 times)"
    assert f"in between: reduce_scatter_tensor bfloat16[8] at {place('reduce')}" in more


def test_a_message_has_ten_lines_at_most(report):
    for name in ("test_one_case [fault=cast]", "test_wrong_wait", "test_unreduced_gradient"):
        assert len(errors(report[name])) <= 10, name


def test_a_collective_that_is_not_waited_for_is_a_race(report, place):
    lines = errors(report["test_wrong_wait"])
    assert "first divergence" in lines[0]
    assert "step 0, forward: parameter `2.weight`" in lines[0]  # on rank 0, or on both
    races = [line for line in lines if line.startswith("race: ")]
    assert f"all_gather_into_tensor #2 float32[4], begun at {place('gather')}, was not waited for" in races[0]


def test_passing_tests_run_once_and_failing_ones_twice(report, shared_project):
    assert [len(shared_project.pids(name)) for name in ("sound", "once")] == [1, 2]


def test_only_the_failed_case_runs_again(report, shared_project):
    cases = ("case-none", "case-cast", "case-other")
    assert [len(shared_project.pids(name)) for name in cases] == [1, 2, 1]
    assert "first divergence on all ranks" in report["test_one_case [fault=cast]"]


def test_a_divergence_that_does_not_come_again_is_said_to_be_one(report):
    text = report["test_not_every_time"]
    assert "the test ran again, with recording, and passed" in text
    assert "Greatest absolute difference" in text  # of the run that failed


def test_a_recorded_run_that_ends_before_the_assertion_says_why(report):
    text = report["test_another_way"]
    assert "did not come to this assertion: it failed in another way: ValueError: not a second time" in text


def test_gradients_of_one_element_are_recorded(report):
    assert "step 0, after backward: gradient of `weight` that the optimizer" in report["test_one_element"]


def test_ranks_part_at_the_gradient_that_nothing_reduces(report, place):
    head, values, agreed, *_ = errors(report["test_unreduced_gradient"])
    assert head.endswith(
        f"step 0, after backward: gradient of `2.bias` that the optimizer reads at {place('optimizer')}"
    )
    assert re.fullmatch(r"rank 0 \S+, rank 1 \S+ at \(\d,\), \(float32 \[2\]\)", values)
    assert agreed.startswith("last agreement: step 0, forward: parameter `2.bias`")


def test_ranks_that_begin_with_different_weights_never_agreed(report, place):
    head, _, never, *_ = errors(report["test_different_weights"])
    assert f"step 0, forward: parameter `0.bias` as its module computes with it at {place('forward')}" in head
    assert never.startswith("they never agreed")


def test_autocast_is_named_as_the_casts_of_the_first_layer(report, place):
    head, values, _, agreed, cast, *_ = errors(report["test_autocast"])
    assert head.endswith(f"step 0, forward: output of module `0` at {place('forward')} (values of rank 0)")
    assert re.fullmatch(r"candidate \S+ \(bfloat16 \[5, 3\]\), reference \S+ \(float32 .*", values)
    assert agreed.startswith("last agreement: step 0, forward: parameter `0.bias`")
    assert cast == f"in between: cast float32 -> bfloat16 at {place('forward')} (3 times)"


@pytest.mark.parametrize("test", ["test_scaled", "test_checkpointed"])
def test_a_wrong_backward_is_found_under(report, test):
    head, values, _, agreed, *_ = errors(report[test])
    assert "first divergence on all ranks: step 0, backward: gradient of `2.bias` before" in head
    ours, theirs = map(float, re.findall(r"(?:candidate|reference) (\S+)", values))
    assert ours == pytest.approx(theirs * 1.01, rel=1e-5)  # and not 1,024 times that
    assert "last agreement: step 0, backward: gradient of the output of module" in agreed


def test_ranks_of_a_subgroup_part_where_one_gradient_is_not_reduced(report, place):
    head, values, *_ = errors(report["test_subgroup"])
    assert "step 1, after backward: gradient of `2.bias` that the optimizer reads" in head
    assert re.fullmatch(r"rank 0 \S+, rank 2 \S+ at \(\d,\), \(float32 \[2\]\)", values)


def test_without_the_second_run_the_first_one_is_reported(report, shared_project):
    before = len(shared_project.pids("case-cast"))
    output = shared_project.run("--no-divergence", "-ktest_one_case or test_unreduced_gradient")
    assert len(shared_project.pids("case-cast")) == before + 1
    assert "first divergence" not in output
    assert "Greatest absolute difference" in output
    assert "3 failed" in output  # the case counts, and its test


def test_a_worker_of_xdist_runs_the_second_run_too(report, shared_project):
    before = len(shared_project.pids("case-cast"))
    output = shared_project.run("-pxdist", "-n2", "-ktest_one_case or test_unreduced_gradient")
    assert len(shared_project.pids("case-cast")) == before + 2
    assert output.count("first divergence on all ranks: step 0, after backward") == 1
    assert output.count("first divergence between ranks: step 0, after backward") == 1


def test_a_rank_whose_tensor_has_another_shape_is_described_by_it():
    values = {0: torch.zeros(4, 2), 1: torch.tensor([[0.0, 0.0]] * 3 + [[0.0, 1.0]]), 2: torch.zeros(1, 2)}
    lines = describe_ranks(Event("gradient", "weight", 0, 0, ""), None, values, [])
    assert lines[1] == "  rank 0 0, rank 1 1, rank 2 a tensor [1, 2] at (3, 1), (float32 [4, 2])"


def test_a_message_of_many_lines_is_its_first_one_and_how_many_follow() -> None:
    assert shortened("rank 1 differs") == "rank 1 differs"
    assert shortened("rank 1 differs\nby 2\nat 3") == "rank 1 differs (and 2 lines more)"


def outcome(*reports, timed_out=False):
    """The outcome of an item on one rank."""
    rank = RankOutcome(0, list(reports), fate=None if timed_out else Finished(True, 0, 0))
    return ItemOutcome((rank,), 1.0, timed_out, 1.0)


def failed(message, case=None):
    parts = {} if case is None else {REPORT_PARTS: {FEATURE: case}}
    return {"outcome": "failed", "longrepr": {"reprcrash": {"message": message}}, **parts}


@pytest.mark.parametrize(
    ("recorded", "note"),
    [
        (WorldError("no room"), "the test could not run again, with recording: no room"),
        (pytest.fail.Exception("too late"), "the test could not run again, with recording: too late"),
        (outcome(timed_out=True), "the test ran again, with recording, and did not end before its deadline"),
        (
            outcome({"outcome": "passed"}),
            "the test ran again, with recording, and passed: the divergence",
        ),
        (
            outcome(
                failed("RuntimeError: gloo: Connection closed by peer [127.0.0.1]:1"),
                failed("ValueError: other\nmore"),
            ),
            "the test ran again, with recording, and did not come to this assertion: it failed in another "
            "way: ValueError: other",
        ),
        (
            ItemOutcome((RankOutcome(0),), 1.0, timed_out=False, seconds=1.0),
            "the test ran again, with recording, and did not come to this assertion: it failed in another",
        ),
    ],
    ids=["world", "deadline-of-a-plugin", "late", "passes", "fails-otherwise", "dies"],
)
def test_a_recorded_run_without_explanation_says_why(recorded, note):
    def run(order):
        assert (order.next_item, order.shared_tmp_path) == (None, f"/shared/1-{FEATURE}")
        if isinstance(recorded, BaseException):
            raise recorded
        return recorded

    first = outcome(failed("differs", case=""))
    order = RunItem("test_a.py::test_a", "test_a.py", ("test_a.py::test_b", "test_a.py"), "/shared/1")
    assert run_recorded(None, order, first, diverged_case(first), run) is first
    (said,) = first.parts[FEATURE].values()
    assert said.startswith(note)
    assert "\n" not in said


def test_reports_of_a_recorded_run_take_the_place_of_those_of_the_same_case():
    ordinary = {"outcome": "passed"}
    first = outcome(ordinary, failed("differs", case="n=2"), failed("differs", case="n=1"))
    recorded = outcome(ordinary, failed("differs at step 0", case="n=1"))
    order = RunItem("test_a.py::test_a", "test_a.py", None, "")
    orders = []
    run_recorded(SimpleNamespace(stash={}), order, first, "n=1", lambda each: orders.append(each) or recorded)
    assert [each.shared_tmp_path for each in orders] == [""]
    found = [report["longrepr"]["reprcrash"]["message"] for report in first.ranks[0].reports[1:]]
    assert found == ["differs", "differs at step 0"]
    assert first.ranks[0].reports[0] is ordinary
    assert FEATURE not in first.parts
    assert diverged_case(outcome(ordinary)) is None
