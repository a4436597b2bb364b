"""Unit tests of the fixture `golden` in one process, and of the lines about goldens at the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.assertions.closeness import TOLERANCES, Tolerance
from lockstep.features.goldens import golden as module
from lockstep.features.goldens.golden import Goldens, describe
from lockstep.features.goldens.summary import lines
from lockstep.features.goldens.text import GoldenEntry


class Test:
    """A test on one rank that uses the fixture."""

    __test__ = False

    def __init__(self, folder: Path, name: str = "test_a.py::test", *, updates: bool = False) -> None:
        self.folder = folder
        self.properties: list[tuple[str, object]] = []
        config = SimpleNamespace(
            getoption=lambda option: updates, invocation_params=SimpleNamespace(dir=folder)
        )
        node = SimpleNamespace(nodeid=f"below/{name}", user_properties=self.properties)
        request = SimpleNamespace(path=folder / "test_a.py", node=node, config=config)
        world = SimpleNamespace(
            size=2, rank=0, backend="cpu:gloo", shared_tmp_path=folder / "shared" / "b" / "c"
        )
        self.goldens = Goldens(request, world)  # type: ignore[arg-type]

    @property
    def file(self) -> Path:
        return self.folder / "goldens" / "test_a" / "run-2-cpu-gloo.txt"

    def run(self, value: Any, **options: Any) -> str:
        """Return the error of a run that records a value."""
        try:
            with self.goldens("run", **options) as run:
                run.record("loss", value)
        except AssertionError as error:
            return str(error)
        return ""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "gathered", lambda value: {0: value})
    monkeypatch.setattr(module, "_made_by", lambda backend: f"torch, {backend}")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "shared").mkdir()


def test_a_golden_is_written_beside_the_test_and_held(tmp_path: Path) -> None:
    writes = Test(tmp_path, updates=True)
    assert writes.run(0.5) == ""
    assert writes.file.read_text().splitlines() == [
        "# Golden of test_a.py::test. Written by: pytest --update-goldens",
        "# Made by torch, cpu:gloo",
        "loss 0 | all    | float64 [] value 0.5",
        "collectives:",
    ]
    assert writes.properties == [("golden", str(writes.file)), ("golden-written", str(writes.file))]
    again = Test(tmp_path)
    assert again.run(0.5) == ""
    assert again.properties == [("golden", str(again.file))]


def test_a_golden_that_is_the_same_but_for_its_maker_stays(tmp_path: Path) -> None:
    Test(tmp_path, updates=True).run(0.5)
    test = Test(tmp_path, updates=True)
    test.file.write_text(old := test.file.read_text().replace("by torch", "by torch 1"))
    assert test.run(0.5) == ""
    assert test.file.read_text() == old
    assert len(test.properties) == 1
    assert Test(tmp_path, updates=True).run(0.75) == ""
    assert "value 0.75" in test.file.read_text()


def test_a_run_that_differs_says_what_to_do(tmp_path: Path) -> None:
    command = "pytest below/test_a.py::test --update-goldens"
    where = "goldens/test_a/run-2-cpu-gloo.txt"
    test = Test(tmp_path)
    assert test.run(0.5) == f"there is no golden {where}: write it with: {command}"
    Test(tmp_path, updates=True).run(0.5)
    first, *rest, last = Test(tmp_path).run(0.75).splitlines()
    assert (first, len(rest)) == (f"this run differs from {where}", 4)
    assert last == f"if the change is meant, write it again with: {command}"
    good = test.file.read_text()
    test.file.write_text(good.replace("by torch", "by torch 1"))
    *_, made, last = Test(tmp_path).run(0.75).splitlines()
    assert made == "the golden was made by torch 1, cpu:gloo; this is torch, cpu:gloo"
    meant = f"if the change is meant, write it again with: {command}"
    advice = f"bits differ between versions and CPUs: pass tolerance=torch.float32; or, {meant}"
    assert last == advice
    assert Test(tmp_path).run(0.75, tolerance=torch.float32).splitlines()[-1] == meant
    test.file.write_text("")
    assert Test(tmp_path).run(0.5).startswith(f"the golden {where} cannot be read: line 1: a golden begins")
    test.file.write_text(good)
    assert Test(tmp_path, "test_a.py::other").run(0.5) == (
        f"the golden {where} is that of test_a.py::test: give this test's another name, or: "
        "pytest below/test_a.py::other --update-goldens"
    )


def test_two_tests_of_a_run_cannot_write_one_golden(tmp_path: Path) -> None:
    assert Test(tmp_path, updates=True).run(0.5) == ""
    assert Test(tmp_path, "test_a.py::other", updates=True).run(0.75) == (
        "two tests use the golden run-2-cpu-gloo.txt: test_a.py::test and test_a.py::other; rename one"
    )
    marks = list((tmp_path / "shared" / "goldens").iterdir())
    assert [mark.read_text() for mark in marks] == ["test_a.py::test"]


def test_marks_of_workers_are_above_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    test = Test(tmp_path, updates=True)
    test.goldens._world.shared_tmp_path = tmp_path / "shared" / "popen-gw1" / "b" / "c"  # type: ignore[misc]
    assert test.run(0.5) == ""
    assert (tmp_path / "shared" / "goldens").is_dir()


def test_a_golden_that_cannot_be_read_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    test = Test(tmp_path)
    test.file.mkdir(parents=True)
    assert test.run(0.5) == f"the golden {test.file} cannot be read or written: it is no regular file"


def test_an_error_in_a_run_is_not_followed_by_a_comparison(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Test(tmp_path).goldens("run"):
        raise ZeroDivisionError


@pytest.mark.parametrize("name", ["", "a b", "a/b", 3, None])
def test_a_name_that_is_no_word_is_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"^golden\(.*\): it names a file: use letters"):
        Test(tmp_path).goldens(name)


def test_a_name_is_used_once(tmp_path: Path) -> None:
    goldens = Test(tmp_path).goldens
    assert repr(goldens) == "<goldens>"
    assert repr(goldens("a.b-c_1")) == "<run held to a.b-c_1-2-cpu-gloo.txt>"
    with pytest.raises(ValueError, match="this test has used the name already; give each run its own"):
        goldens("a.b-c_1")


def test_a_tolerance_is_a_row_of_the_table_or_numbers(tmp_path: Path) -> None:
    goldens = Test(tmp_path).goldens
    assert goldens("a").bounds is None
    assert goldens("b", torch.float16).bounds == TOLERANCES[torch.float16]
    assert goldens("c", Tolerance(1, 2)).bounds == Tolerance(1, 2)
    for wrong in (0.5, torch.int8):
        with pytest.raises(ValueError, match=r"^golden\(tolerance=.*\): write a Tolerance, or one of torch"):
            goldens("d", wrong)  # type: ignore[arg-type]


def test_values_under_one_name_are_numbered(tmp_path: Path) -> None:
    run = Test(tmp_path).goldens("run")
    run.record("a", 1)
    run.record("a", {"x": torch.ones(1), "y": None})
    run.record("b", torch.ones(2))
    assert [name for name, _ in run._values] == ["a 0", "a 1: x", "b 0"]
    with pytest.raises(TypeError, match=r"^golden: a holds no tensor and no number: 'text'"):
        run.record("a", "text")


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.tensor(1 / 3), "float32 [] value 0.333333343"),
        (torch.tensor(1 / 3, dtype=torch.float64), "float64 [] value 0.33333333333333331"),
        (torch.tensor(7), "int64 [] value 7"),
        (torch.tensor(True), "bool [] value True"),
        (torch.tensor([3.0, 4.0]), "float32 [2] norm 5 sum 7 mix 2.47213595 bits 986c627ee6ef"),
        (torch.tensor([4.0, 3.0]), "float32 [2] norm 5 sum 7 mix 1.85410197 bits eec6eec3ff9e"),
        (torch.tensor([[3 + 4j]]), "complex64 [1, 1] norm 5 sum 7 mix 2.47213595 bits 986c627ee6ef"),
        (torch.tensor(3 + 4j), "complex64 [] norm 5 sum 7 mix 2.47213595 bits 986c627ee6ef"),
    ],
)
def test_a_tensor_is_described_by_numbers_and_a_digest(tensor: torch.Tensor, text: str) -> None:
    assert describe(tensor) == text


def test_what_is_the_same_on_all_ranks_has_one_line() -> None:
    merged = module._merged([[("a", "1"), ("b", "2"), ("c", "4")], [("a", "1"), ("b", "3")]])
    assert merged == (
        GoldenEntry("a", "all", "1"),
        GoldenEntry("b", "rank 0", "2"),
        GoldenEntry("b", "rank 1", "3"),
        GoldenEntry("c", "rank 0", "4"),
    )


def test_sequences_that_differ_are_those_of_each_rank() -> None:
    lines = [("a", "1"), ("b", "2")]
    assert [each.ranks for each in module._merged_sequences([lines, lines])] == ["all", "all"]
    assert module._merged_sequences([lines[:1], lines]) == (
        GoldenEntry("a", "rank 0", "1"),
        GoldenEntry("a", "rank 1", "1"),
        GoldenEntry("b", "rank 1", "2"),
    )


def test_a_collective_is_described_with_its_inputs_and_phase() -> None:
    entry = SimpleNamespace(
        dtypes=[torch.float32, torch.int64], shapes=[(2, 3), ()], group_size=4, in_backward=True, label=""
    )
    assert module._of_collective(entry) == "float32[2, 3], int64[] 4 ranks backward"
    entry = SimpleNamespace(dtypes=[], shapes=[], group_size=1, in_backward=False, label="sum")
    assert module._of_collective(entry) == "1 ranks forward sum"


# The end of a run


def said(folder: Path, stats: dict[str, list[object]] | None = None, **options: Any) -> list[str]:
    args = options.pop("args", [str(folder)])
    updates = options.pop("updates", False)
    written = options.pop("written", ["a"])
    config = SimpleNamespace(
        getoption=lambda name: updates,
        option=SimpleNamespace(**options),
        args=args,
        invocation_params=SimpleNamespace(dir=folder),
    )
    used = [str(folder / name) for name in ("one/b-2-gloo.txt", "one/a-2-gloo.txt")]
    return list(lines(config, stats or {}, used, written))  # type: ignore[arg-type]


def test_goldens_without_a_test_are_named_after_a_whole_run(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    for name in ("b-2-gloo", "a-2-gloo", "old-2-gloo", "old-2-nccl", "c-4-gloo"):
        (tmp_path / "one" / f"{name}.txt").touch()
    found = [f"golden that no test has used: one/{name}-gloo.txt; remove it" for name in ("c-4", "old-2")]
    assert said(tmp_path) == found
    assert said(tmp_path, {"passed": [1], "failed": []}) == found
    for kind in ("failed", "error", "skipped", "deselected", "xfailed"):
        assert said(tmp_path, {kind: [1]}) == []
    for option in ("keyword", "markexpr", "lf", "deselect"):
        assert said(tmp_path, **{option: "x"}) == []
    assert said(tmp_path, args=["one", "a.py::test"]) == []
    assert said(tmp_path, args=["a.py::test"], updates=True) == ["goldens: 1 written, 1 up to date"]
    assert said(tmp_path, {"failed": [1]}, updates=True, written=[]) == ["goldens: 2 up to date"]
