"""What ranks print: shown of the dead and the hung too, cut where it is too much, kept in full on request."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from harness.output import OutputDirectory, read_truncated, truncate, truncate_lines

FAULTS = """
    import logging, os, signal, sys, time
    import pytest

    pytestmark = pytest.mark.ranks(2)
    print("an import of", os.environ.get("RANK"))

    def say(world, *, what):
        print(what, "out", world.rank)
        print(what, "err", world.rank, file=sys.stderr)

    @pytest.fixture
    def prepared(world):
        say(world, what="prepared")

    def test_dies(world, prepared):
        say(world, what="dying")
        os.write(2, b"terminate called after throwing an instance of 'gloo::EnforceNotMet'\\n")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_dies_in_a_subtest(world, run_subtests):
        def claim(n):
            say(world, what=f"point {n}")
            if (world.rank, n) == (1, 3):
                os._exit(3)

        say(world, what="before")
        run_subtests({"n": [2, 3]}, claim)

    def test_dies_late(world, request):
        def die():
            say(world, what="tearing down")
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        request.addfinalizer(die)
        say(world, what="calling")

    @pytest.mark.ranks(2, timeout=2)
    def test_hangs(world, prepared):
        print("".join(f"line {n}\\n" for n in range(100_000)), end="")
        print("stuck err", world.rank, file=sys.stderr)
        if world.rank == 1:
            time.sleep(100)

    def test_passes(world, prepared):
        say(world, what="calling")
        logging.warning("logged by %d", world.rank)

    def test_subtests(world, subtests):
        say(world, what="before")
        with subtests.test("one"):
            say(world, what="within")

    @pytest.mark.parametrize("text", ["a/../b::c"])
    def test_parameters(world, text):
        print(text)
"""
TO_THE_END = """
    import os, sys

    def pytest_sessionstart():
        os.write(1, b"starting\\n")

    def pytest_sessionfinish():
        print("closing")
"""


@dataclass(frozen=True)
class Session:
    path: Path
    output: str

    def report(self, name: str) -> str:
        """The failure of a test, from its headline to the next one's."""
        found = re.search(
            rf"^_+ {re.escape(name)} _+\n(.*?)(?=^(_{{3,}} |={{3,}} ))", self.output, re.M | re.S
        )
        assert found, f"{name} is not among the failures:\n{self.output}"
        return found[1]

    def last_output(self, name: str) -> list[str]:
        return self.report(name).split("rank 1's last output:\n")[1].split("\n---")[0].splitlines()

    def section(self, name: str, title: str) -> list[str]:
        found = re.search(
            rf"^-+ {re.escape(title)} -+\n(.*?)(?=^(-{{3,}} )|\Z)", self.report(name), re.M | re.S
        )
        assert found, f"{name} has no section {title!r}:\n{self.report(name)}"
        return found[1].splitlines()

    def kept(self, name: str, file: str) -> list[str]:
        return (self.path / "kept" / "test_faults.py" / name / file).read_text().splitlines()


def run(path: Path, *args: str) -> Session:
    (path / "pytest.ini").write_text("[pytest]\nranks_preload =\n")
    (path / "test_faults.py").write_text(dedent(FAULTS))
    (path / "conftest.py").write_text(dedent(TO_THE_END))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--world-timeout=20", *args],
        cwd=path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Session(path, done.stdout)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Session:
    path = tmp_path_factory.mktemp("faults")
    stale = path / "kept" / "test_faults.py" / "test_passes"
    stale.mkdir(parents=True)
    for name in ("rank-0.stdout", "rank-7.stdout", "notes.txt"):
        (stale / name).write_text("of an earlier run\n")
    return run(path, "--rank-output-dir=kept")


# Dead ranks


def test_what_a_dead_rank_had_printed_is_shown_native_messages_too(faults: Session) -> None:
    assert faults.last_output("test_dies") == [
        "dying out 1",
        "dying err 1",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    ]


def test_what_a_dead_rank_had_printed_in_setup_is_shown(faults: Session) -> None:
    assert faults.section("test_dies", "Captured stdout setup (rank 1)") == ["prepared out 1"]
    assert "rank 0)" not in faults.report("test_dies")


def test_what_a_rank_printed_in_the_subtest_it_died_in_is_shown(faults: Session) -> None:
    assert faults.last_output("test_dies_in_a_subtest [n=3]") == [
        *("before out 1", "point 3 out 1", "before err 1", "point 3 err 1"),
    ]


def test_a_death_in_teardown_shows_what_was_printed_there_and_before(faults: Session) -> None:
    assert faults.last_output("ERROR at teardown of test_dies_late") == [
        "tearing down out 1",
        "tearing down err 1",
    ]
    title = "Captured stdout call (rank 1)"
    assert faults.section("ERROR at teardown of test_dies_late", title) == ["calling out 1"]


# Ranks that hang


def test_what_a_hung_rank_had_printed_is_shown_in_sections_by_phase(faults: Session) -> None:
    sections = re.findall(r"^-+ (Captured .*?) -+$", faults.report("test_hangs"), re.M)
    assert sections == [
        f"Captured {stream} {phase} (rank 1)"
        for phase in ("setup", "call")
        for stream in ("stdout", "stderr")
    ]
    assert faults.section("test_hangs", "Captured stdout setup (rank 1)") == ["prepared out 1"]
    assert faults.section("test_hangs", "Captured stderr call (rank 1)") == ["stuck err 1"]


def test_of_much_output_the_head_and_the_tail_are_shown_at_line_borders(faults: Session) -> None:
    lines = faults.section("test_hangs", "Captured stdout call (rank 1)")
    [note] = [line for line in lines if not line.startswith("line ")]
    assert (lines[0], lines[-1]) == ("line 0", "line 99999")
    shown = sum(len(line) + 1 for line in lines) - len(note) - 1
    assert note == f"[... {1_088_890 - shown:,} bytes left out; --rank-output-dir DIR keeps all of it ...]"
    assert 190_000 < shown < 200_000
    assert all(re.fullmatch(r"line \d+", line) for line in lines if line is not note)


# The folder of --rank-output-dir


@pytest.mark.parametrize("rank", [0, 1])
def test_all_that_a_passing_test_prints_is_kept_by_rank_and_stream(faults: Session, rank: int) -> None:
    assert faults.kept("test_passes", f"rank-{rank}.stdout") == [
        f"prepared out {rank}",
        f"calling out {rank}",
    ]
    assert faults.kept("test_passes", f"rank-{rank}.stderr") == [
        f"prepared err {rank}",
        f"calling err {rank}",
    ]
    [line] = faults.kept("test_passes", f"rank-{rank}.log")
    assert line.endswith(f"logged by {rank}")


def test_files_of_the_same_test_are_replaced_and_others_stay(faults: Session) -> None:
    folder = faults.path / "kept" / "test_faults.py" / "test_passes"
    assert not (folder / "rank-7.stdout").exists()
    assert (folder / "notes.txt").read_text() == "of an earlier run\n"


def test_what_a_dead_rank_printed_is_kept_from_its_setup_to_its_end(faults: Session) -> None:
    assert faults.kept("test_dies", "rank-1.stdout") == ["prepared out 1", "dying out 1"]
    assert faults.kept("test_dies", "rank-0.stdout") == ["prepared out 0", "dying out 0"]
    assert faults.kept("test_dies_in_a_subtest", "rank-1.stdout") == [
        *(
            "point 2 out 1",
            "before out 1",
            "point 3 out 1",
        ),  # a subtest's output is complete before its test's
    ]


def test_what_a_hung_rank_printed_is_kept_in_full(faults: Session) -> None:
    lines = faults.kept("test_hangs", "rank-1.stdout")
    assert lines == ["prepared out 1", *(f"line {n}" for n in range(100_000))]


def test_what_subtests_print_is_kept_once(faults: Session) -> None:
    assert faults.kept("test_subtests", "rank-1.stdout") == ["within out 1", "before out 1"]


def test_what_is_printed_outside_of_tests_is_kept_too(faults: Session) -> None:
    logs = (faults.path / "kept" / "outside-of-tests" / "master").glob("*/rank-1.log")
    texts = {path.read_text() for path in logs}
    assert texts == {"starting\n", "starting\nclosing\n"}
    assert (faults.path / "kept" / "test_faults.py" / "rank-1.stdout").read_text() == "an import of 1\n"


def test_the_folder_of_a_test_has_a_name_that_every_file_system_takes(faults: Session) -> None:
    assert faults.kept("test_parameters[a_.._b__c]-085a0b8d", "rank-0.stdout") == ["a/../b::c"]


def test_folders_follow_file_class_and_name_and_never_leave_the_directory() -> None:
    folder = OutputDirectory("/kept").of_test
    assert (
        str(folder("suites/test_a.py::TestB::test_c[2-ranks]"))
        == "/kept/suites/test_a.py/TestB/test_c[2-ranks]"
    )
    assert len(folder(f"test_a.py::test_b[{'x' * 300}]").name) < 140
    outside = folder("../other/test_a.py::test_b")
    assert outside.parts[:2] == ("/", "kept")
    assert ".." not in outside.parts
    assert (
        folder("test_a.py::test_b[a:b]")
        != folder("test_a.py::test_b[a_b]")
        != folder("test_a.py::test_b[a?b]")
    )


# Other ways to capture


def test_output_that_python_captures_in_memory_is_shown_as_well(tmp_path: Path) -> None:
    session = run(tmp_path, "--capture=sys", "test_faults.py::test_dies")
    assert session.last_output("test_dies") == [
        *("an import of 1", "prepared out 1", "prepared err 1", "dying out 1", "dying err 1"),
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-s", "--rank-output-dir=kept"], "--rank-output-dir: -s leaves nothing to keep; leave it out"),
        (["--rank-output-dir=test_faults.py"], "--rank-output-dir: no folder can be made: "),
    ],
)
def test_a_folder_that_cannot_be_filled_is_refused_before_anything_runs(
    pytester: pytest.Pytester, args: list[str], message: str
) -> None:
    pytester.makepyfile(test_faults="def test_x(): pass")
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}"):
        pytester.parseconfigure(*args)


# Cutting


@pytest.mark.parametrize("length", [0, 99, 100, 101, 1000, 10**6])
def test_a_cut_text_is_never_longer_than_allowed_and_says_what_is_missing(length: int) -> None:
    text = "x" * length
    short = truncate(text, 100, "look elsewhere")
    assert len(short) <= 100
    assert truncate(short, 100) == short
    if length > 100:
        head, note, tail = short.splitlines()
        assert note == f"[... {length - len(head) - len(tail):,} characters left out; look elsewhere ...]"
    else:
        assert short == text


def test_lines_are_cut_to_the_first_and_the_last_ones() -> None:
    lines = [f"{n:09}" for n in range(1000)]
    assert truncate_lines(lines, 9000) == lines
    assert truncate_lines(lines, 90) == [*lines[:5], "[... 990 lines left out ...]", *lines[-5:]]


def test_a_file_is_cut_from_where_reading_begins(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before" + b"\xff" + b"a\n" * 500)
    assert read_truncated(path, start=len(b"before\xff") + 990, most=100) == "a\n" * 5
    assert read_truncated(path, most=100).splitlines()[0] == "before\N{REPLACEMENT CHARACTER}a"
    assert read_truncated(tmp_path / "nothing") == ""
