"""The output of a rank in its files: what of it is shown, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.world.rank_output import RankOutput, as_here


@pytest.fixture
def output(tmp_path: Path) -> RankOutput:
    captured = tmp_path / "captured"
    captured.mkdir()
    (captured / "000000001.stdout").write_text("second\n")
    (captured / "000000000.stdout").write_text("first\n")
    (captured / "000000002.stderr").write_text("")
    (captured / "other.txt").write_text("none of it")
    log = tmp_path / "log"
    log.write_text("of before\nabort in /there/x.py\nExtension modules: numpy, torch\n")
    return RankOutput(captured, log, len("of before\n"), (("/here", "/there"),))


def test_parts_of_a_stream_are_joined_and_empty_streams_left_out(output: RankOutput) -> None:
    assert output.captured() == (("stdout", "first\nsecond\n"),)
    (output.directory / "000000003.stderr").write_text("third\n")
    assert output.captured() == (("stdout", "first\nsecond\n"), ("stderr", "third\n"))
    assert output.logged() == "abort in /here/x.py\n"
    assert output.read() == "first\nsecond\nthird\nabort in /here/x.py"


def test_what_is_shown_of_each_file_is_limited(output: RankOutput) -> None:
    words = "".join(f"line {number}\n" for number in range(1000))
    for name in ("000000000.stdout", "000000001.stdout"):
        (output.directory / name).write_text(words)
    output.log.write_text(f"of before\n{words}")
    ((_, captured),) = output.captured(500)
    for text in (captured[: len(captured) // 2], output.logged(500)):
        assert 300 < len(text) < 800
        assert text.startswith("line 0\n")
        assert "--rank-output-dir" in text
    assert 900 < len(output.read(500)) < 2200


def test_all_of_it_is_appended_to_files_of_the_rank(output: RankOutput, tmp_path: Path) -> None:
    kept = tmp_path / "kept" / "of_test"
    for _ in range(2):
        output.append_to(kept, 3)
    log = "abort in /there/x.py\nExtension modules: numpy, torch\n"
    assert {path.name: path.read_text() for path in kept.iterdir()} == {
        "rank-3.stdout": "first\nsecond\n" * 2,
        "rank-3.output": log * 2,
    }


def test_a_rank_without_output_has_no_files(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    output = RankOutput(tmp_path / "nowhere", log, 3)
    output.append_to(kept, 0)
    log.write_text("abc")
    output.append_to(kept, 0)
    assert not kept.exists()
    assert (output.captured(), output.logged(), output.read()) == ((), "", "")


def test_directories_of_another_host_are_named_as_here() -> None:
    moved = (("/here", "/there"), ("C:\\x", "/a.b"))
    text = "/there /there/x '/there' \"/there\" /there2 /a.b/c /aXb/c /there"
    assert as_here(text, moved) == "/here /here/x '/here' \"/here\" /there2 C:\\x/c /aXb/c /here"
    assert as_here(text, ()) == text
