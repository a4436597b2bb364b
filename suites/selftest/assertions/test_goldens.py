"""Goldens: what `--update-goldens` writes, and what a run that differs from it says."""

import re

import pytest

FOLDER = "goldens/test_training"


@pytest.fixture(scope="module")
def written(shared_project):
    """The project, and the output of three runs: without goldens, writing them, comparing with them."""
    shared_project.copy("goldens")
    outputs = [shared_project.run(*args, "test_training.py") for args in ((), ("--update-goldens",), ())]
    return shared_project, outputs


@pytest.fixture(scope="module")
def changed(written):
    """The errors that tests report, by the change that was made."""
    project, _ = written
    runs = {}
    for change in ("traffic", "little", "much"):
        output = project.run("-k", "bits or tolerance", "test_training.py", environ={"CHANGE": change})
        parts = re.split(r"^_{3,} (.+?) _{3,}$", output, flags=re.MULTILINE)
        errors = {name: errors_of(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}
        runs[change] = errors
    return runs


def errors_of(text):
    """Return the message of the first rank's error, line by line."""
    first = re.split(r"^-{3,} ", text, flags=re.MULTILINE)[0]
    return [line.removeprefix("E").strip() for line in first.splitlines() if line.startswith("E ")]


def test_a_missing_golden_names_the_line_to_type(written):
    _, (missing, *_) = written
    assert (
        f"there is no golden {FOLDER}/bits-2-gloo.txt: write it with: "
        "pytest test_training.py::test_bits --update-goldens" in missing
    )
    assert "4 failed" in missing


def test_goldens_are_written_and_then_hold(written):
    project, (_, update, after) = written
    assert "goldens: 4 up to date" in update
    assert "4 passed" in update
    assert "4 passed" in after
    names = sorted(path.name for path in (project.path / FOLDER).iterdir())
    assert names == ["bits-2-gloo.txt", "sizes-1-gloo.txt", "sizes-2-gloo.txt", "tolerance-2-gloo.txt"]


def test_the_file_can_be_read_by_people(written):
    project, _ = written
    lines = (project.path / FOLDER / "bits-2-gloo.txt").read_text().splitlines()
    assert lines[0] == "# Golden of test_training.py::test_bits. Written by: pytest --update-goldens"
    assert re.fullmatch(r"# Made by torch \S+, \S+ \S+, gloo", lines[1])
    assert re.fullmatch(r"loss 0 +\| rank 0 \| float32 \[\] value [\d.]+", lines[2])
    gradient = (
        r"gradients 0: 0.weight +\| all    \| float32 \[3, 4\] norm \S+ sum \S+ mix \S+ bits [0-9a-f]{12}"
    )
    assert re.fullmatch(gradient, lines[4])
    middle = lines.index("collectives:")
    assert lines[middle + 1] == "all_reduce | all    | float32[3, 4] 2 ranks forward"
    assert len(lines) == middle + 1 + 8


def test_a_changed_sequence_is_shown_as_a_diff(changed):
    lines = changed["traffic"]["test_bits"]
    assert lines[1].startswith("first difference: gradients 0: 0.bias (all ranks), after 3 values that agree")
    start = lines.index("the sequence of collectives differs (- golden, + this run):")
    assert [line for line in lines[start:] if line.startswith("+")] == [
        f"+all_reduce float32[{size}] 2 ranks forward (all)" for size in (3, 2, 3, 2)
    ]


def test_bits_and_tolerances_differ_in_what_they_accept(changed):
    assert set(changed["little"]) == {"test_bits"}
    first, golden, this_run, count = changed["little"]["test_bits"][1:5]
    assert first == "first difference: gradients 0: 2.weight (all ranks), after 4 values that agree"
    assert (golden.split()[0], this_run.split()[:2]) == ("golden", ["this", "run"])
    assert re.fullmatch(r"\d+ of 16 values differ", count)
    assert set(changed["much"]) == {"test_bits", "test_tolerance"}
    assert "beyond the tolerance" in "\n".join(changed["much"]["test_tolerance"])


def test_two_tests_cannot_share_a_golden(written):
    project, _ = written
    output = project.run("--update-goldens", "test_same_name.py")
    assert "two tests use the golden shared-2-gloo.txt: test_same_name.py::test_one_name[1] and" in output
    assert "1 failed, 1 passed" in output


def test_a_golden_that_no_test_uses_is_named(written):
    project, _ = written
    stale = project.path / FOLDER / "old-2-gloo.txt"
    stale.write_text("")
    try:
        assert f"golden that no test has used: {FOLDER}/old-2-gloo.txt; remove it" in project.run(
            "test_training.py"
        )
        assert "golden that no test" not in project.run("test_training.py::test_bits")
    finally:
        stale.unlink()


def test_a_damaged_golden_says_where(written):
    project, _ = written
    path = project.path / FOLDER / "sizes-2-gloo.txt"
    text = path.read_text()
    path.write_text(text.replace("size 0", "<<<<<<< HEAD\nsize 0"))
    try:
        output = project.run("test_training.py", "-k", "sizes")
    finally:
        path.write_text(text)
    assert "sizes-2-gloo.txt cannot be read: line 3: not a line of a golden: '<<<<<<< HEAD'" in output
