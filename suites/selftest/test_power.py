"""The mutants and bugs of `benchmarks/power.py` still are edits of the project, and it judges as it says."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path, PurePath
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
MUTANTS, ENGINE = PROJECT / "benchmarks" / "mutants", PROJECT / "harness" / "engine"


def loaded(name: str, monkeypatch: Any) -> ModuleType:
    """Return a module of the folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"mutants_{name}", MUTANTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_each_bug_of_the_corpus_is_an_edit_of_the_engine(monkeypatch: Any) -> None:
    for name, injection in loaded("corpus", monkeypatch).CORPUS.items():
        source = (ENGINE / injection.file).read_text()
        assert source.count(injection.before) == 1, name
        ast.parse(injection.apply(source))


@pytest.mark.parametrize("name", ["engine", "core"])
def test_each_equivalent_is_a_mutant(monkeypatch: Any, name: str) -> None:
    module = power(monkeypatch)
    folder = PROJECT / module.SUBJECTS[name].folder
    entries = tomllib.loads((MUTANTS / f"equivalent_{name}.toml").read_text())["equivalent"]
    assert entries
    found = {
        mutant.key
        for file in {entry["file"] for entry in entries}
        for mutant in power(monkeypatch, "mutants.mutations").mutants_of(file, (folder / file).read_text())
    }
    assert {tuple(e[k] for k in ("file", "function", "before", "after")) for e in entries} <= found


def test_the_core_is_all_of_harness_but_engines_and_port(monkeypatch: Any) -> None:
    module = power(monkeypatch)
    files = {str(path.relative_to(PROJECT)) for path in module.SUBJECTS["core"].files()}
    assert {"harness/subtests.py", "harness/world/world.py", "harness/features/leaks/guard.py"} <= files
    apart = ("harness/engine/", "harness/conformance/adapters/", "harness/port/")
    assert not any(file.startswith(apart) for file in files)
    engine = {str(path.relative_to(PROJECT)) for path in module.SUBJECTS["engine"].files()}
    assert engine == {f"harness/engine/{path.name}" for path in ENGINE.glob("*.py")}


def test_claims_that_run_the_rarest_branch_come_first(monkeypatch: Any) -> None:
    """A mutant of a condition, or of a loop, is noticed by what goes through it."""
    module = power(monkeypatch)
    source = "def f(x):\n    if x:\n        return g(x)\n    return 1\n"
    found = {m.before: m for m in power(monkeypatch, "mutants.mutations").mutants_of("f.py", source)}
    mutant = found["if x:"]
    assert (mutant.lines, mutant.branches, found["return g(x)"].branches) == ((2, 2), (3,), ())
    claims = [
        module.Claim(f"{name}.py::test", "gloo", 2, seconds, {"f.py": frozenset(lines)})
        for name, seconds, lines in [("a", 1.0, {2, 4}), ("b", 9.0, {2, 3}), ("c", 2.0, {2, 4})]
    ]
    names = [claim.file for claim in module.in_order(claims, "f.py", mutant.lines, mutant.branches)]
    assert names == ["b.py", "a.py", "c.py"]
    assert module.in_order(claims, "f.py", mutant.lines)[0].file == "a.py"


def test_claims_of_the_room_of_a_mutant_come_first(monkeypatch: Any) -> None:
    module = power(monkeypatch)
    lines = {"features/leaks/guard.py": frozenset({1})}
    claims = [
        module.Claim(f"suites/selftest/{folder}/test_a.py::test", "gloo", 2, 1.0, lines)
        for folder in ("world", "leaks", "fake")
    ]
    found = module.in_order(claims, "features/leaks/guard.py", (1,))
    assert [PurePath(each.file).parent.name for each in found] == ["leaks", "world", "fake"]
    declares = module.in_order(claims, "features/fake/names.py", ())
    assert [PurePath(each.file).parent.name for each in declares] == ["fake"]
    assert [module.room_of(file) for file in ("subtests.py", "world/world.py")] == ["selftest", "world"]


def test_claims_with_the_rarest_word_of_the_line_come_first(monkeypatch: Any, tmp_path: Path) -> None:
    """A mutant of a setting is noticed by the tests that set it."""
    module = power(monkeypatch)
    (tmp_path / "test_a.py").write_text(
        "def test_one():\n    shard(offload=True)\n\nclass TestA:\n    def test_two(self):\n        shard()\n"
    )
    words = power(monkeypatch, "mutants.recording").words_of_tests(
        SimpleNamespace(folder=tmp_path), ["test_a.py"]
    )
    assert words == {
        "test_a.py::test_one": {"test_one", "shard", "offload"},
        "test_a.py::TestA::test_two": {"test_two", "shard", "self"},
    }
    claims = [
        module.Claim(name, "gloo", 2, 1.0, {"f.py": frozenset(lines)}, words[name])
        for name, lines in [("test_a.py::TestA::test_two", {1, 2}), ("test_a.py::test_one", {1})]
    ]
    names = [each.name for each in module.in_order(claims, "f.py", (1,), (), ["shard", "offload", "config"])]
    assert names == ["test_a.py::test_one", "test_a.py::TestA::test_two"]
    assert [each.name for each in module.in_order(claims, "f.py", (1,), (), ["shard"])] == names[::-1]


def test_cases_that_were_not_recorded_may_run_the_line(monkeypatch: Any) -> None:
    module = power(monkeypatch)
    lines = {"shm/reduce.py": frozenset({3, 4})}
    name = "suites/selftest/shm/test_a.py::test"
    claims = [
        module.Claim(f"{name}[{case}]", "gloo", 2, case / 2, lines if case else {}) for case in range(3)
    ]
    claims = power(monkeypatch, "mutants.recording").with_guesses(claims)
    assert [(each.seconds, each.is_guess) for each in claims] == [(1.0, True), (0.5, False), (1.0, False)]

    def order(*lines: int) -> list[str]:
        return [each.name.removeprefix(name) for each in module.in_order(claims, "shm/reduce.py", lines)]

    assert order(3, 2) == ["[1]", "[2]", "[0]"]
    assert order(9, 8) == ["[1]", "[2]", "[0]"]


def test_claims_that_start_sessions_come_last(monkeypatch: Any, tmp_path: Path) -> None:
    module, recording = power(monkeypatch), power(monkeypatch, "mutants.recording")
    file = "suites/selftest/leaks/test_a.py"
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(
        "def test_own(project): ...\ndef test_shared(run): ...\n"
        "def test_quick(): ...\ndef test_also_shared(run): ...\n"
    )
    (tmp_path / "leaks").mkdir()
    (tmp_path / "leaks" / "guard.py").touch()
    tests = ("own", "shared", "quick", "also_shared")
    monkeypatch.setattr(recording, "names_of", lambda *_: [f"{file}::test_{name}" for name in tests])
    subject = SimpleNamespace(files=lambda folder: [folder / "leaks" / "guard.py"])
    base = SimpleNamespace(folder=tmp_path, top=tmp_path, subject=subject)
    claims = recording.guesses_of_rooms(base, "gloo", [file])
    assert [each.is_slow for each in claims] == [True, True, False, True]

    def ordered(*around: str) -> list[str]:
        found = module.in_order(claims, "leaks/guard.py", (1,), around=around)
        return [each.name.partition("::test_")[2] for each in found]

    assert ordered() == ["quick", "own", "shared", "also_shared"]
    assert ordered("test_also_shared", "run") == ["quick", "also_shared", "shared", "own"]


def test_claims_of_a_file_of_the_same_name_come_before_those_with_rare_words(monkeypatch: Any) -> None:
    module, recording = power(monkeypatch), power(monkeypatch, "mutants.recording")
    lines = {"leaks/guard.py": frozenset({1})}
    claims = [
        recording.Claim(
            f"suites/selftest/leaks/{file}::test_a", "gloo", 2, 1.0, lines, words, "", is_guess=True
        )
        for file, words in (("test_other.py", frozenset({"rare"})), ("test_guard.py", frozenset()))
    ]
    found = module.in_order(claims, "leaks/guard.py", (1,), words=["rare"])
    assert [each.file for each in found] == [
        f"suites/selftest/leaks/test_{name}.py" for name in ("guard", "other")
    ]


def test_words_around_a_mutant_are_those_of_its_function(monkeypatch: Any) -> None:
    module, seen = power(monkeypatch), []
    source = "def outer():\n    def inner():\n        return answer > limit\n    return whole\n"
    mutants = power(monkeypatch, "mutants.mutations").mutants_of("f.py", source)
    monkeypatch.setattr(module, "in_order", lambda *given: seen.append(given[4:]) or [])
    module.near_to(next(each for each in mutants if each.line == 3), [], source)
    assert seen == [({"answer", "limit", "return"}, {"inner", "answer", "limit", "return"})]


SAMPLE = '''
def mean(values: list[int | None], scale: float = 1.0) -> float:
    """Return it."""
    if not values and scale > 2:
        raise ValueError(f"{len(values) + 1}")
    work.wait()
    return total.detach() / (len(values) * 2)
'''


def test_mutants_are_of_what_runs_and_not_of_types_or_messages(monkeypatch: Any) -> None:
    found = [(m.before, m.after) for m in loaded("mutations", monkeypatch).mutants_of("mean.py", SAMPLE)]
    assert ("work.wait()", "pass") in found
    condition = "if not values and scale > 2:"
    for other in (
        "if True:",
        "if False:",
        "if ((not values) or (scale > 2)):",
        "if (values) and scale > 2:",
        "if not values and scale >= 2:",
        "if not values and scale > 3:",
    ):
        assert (condition, other) in found
    result = "return total.detach() / (len(values) * 2)"
    assert (result, "return total / (len(values) * 2)") in found
    assert (result, "return total.detach() * (len(values) * 2)") in found
    assert not any("raise" in before or '"""' in before for before, _ in found)
    signature = [after for before, after in found if before.startswith("def ")]
    assert signature == ["def mean(values: list[int | None], scale: float = 2.0) -> float:"]


def power(monkeypatch: Any, name: str = "power") -> Any:
    """Return the benchmark, or one of the modules that it is made of."""
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module(name)


def test_what_fails_without_a_mutant_is_no_kill(monkeypatch: Any) -> None:
    module = power(monkeypatch)
    claims = [module.Claim(name, "gloo", 2, 1.0, {}) for name in ("a", "flaky", "z", "unused")]
    controlled = []

    def run(base: Any, edits: Any, claims: Any, limit: float) -> Any:
        assert not edits
        controlled.append([claim.name for claim in claims])
        if "flaky" in controlled[-1]:
            return module.Result("killed", "flaky", 1.0, 1)
        return module.Result("survived", "", 1.0, 1)

    monkeypatch.setattr(module, "run", run)
    found = [
        ("killed", "a"),
        ("killed", "flaky"),
        ("timed out", "flaky"),
        ("killed", "z"),
        ("survived", "3 claims"),
    ]
    decided = [(module.Result(*each, 1.0, 1), claims) for each in [*found, ("session", "exit status 1")]]
    verdicts = [each.verdict for each in module.confirm(None, decided, 60.0)]
    assert verdicts == ["killed", "undecided", "undecided", "killed", "survived", "session"]
    assert controlled == [["a", "flaky", "z"], ["z"]]


def test_lines_of_accelerators_are_apart_only_if_no_claim_runs_them(monkeypatch: Any) -> None:
    module = power(monkeypatch)
    _, elsewhere = module.equivalents(module.SUBJECTS["engine"])
    written = tomllib.loads((MUTANTS / "equivalent_engine.toml").read_text())["accelerators"]
    found = {
        (file, m.before)
        for file in written["lines"]
        for m in power(monkeypatch, "mutants.mutations").mutants_of(file, (ENGINE / file).read_text())
        if elsewhere(m)
    }
    assert found == {(file, line) for file, lines in written["lines"].items() for line in lines}


def test_a_run_of_no_claims_is_no_verdict(monkeypatch: Any) -> None:
    verdict = power(monkeypatch).verdict
    assert [verdict(1, "claim", False), verdict(1, "claim", True)] == ["killed", "timed out"]
    assert [verdict(0, "", False), verdict(2, "", False), verdict(4, "", False)] == ["", "session", "session"]
    with pytest.raises(SystemExit, match="none of the chosen claims"):
        verdict(5, "", False)


TRACED = """
import os
from lockstep.output import truncate
if os.fork() == 0:
    os.environ["LOCKSTEP_CLAIMS_ITEM"] = "forked"
    truncate("text", 3)
    os.kill(os.getpid(), 9)
os.wait()
"""


def test_a_claim_is_traced_though_one_before_it_has_ended_that(monkeypatch: Any, tmp_path: Path) -> None:
    claims = loaded("claims", monkeypatch)
    monkeypatch.setenv(claims.RECORD, str(tmp_path))
    monkeypatch.setenv(claims.ITEM, "")
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(tracer=lambda *_: None))
    before = sys.gettrace()
    try:
        sys.settrace(None)
        with claims.running("test_a", []):
            traced = sys.gettrace()
    finally:
        sys.settrace(before)
    assert traced is sys.modules["sitecustomize"].tracer


def test_lines_of_a_process_that_is_killed_are_recorded(monkeypatch: Any, tmp_path: Path) -> None:
    variables = {"RECORD": str(tmp_path), "SOURCE": str(PROJECT / "harness"), "ITEM": "first"}
    environ = {f"LOCKSTEP_CLAIMS_{name}": value for name, value in variables.items()}
    environ["PYTHONPATH"] = str(MUTANTS / "traced")
    subprocess.run([sys.executable, "-c", TRACED], env=os.environ | environ, check=True)
    ran = power(monkeypatch, "mutants.recording").lines_in(tmp_path)
    processes, lines = ran["forked"]
    texts = (PROJECT / "harness" / "output.py").read_text().splitlines()
    assert len(processes) == 1
    assert {texts[line - 1].strip() for file, line in lines if file == "output.py"} >= {
        "if len(text) <= most:",
        "head, tail = _head(text[:half]), _tail(text[-half:])",
    }
    assert not ran["first"][1] & lines


SAMPLE_CLAIMS = """
import os
from pathlib import Path
from lockstep import process_tree

def test_edit():
    assert process_tree.END_WITHIN == 7

def test_processes():
    assert max(int(name) for name in os.listdir("/proc") if name.isdecimal()) < 100
"""


def test_an_edit_is_seen_by_its_own_processes_alone(monkeypatch: Any, tmp_path: Path) -> None:
    module = power(monkeypatch)
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("no name spaces here")
    if PROJECT.is_relative_to("/tmp"):
        pytest.skip("each mutant has a /tmp of its own, and would not see this checkout")
    claims, copied = tmp_path / "base" / "suites" / "selftest", tmp_path / "copy"
    claims.mkdir(parents=True)
    copied.mkdir()
    (claims / "test_of_an_edit.py").write_text(SAMPLE_CLAIMS)
    source = (PROJECT / "harness" / "process_tree.py").read_text()
    base = SimpleNamespace(folder=tmp_path / "base", subject=module.SUBJECTS["core"])
    copy = power(monkeypatch, "mutants.copies").Copy(copied, base)
    copy.edit("process_tree.py", source.replace("END_WITHIN = 2.0", "END_WITHIN = 7"))
    status = copy.pytest(["suites/selftest/test_of_an_edit.py"], 60)
    assert (status, copy.output(-1).splitlines()[-1][:8]) == (0, "2 passed")
    assert (PROJECT / "harness" / "process_tree.py").read_text() == source
    assert not (PROJECT / "suites" / "selftest" / "test_of_an_edit.py").exists()


def test_a_run_goes_on_where_an_earlier_one_ended(
    monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = power(monkeypatch)
    source = "def f(x):\n    g(x)\n    h(x)\n    return x + 1\n"
    (tmp_path / "f.py").write_text(source)
    chosen = power(monkeypatch, "mutants.mutations").mutants_of("f.py", source)
    assert len(chosen) == 5
    base = SimpleNamespace(folder=tmp_path, top=tmp_path, subject=module.SUBJECTS["core"])
    claim = module.Claim("suites/selftest/test_f.py::test", "gloo", 2, 1.0, {"f.py": frozenset({2, 3, 4})})
    edited = []

    def run(base: Any, edits: Any, claims: Any, limit: float) -> Any:
        edited.extend(edits)
        return module.Result("killed" if edits and "pass" in edits[0][1] else "survived", claim.name, 1.0, 1)

    monkeypatch.setattr(module, "run", run)
    arguments = SimpleNamespace(results=tmp_path / "found", minutes=1, limit=1.0, jobs=1)
    module.each_mutant(base, arguments, chosen[:3], [claim])
    assert len(edited) == 3
    rows = arguments.results.read_text().splitlines()
    arguments.results.write_text("\n".join(rows[:4]) + "\n")  # as if ended before two were confirmed
    module.each_mutant(base, arguments, chosen, [claim])
    assert len(edited) == len({text for _, text in edited}) == 5
    assert "2 of 5 that CPU ranks run" in capsys.readouterr().out
