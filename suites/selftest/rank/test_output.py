"""Output of ranks: shown of dead and hung ones too, and kept in full on request."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.output import KEEP_ALL, MAX_TEXT, OutputDirectory
from lockstep.rank import output as module
from lockstep.rank.item import StreamGuard
from lockstep.rank.output import PrefixedStream, capture_into, end_lines, prefix_streams
from suites.selftest.project import WITHOUT_PLUGINS, Project, Run, copy_project, run_pytest

OPTIONS = ("-p", "no:cacheprovider", "--world-timeout=20")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("printing", tmp_path_factory.mktemp("faults"))
    stale = path / "kept" / "test_faults.py" / "test_passes"
    stale.mkdir(parents=True)
    for name in ("rank-0.stdout", "rank-7.stdout", "notes.txt"):
        (stale / name).write_text("of an earlier run\n")
    return run_pytest(path, *OPTIONS, "--rank-output-dir=kept", **WITHOUT_PLUGINS)


def report(session: Run, name: str) -> str:
    """Return the failure of a test, from its headline to the next one's."""
    found = re.search(
        rf"^_+ {re.escape(name)} _+\n(.*?)(?=^(_{{3,}} |={{3,}} ))", session.output, re.M | re.S
    )
    assert found, f"{name} is not among the failures:\n{session.output}"
    return found[1]


def last_output(session: Run, name: str) -> list[str]:
    return report(session, name).split("rank 1's last output:\n")[1].split("\n---")[0].splitlines()


def section(session: Run, name: str, title: str) -> list[str]:
    text = report(session, name)
    found = re.search(rf"^-+ {re.escape(title)} -+\n(.*?)(?=^-+ |\Z)", text, re.M | re.S)
    assert found, f"{name} has no section {title!r}:\n{text}"
    return found[1].splitlines()


def kept(session: Run, name: str, file: str) -> list[str]:
    return (session.path / "kept" / "test_faults.py" / name / file).read_text().splitlines()


# Dead ranks


def test_output_of_a_dead_rank_is_shown(faults: Run) -> None:
    assert last_output(faults, "test_dies") == [
        "dying out 1",
        "dying err 1",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    ]


def test_output_of_a_dead_rank_in_setup_is_shown(faults: Run) -> None:
    assert section(faults, "test_dies", "Captured stdout setup (rank 1)") == ["prepared out 1"]
    assert "rank 0)" not in report(faults, "test_dies")


def test_output_of_the_subtest_a_rank_died_in_is_shown(faults: Run) -> None:
    assert last_output(faults, "test_dies_in_a_subtest [n=3]") == [
        *("before out 1", "case 3 out 1", "before err 1", "case 3 err 1"),
    ]


def test_a_death_in_teardown_shows_the_output_of_all_phases(faults: Run) -> None:
    assert last_output(faults, "ERROR at teardown of test_dies_late") == [
        "tearing down out 1",
        "tearing down err 1",
    ]
    title = "Captured stdout call (rank 1)"
    assert section(faults, "ERROR at teardown of test_dies_late", title) == ["calling out 1"]


# Ranks that hang


def test_output_of_a_hung_rank_is_shown_by_phase(faults: Run) -> None:
    sections = re.findall(r"^-+ (Captured .*?) -+$", report(faults, "test_hangs"), re.M)
    assert sections == [
        f"Captured {stream} {phase} (rank 1)"
        for phase in ("setup", "call")
        for stream in ("stdout", "stderr")
    ]
    assert section(faults, "test_hangs", "Captured stdout setup (rank 1)") == ["prepared out 1"]
    assert section(faults, "test_hangs", "Captured stderr call (rank 1)") == ["stuck err 1"]


def test_long_output_is_truncated_to_lines_of_head_and_tail(faults: Run) -> None:
    lines = section(faults, "test_hangs", "Captured stdout call (rank 1)")
    [note] = [line for line in lines if not line.startswith("line ")]
    assert (lines[0], lines[-1]) == ("line 0", "line 99999")
    shown = sum(len(line) + 1 for line in lines) - len(note) - 1
    assert note == f"[... {1_088_890 - shown:,} bytes left out; --rank-output-dir DIR keeps all of it ...]"
    assert 190_000 < shown < 200_000
    assert all(re.fullmatch(r"line \d+", line) for line in lines if line is not note)


# The folder of --rank-output-dir


@pytest.mark.parametrize("rank", [0, 1])
def test_output_of_a_passing_test_is_kept_by_rank_and_stream(faults: Run, rank: int) -> None:
    assert kept(faults, "test_passes", f"rank-{rank}.stdout") == [
        f"prepared out {rank}",
        f"calling out {rank}",
    ]
    assert kept(faults, "test_passes", f"rank-{rank}.stderr") == [
        f"prepared err {rank}",
        f"calling err {rank}",
    ]
    [line] = kept(faults, "test_passes", f"rank-{rank}.log")
    assert line.endswith(f"logged by {rank}")


def test_files_of_the_same_test_are_replaced_and_others_stay(faults: Run) -> None:
    folder = faults.path / "kept" / "test_faults.py" / "test_passes"
    assert not (folder / "rank-7.stdout").exists()
    assert (folder / "notes.txt").read_text() == "of an earlier run\n"


def test_output_of_a_dead_rank_is_kept_from_setup_to_end(faults: Run) -> None:
    assert kept(faults, "test_dies", "rank-1.stdout") == ["prepared out 1", "dying out 1"]
    assert kept(faults, "test_dies", "rank-0.stdout") == ["prepared out 0", "dying out 0"]
    assert kept(faults, "test_dies_in_a_subtest", "rank-1.stdout") == [
        *(
            "case 2 out 1",
            "before out 1",
            "case 3 out 1",
        ),  # a subtest's output is complete before its test's
    ]


def test_output_of_a_hung_rank_is_kept_in_full(faults: Run) -> None:
    lines = kept(faults, "test_hangs", "rank-1.stdout")
    assert lines == ["prepared out 1", *(f"line {n}" for n in range(100_000))]


def test_output_of_subtests_is_kept_once(faults: Run) -> None:
    assert kept(faults, "test_subtests", "rank-1.stdout") == ["within out 1", "before out 1"]


def test_output_outside_of_tests_is_kept(faults: Run) -> None:
    logs = (faults.path / "kept" / "outside-of-tests" / "master").glob("*/rank-1.log")
    texts = {path.read_text() for path in logs}
    assert texts == {"starting\n", "starting\nclosing\n"}
    assert (faults.path / "kept" / "test_faults.py" / "rank-1.stdout").read_text() == "an import of 1\n"


def test_the_folder_of_a_test_has_a_portable_name(faults: Run) -> None:
    assert kept(faults, "test_parameters[a_.._b__c]-085a0b8d", "rank-0.stdout") == ["a/../b::c"]


# Other ways to capture


def test_output_that_python_captures_in_memory_is_shown(tmp_path: Path) -> None:
    copy_project("printing", tmp_path)
    session = run_pytest(tmp_path, *OPTIONS, "--capture=sys", "test_faults.py::test_dies")
    assert last_output(session, "test_dies") == [
        *("an import of 1", "prepared out 1", "prepared err 1", "dying out 1", "dying err 1"),
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["-s", "--rank-output-dir=kept"],
            "--rank-output-dir: with -s no output is captured; remove one of the two",
        ),
        (["--rank-output-dir=test_faults.py"], "--rank-output-dir: cannot make the folder: "),
        (["--timeline=test_faults.py/below"], "--timeline: cannot make the folder: "),
        (["--timeline="], "--timeline '': write the path of a folder"),
        (["--rank-output-dir="], "--rank-output-dir '': write the path of a folder"),
    ],
)
def test_an_output_folder_that_cannot_be_filled_is_refused(
    pytester: pytest.Pytester, args: list[str], message: str
) -> None:
    pytester.makepyfile(test_faults="def test_x(): pass")
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}"):
        pytester.parseconfigure(*args)


@pytest.mark.parametrize("option", ["-s", "--capture=tee-sys", "-pno:capture"])
def test_lines_that_ranks_print_have_their_number(project: Project, option: str) -> None:
    project.copy("live")
    output = project.run(option, "test_live.py::test_a")
    assert "1 passed" in output
    printed = [line.removeprefix("test_live.py ") for line in output.splitlines()]
    for rank in (0, 1):
        of_rank = [line for line in printed if line.startswith(f"rank {rank}: ")]
        assert of_rank == [f"rank {rank}: {text} {rank}" for text in ("first", "second", "to stderr")]


def test_a_line_that_is_flushed_in_parts_has_one_prefix() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    stream.write("half")
    assert below.getvalue() == ""
    stream.flush()
    stream.write(" and half\n\nwhole\n")
    stream.flush()
    assert below.getvalue() == "rank 3: half and half\nrank 3: \nrank 3: whole\n"


def test_a_line_that_a_test_leaves_unfinished_ends_with_it() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    for text in ("no end", "", "next\n"):
        stream.write(text)
        stream.end_line()
    assert below.getvalue() == "rank 3: no end\nrank 3: next\n"


def test_what_a_thread_prints_in_between_is_not_lost() -> None:
    below = io.StringIO()
    stream = PrefixedStream(below, lambda: "rank 3")
    other = threading.Thread(target=stream.write, args=["of the other\n"])

    class Interrupted(str):
        """A text at whose addition to what was printed another thread prints."""

        def __radd__(self, begun: str) -> str:
            other.start()
            other.join(0.2)
            return begun + str(self)

    stream.write("begun, ")
    stream.write(Interrupted("ended\n"))
    other.join()
    assert below.getvalue() == "rank 3: begun, ended\nrank 3: of the other\n"


def test_a_stream_that_a_test_replaces_goes_back_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before, of_fixture, of_test = io.StringIO(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", before)
    monkeypatch.setattr(sys, "stderr", before)
    guard = StreamGuard()
    guard.before()
    sys.stderr = of_fixture
    guard.before_call()
    sys.stdout = of_test
    teardown = guard.pytest_runtest_teardown()
    next(teardown)
    with pytest.raises(StopIteration):
        next(teardown)
    assert (sys.stdout, sys.stderr) == (before, of_fixture)
    assert guard.take_notes() == [f"sys.stdout replaced by {of_test!r}"]
    assert guard.take_notes() == []


def test_both_streams_have_prefixes_and_end_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    end_lines()
    prefix_streams(lambda: "rank 3")
    for stream in (sys.stdout, sys.stderr):
        stream.writelines(["no", " end"])
        assert stream.write("!") == 1
        assert not stream.closed
        assert stream.getvalue() == ""  # type: ignore[attr-defined]
    end_lines()
    assert out.getvalue() == err.getvalue() == "rank 3: no end!\n"


def test_whole_lines_reach_the_stream_below_at_once() -> None:
    written: list[str] = []
    stream = PrefixedStream(
        SimpleNamespace(write=written.append, flush=lambda: written.append("flush")), lambda: "rank 3"
    )
    stream.write("")
    stream.flush()
    stream.write("a\nb\nrest")
    assert written == ["rank 3: a\nrank 3: b\n", "flush"]
    stream.end_line()
    stream.end_line()
    assert written[2:] == ["rank 3: rest", "flush", "\n", "flush"]


# The output of a test, in this process


class Kept:
    """The output of a test whose sections and reports a test gives."""

    def __init__(self, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sections: list[tuple[str, str, str]] = [("setup", "stdout", "earlier")]
        self.item: Any = SimpleNamespace(nodeid="test_a.py::test_a")
        monkeypatch.setattr(module, "captured_sections", lambda item: self.sections)
        world: Any = SimpleNamespace(rank=1)
        self.output = module.TestOutput(world, directory)
        self.output.begin(self.item)
        self.folder = OutputDirectory(directory).of_test("test_a.py::test_a")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(str(tmp_path / "kept"), monkeypatch)


LONG = "x" * (MAX_TEXT + 1)


def test_output_of_each_phase_is_stored_once(in_folder: Kept) -> None:
    sections = in_folder.sections
    sections += [("setup", "stdout", "one\n"), ("setup", "stderr", "two\n")]
    in_folder.output.settle(in_folder.item)
    in_folder.output.settle(in_folder.item)
    sections.append(("call", "stdout", LONG))
    in_folder.output.settle(in_folder.item)
    assert sections[:3] == [
        ("setup", "stdout", "earlier"),
        ("setup", "stdout", "one\n"),
        ("setup", "stderr", "two\n"),
    ]
    when, kind, text = sections[3]
    assert (when, kind) == ("call", "stdout")
    assert len(text) <= MAX_TEXT
    file = in_folder.folder / "rank-1.stdout"
    assert f"all of it is in {file}" in text
    assert file.read_text() == f"one\n{LONG}"
    assert (in_folder.folder / "rank-1.stderr").read_text() == "two\n"


def test_output_that_is_not_kept_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept("", monkeypatch)
    kept.sections.append(("call", "stdout", LONG))
    kept.output.settle(kept.item)
    assert KEEP_ALL in kept.sections[1][2]
    kept.output.keep_of_file(SimpleNamespace(sections=[("Captured stdout", "text")]))  # type: ignore[arg-type]


def test_output_that_cannot_be_kept_says_why(in_folder: Kept, tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    in_folder.sections.append(("call", "stdout", "text"))
    in_folder.output.settle(in_folder.item)
    text = in_folder.sections[1][2]
    assert text.startswith("text\n(could not be kept: [Errno ")
    assert text.endswith(")")
    in_folder.output.keep_of_file(SimpleNamespace(nodeid="test_a.py", sections=[("Captured log", "x")]))  # type: ignore[arg-type]


def test_output_of_a_subtest_is_stored_after_that_of_the_setup(in_folder: Kept) -> None:
    sections = [("Captured stdout setup", "earlier"), ("Captured stdout call", "mine\n"), ("Other", LONG)]
    report: Any = SimpleNamespace(nodeid="test_a.py::test_a", sections=sections)
    in_folder.output.settle_subtest(report)
    assert sections[:2] == [("Captured stdout setup", "earlier"), ("Captured stdout call", "mine\n")]
    title, text = sections[2]
    assert title == "Other"
    assert len(text) <= MAX_TEXT
    assert (in_folder.folder / "rank-1.stdout").read_text() == "mine\n"
    assert (in_folder.folder / "rank-1.Other").read_text() == LONG


def test_output_of_a_file_takes_the_place_of_an_earlier_import(in_folder: Kept, tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        report: Any = SimpleNamespace(nodeid="test_a.py", sections=[("Captured stdout", text)])
        in_folder.output.keep_of_file(report)
    assert (tmp_path / "kept" / "test_a.py" / "rank-1.stdout").read_text() == "second\n"


@pytest.mark.parametrize(
    ("title", "kind"),
    [
        *(("Captured stdout call", "stdout"), ("Captured log", "log"), ("Captured", "Captured")),
        ("Of a plugin", "Of a plugin"),
    ],
)
def test_the_kind_of_a_section_is_in_its_title(title: str, kind: str) -> None:
    assert module._kind(title) == kind


class Capture:
    """A capture of a file descriptor into a file without a name, as pytest's."""

    def __init__(self, number: int, file: Any) -> None:
        self.targetfd, self.tmpfile = number, file
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def done(self) -> None:
        self.calls.append("done")


def test_captures_write_into_files_with_names_while_they_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Patched(Capture):
        pass

    Patched.start, Patched.done = Capture.start, Capture.done  # type: ignore[method-assign]
    monkeypatch.setattr(module, "FD_CAPTURE", Patched)
    folder = tmp_path / "captured"
    capture_into(str(folder))
    assert folder.stat().st_mode & 0o777 == 0o700
    with (tmp_path / "file").open("w+b") as first, (tmp_path / "other").open("w+b") as second:
        captures = [Patched(1, first), Patched(2, second), Patched(5, first)]
        files = os.listdir("/proc/self/fd")
        for capture in captures[:2]:
            capture.start()
        assert os.listdir("/proc/self/fd") == files
        first.write(b"out")
        first.flush()
        second.write(b"err")
        second.flush()
        assert not os.get_inheritable(first.fileno())
        names = ["000000000.stdout", "000000001.stderr"]
        assert [(folder / name).read_bytes() for name in names] == [b"out", b"err"]
        assert (folder / names[0]).stat().st_mode & 0o777 == 0o600
        captures[2].start()
        assert sorted(path.name for path in folder.iterdir()) == names
        captures[0].done()
        assert [path.name for path in folder.iterdir()] == names[1:]
        (folder / names[1]).unlink()
        for capture in captures:
            capture.done()
    assert [capture.calls for capture in captures] == [
        ["start", "done", "done"],
        ["start", "done"],
        ["start", "done"],
    ]
