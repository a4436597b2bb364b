"""Unit tests of the command `conformance`: what it gives pytest, and what it writes and returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.__main__ import main
from lockstep.conformance import command
from lockstep.conformance.registry import INSTALLED_SUITES, built_in_names
from lockstep.conformance.stored import dump
from lockstep.conformance.table import Case, Cell, Claim, Outcome, Table


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The arguments that pytest gets, started in an empty folder beside a checkout."""
    words: list[str] = []

    def run(arguments: list[str]) -> int:
        words[:] = arguments
        return 5

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytest, "main", run)
    monkeypatch.setattr(command, "suites_are_installed", lambda: False)
    return words


PLUGIN = ["-p", "lockstep.conformance.plugin"]
SUITES = INSTALLED_SUITES.resolve()


def test_all_suites_run_on_all_engines_unless_some_are_named(given: list[str]) -> None:
    assert main(["conformance"]) == 5
    engines = [f"--engine={name}" for name in built_in_names()]
    end = [str(SUITES), f"--ignore={SUITES}/properties"]
    assert given == [*PLUGIN, *engines, "--conformance=conformance-report", *end]
    main(["conformance", "--engine", "a", "--engine=b", "--engine", "a", "--output", "out", "-x"])
    assert given == [*PLUGIN, "--engine=a", "--engine=b", "--conformance=out", "-x", *end]


def test_words_name_the_suites_or_files_that_are_there(given: list[str], tmp_path: Path) -> None:
    head = [*PLUGIN, "--engine=a", "--conformance=conformance-report"]
    engine = ["conformance", "--engine", "a"]
    main([*engine, "suites/core", "-x"])
    assert given == [*head, f"{SUITES}/core", "-x"]
    main([*engine, "suitestay"])
    assert given == [*head, "suitestay", str(SUITES), f"--ignore={SUITES}/properties"]
    (tmp_path / "mine.py").touch()
    main([*engine, "mine.py::test_1[2]"])
    assert given == [*head, "mine.py::test_1[2]"]
    main([*engine, "--engine", "b", "mine.py::test_1[2]"])
    assert given[-2:] == ["mine.py::test_1[2-a]", "mine.py::test_1[2-b]"]
    main([*engine, "-k", "mine.py"])
    assert given[-3:] == [*head[-1:], "-k", "mine.py"]


def test_installed_suites_run_without_the_ini_file_of_the_user(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "suites_are_installed", lambda: True)
    main(["conformance", "--engine", "a", "suites/core"])
    ini = ["-c", f"{INSTALLED_SUITES}/installed.ini", "-o", f"cache_dir={tmp_path}/.pytest_cache"]
    assert given[4:] == [f"{INSTALLED_SUITES}/core", *ini]


def test_the_difference_of_two_tables_is_printed_written_and_the_status(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, outcome in (("held", Outcome.HELD), ("broken", Outcome.BROKEN)):
        table = Table(["a"], {"t": Claim("t")}, {"t": {"a": Cell((Case("", outcome),))}})
        (tmp_path / f"{name}.json").write_text(dump(table))
    assert main(["conformance", "--diff", "held.json", "broken.json", "--output", "new/below"]) == 1
    shown = capsys.readouterr().out
    assert "held" in shown
    assert (tmp_path / "new" / "below" / "changes.md").read_text() == shown
    assert main(["conformance", "--diff", "broken.json", "held.json", "--output", "new/below"]) == 0
    assert main(["conformance", "--diff", "held.json", "held.json", "--output", "held.json/x"]) == 4
    assert capsys.readouterr().err == (
        "python -m lockstep conformance: nothing is written to --output held.json/x: "
        "held.json/x: Not a directory\n"
    )
    assert main(["conformance", "--merge", "held.json", "broken.json", "--output", "new"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "written to new/conformance.html"
    assert given == []
