"""Goldens: what `--update-goldens` writes, and what a run that differs from it says."""

import os
import re

import pytest
import torch

from lockstep.assertions.closeness import TOLERANCES
from lockstep.features.goldens.text import Golden, GoldenEntry, differences
from lockstep.output import write_text

FOLDER = "goldens/test_training"
OLD, DAMAGED, MISSING = "old-2-gloo.txt", "sizes-2-gloo.txt", "sizes-1-gloo.txt"
SIZES = {"test_sizes[1-rank]", "test_sizes[2-ranks]"}


@pytest.fixture(scope="module")
def outputs(shared_project):
    """The output of three runs: writing goldens, comparing, and comparing what has changed.

    From the second on a golden lies there that no test uses; in the third one is damaged, and one missing.
    """
    shared_project.copy("goldens")
    folder = shared_project.path / FOLDER
    update = shared_project.run("--update-goldens")
    (folder / OLD).write_text("")
    after = shared_project.run("test_training.py")
    names = {path.name for path in folder.iterdir()}
    text = (folder / DAMAGED).read_text()
    (folder / DAMAGED).write_text(text.replace("size 0", "<<<<<<< HEAD\nsize 0"))
    (folder / MISSING).unlink()
    changed = shared_project.run("test_training.py", environ={"CHANGED": "1"})
    return {"update": update, "after": after, "changed": changed, "names": names}


@pytest.fixture(scope="module")
def errors(outputs):
    """The message of the first rank's error, line by line, of each test that has changed."""
    parts = re.split(r"^_{3,} (.+?) _{3,}$", outputs["changed"], flags=re.MULTILINE)
    return {name: errors_of(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def errors_of(text):
    first = re.split(r"^-{3,} ", text, flags=re.MULTILINE)[0]
    return [line.removeprefix("E").strip() for line in first.splitlines() if line.startswith("E ")]


def test_a_missing_golden_names_the_line_to_type(outputs):
    assert (
        f"there is no golden {FOLDER}/{MISSING}: write it with: "
        "pytest test_training.py::test_sizes[1-rank] --update-goldens" in outputs["changed"]
    )


def test_goldens_are_written_and_then_hold(outputs):
    assert "goldens: 7 written\n" in outputs["update"]
    assert "6 passed" in outputs["after"]
    assert outputs["names"] == {
        *(f"{name}-2-gloo.txt" for name in ("beyond", "bits", "sizes", "tolerance", "traffic")),
        *(MISSING, OLD),
    }


def test_two_tests_cannot_share_a_golden(outputs):
    text = "two tests use the golden shared-2-gloo.txt: test_same_name.py::test_one_name[1] and"
    assert text in outputs["update"]
    assert "1 failed, 7 passed" in outputs["update"]


def test_the_file_can_be_read_by_people(outputs, shared_project):
    lines = (shared_project.path / FOLDER / "bits-2-gloo.txt").read_text().splitlines()
    assert lines[0] == "# Golden of test_training.py::test_bits. Written by: pytest --update-goldens"
    assert re.fullmatch(r"# Made by torch \S+, \S+ \S+, gloo", lines[1])
    assert re.fullmatch(r"loss 0 +\| rank 0 \| float32 \[\] value [\d.]+", lines[2])
    numbers = r"norm \S+ sum \S+ mix \S+ bits [0-9a-f]{12}"
    assert re.fullmatch(rf"gradients 0: 0.weight +\| all    \| float32 \[3, 4\] {numbers}", lines[4])
    middle = lines.index("collectives:")
    assert lines[middle + 1] == "all_reduce | all    | float32[3, 4] 2 ranks forward"
    assert len(lines) == middle + 1 + 8


def test_a_changed_sequence_is_shown_as_a_diff(errors):
    lines = errors["test_traffic"]
    assert lines[1].startswith("first difference: gradients 0: 0.bias (all ranks), after 3 values that agree")
    start = lines.index("the sequence of collectives differs (- golden, + this run):")
    assert [line for line in lines[start:] if line.startswith("+")] == [
        f"+all_reduce float32[{size}] 2 ranks forward (all)" for size in (3, 2, 3, 2)
    ]


def test_bits_and_tolerances_differ_in_what_they_accept(errors):
    assert set(errors) == {"test_traffic", "test_bits", "test_beyond_tolerance"} | SIZES
    first, golden, this_run, count = errors["test_bits"][1:5]
    assert first == "first difference: gradients 0: 2.weight (all ranks), after 4 values that agree"
    assert (golden.split()[0], this_run.split()[:2]) == ("golden", ["this", "run"])
    assert re.fullmatch(r"\d+ of 16 values differ", count)
    assert "beyond the tolerance" in "\n".join(errors["test_beyond_tolerance"])


def test_a_golden_that_no_test_uses_is_named(outputs):
    assert f"golden that no test has used: {FOLDER}/{OLD}; remove it" in outputs["after"]
    assert "golden that no test has used" not in outputs["changed"]  # tests have failed


def test_a_damaged_golden_says_where(outputs):
    text = f"{DAMAGED} cannot be read: line 3: not a line of a golden: '<<<<<<< HEAD'"
    assert text in outputs["changed"]


HEAD = "# Golden of a.py::test. Written by: pytest --update-goldens\n# Made by torch 2.13, gloo\n"
GOOD = f"{HEAD}loss 0 | all | float32 [] value 0.5\nflag 0 | all | bool [] value True\ncollectives:\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("value 0.5", "value 0.5x", "line 3: value 0.5x of loss 0 is no number"),
        ("value True", "norm x sum y mix 1", "line 4: norm x, sum y of flag 0 is no number"),
        ("flag 0", "loss 0", "line 4: a second line of loss 0 (all)"),
        ("# Made", "Made", "line 1: a golden begins with two lines of comments; a merge may have cut them"),
        ("collectives:\n", "", "there is no line `collectives:`"),
        ("collectives:\n", "collectives:\ncollectives:\n", "line 6: not a line of a golden: 'collectives:'"),
        ("| all | bool", "| rank x | bool", "line 4: not a line of a golden: 'flag 0 | rank x"),
        (GOOD, "", "line 1: a golden begins with two lines of comments"),
    ],
)
def test_a_bad_line_of_a_golden_is_named(old, new, message):
    assert len(Golden.parse(GOOD).values) == 2
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Golden.parse(GOOD.replace(old, new))


def test_truth_values_that_differ_are_compared_under_a_tolerance():
    golden, now = Golden.parse(GOOD), Golden.parse(GOOD.replace("True", "False"))
    lines = differences(golden, now, TOLERANCES[torch.float32])
    assert lines[0] == "first difference: flag 0 (all ranks), after 1 values that agree"
    assert differences(golden, golden, TOLERANCES[torch.float32]) == []


def golden_of(**texts_by_ranks):
    """Return a golden of one value, with a text for "all" ranks, or for each."""
    values = [GoldenEntry("loss", ranks.replace("_", " "), text) for ranks, text in texts_by_ranks.items()]
    return Golden("test_a", "torch", tuple(values), ())


@pytest.mark.parametrize(
    ("golden", "now", "first"),
    [
        (golden_of(all="1"), golden_of(rank_0="1", rank_1="1"), None),
        (golden_of(rank_0="1", rank_1="1"), golden_of(all="1"), None),
        (golden_of(all="1"), golden_of(rank_0="1", rank_1="2"), ("rank 1", "1", "2")),
        (golden_of(rank_0="1", rank_1="2"), golden_of(all="2"), ("rank 0", "1", "2")),
        (golden_of(rank_0="1", rank_1="2"), golden_of(rank_0="3", rank_1="2"), ("rank 0", "1", "3")),
        (golden_of(rank_0="1", rank_1="2"), golden_of(rank_0="1", rank_1="2"), None),
    ],
)
def test_a_value_of_all_ranks_is_compared_with_that_of_each(golden, now, first):
    lines = differences(golden, now, None)
    if first is None:
        assert lines == []
        return
    rank, before, after = first
    assert lines[0].startswith(f"first difference: loss ({rank}), ")
    assert lines[1:3] == [f"  golden    {before}", f"  this run  {after}"]


def test_goldens_are_shared_and_counted_under_xdist(outputs, shared_project):
    of_one = shared_project.run("-pxdist", "-n2", "--update-goldens", "test_same_name.py")
    assert re.search(
        r"two tests use the golden shared-2-gloo.txt: test_same_name.py::test_one_name\[\d\] and", of_one
    )
    assert "1 failed, 1 passed" in of_one
    # Another run may give the name to another test: nothing of the first one is remembered.
    (shared_project.path / "test_same_name.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_other(golden):\n"
        "    with golden('shared') as run:\n        run.record('value', 3)\n"
    )
    assert "1 passed" in shared_project.run("--update-goldens", "test_same_name.py")
    output = shared_project.run("-pxdist", "-n2", "--update-goldens", "test_training.py")
    assert "goldens: 2 written, 4 up to date\n" in output
    assert output.count(f"golden that no test has used: {FOLDER}/{OLD}; remove it") == 1
    assert {path.name for path in (shared_project.path / FOLDER).iterdir()} == outputs["names"]


def test_a_golden_that_is_a_fifo_is_refused(project):
    """To open it would wait for a process that writes, until the deadline."""
    project.write("def test_it(golden):\n    with golden('g') as run:\n        run.record('one', 1.0)\n")
    path = project.path / "goldens" / "test_sample" / "g-2-gloo.txt"
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    for options in ([], ["--update-goldens"]):
        output = project.run("--world-timeout=10", *options)
        assert f"the golden {path} cannot be read or written: it is no regular file" in output


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "before")
    with pytest.raises(TypeError):
        write_text(path, None)  # type: ignore[arg-type]
    with pytest.raises(OSError):
        write_text(tmp_path, "a folder")
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("before", ["a.txt"])
