"""Strategies of bad input in sessions of pytest: odd texts and values, in marks, fixtures and options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

from lockstep import features, options
from lockstep.conformance import plugin as conformance
from lockstep.marker import RanksMark
from suites.selftest.bad_input.attempt import FIFO, RANKS, SECONDS, Attempt

PYTEST = (
    "pytest",
    *("-p", "no:cacheprovider", "-p", "lockstep.plugin", "--tb=short", "--continue-on-collection-errors"),
)
HEADER = "import pytest\n"
ON_RANKS = f"{HEADER}@pytest.mark.ranks(2)\ndef test_on_ranks(world): pass\n"
NEVER = ("--rank-debugpy",)
"""Options not for tests that run on ranks: they wait for the user, without a deadline."""
OF_TORCH = ("--backend=", "--device=", "--ranks-backend=", "--ranks-device=")
"""Options whose unknown values torch is asked for: it takes more than a second to import."""
PLACES: Mapping[str, str | bytes | None] = {
    "fifo": FIFO,
    "file": "text",
    "folder/": "",
    "broken.json": b'{"\xff',
    "test_sample.py": ON_RANKS,
}
"""The files of each project, for options and arguments that are paths."""

PATHS = (
    "nosuch",
    "file",
    "folder",
    "file/below",
    "fifo",
    "/dev/null",
    "/dev/null/below",
    "é" * 200,
    "a" * 300,
)
_NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "1e300",
    "1e-300",
    "-0",
    "-3",
    "0",
    "1",
    "²",
    "٣",
    "9" * 27,
    "1" + "0" * 400,
)
_LONG = ("9" * 5000, "[" * 5000, "1:" + "9" * 5000)
_OTHERS = (
    "",
    " ",
    "0x10",
    "1_000",
    "1:",
    ":1",
    "1:nan",
    "cpu:gloo",
    "gloo,",
    "0/2",
    "²/³",
    "a=",
    "=",
    "\udcff",
)
# No "/" first, and so no path that leads out of the project; no NUL, which no command line can hold.
_TEXT = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), max_size=12)
texts = st.one_of(st.sampled_from((*_NUMBERS, *_OTHERS, *PATHS, *_LONG)), _TEXT, st.integers().map(str))


# Marks, and arguments of fixtures: as source, so that any value can be written

_LITERALS = (
    *(
        "0",
        "1",
        "2",
        "-1",
        "True",
        "None",
        "2.0",
        "1e300",
        "float('nan')",
        "float('inf')",
        "10**30",
        "10**400",
    ),
    *(
        "10**8",
        "''",
        "'gloo'",
        "'fake'",
        "'²'",
        "'\\udcff'",
        "b''",
        "[]",
        "()",
        "{}",
        "[[2]]",
        "[['x']]",
        "{1: 2}",
    ),
    *(
        "object()",
        "lambda: 0",
        "range(3)",
        "range(10**9)",
        "int",
        "ValueError",
        "[2, 'x']",
        "['values']",
        "3j",
    ),
)
literals = st.sampled_from(_LITERALS) | st.text(max_size=5).map(repr) | st.floats().map("float('{}')".format)
ACCEPTED = {
    "ranks": [*(each.name for each in fields(RanksMark)[1:-1]), "as_rank", "made_up_values"],
    "skew": ["seeds", "milliseconds"],
    "layouts": ["dp", "tp", "at_most", "backend", "fresh", "timeout", "hosts", "needs", "as_rank"],
    "own_processes": [],
}
"""The keywords of each mark that Lockstep registers."""
_FAULTS = {"rank", "nth", "group", "dtype", "where", "before", "after", "op", "seconds", "value", "error"}


@dataclass(frozen=True)
class Case:
    """One test of many that share a session: a file of its own, and what lies beside."""

    source: str
    golden: str | bytes | None = ""
    """The contents of its golden; none if empty."""
    ranks: int = 2


def _calls(name: str, keywords: Sequence[str]) -> st.SearchStrategy[str]:
    """Return calls with odd arguments, written out."""
    named = st.dictionaries(st.sampled_from([*keywords, "nosuch"]), literals, max_size=2)
    positional = st.lists(literals, max_size=2)
    pairs = st.tuples(positional, named)
    return pairs.map(
        lambda pair: f"{name}({', '.join([*pair[0], *(f'{key}={value}' for key, value in pair[1].items())])})"
    )


def _ranks() -> st.SearchStrategy[str]:
    """Return marks that often are wrong in one option alone."""
    named = st.dictionaries(st.sampled_from(ACCEPTED["ranks"]), literals, min_size=1, max_size=2)
    one = named.map(lambda given: f"ranks(2, {', '.join(f'{key}={value}' for key, value in given.items())})")
    return one | _calls("ranks", ACCEPTED["ranks"])


def marked(mark: str, form: str) -> str:
    body = "def test_it(world): pass\n"
    mark = f"pytest.mark.{mark}"
    match form:
        case "module":
            return f"{HEADER}pytestmark = {mark}\n{body}"
        case "method":
            test = f"class TestIt(unittest.TestCase):\n    @{mark}\n    def test_it(self): pass\n"
            return f"{HEADER}import unittest\n{test}"
        case "parameter":
            case = f"pytest.param(1, marks={mark})"
            return f"{HEADER}@pytest.mark.parametrize('n', [{case}])\ndef test_it(n): pass\n"
        case _:
            return f"{HEADER}@{mark}\n{'@pytest.mark.ranks(2)' if 'skew' in mark else ''}\n{body}"


def in_test(statement: str, ranks: int = 2) -> str:
    arguments = "world, faults, golden, run_subtests"
    return (
        f"{HEADER}import lockstep\n@pytest.mark.ranks({ranks})\ndef test_it({arguments}):\n    {statement}\n"
    )


_marks = st.builds(
    marked,
    _ranks() | _calls("skew", ACCEPTED["skew"]) | _calls("layouts", ACCEPTED["layouts"]),
    st.sampled_from(["function", "module", "method", "parameter"]),
)
_fixtures = st.one_of(
    st.sampled_from(["delay", "fail", "kill", "stop", "hang", "corrupt", "drop"]).flatmap(
        lambda kind: _calls(f"faults.{kind}", sorted(_FAULTS))
    ),
    _calls("faults.expect", ["text", "within"]),
    _calls("golden", ["name", "tolerance"]),
    _calls("run_subtests", ["settings", "fn"]),
    _calls("lockstep.stage", ["ranks", "scope"]),
).map(in_test)

GOLDEN = (
    "# Golden of test_0.py::test_it. Written by: pytest --update-goldens\n# Made by torch 2, x86, gloo\n"
    "loss 0 | all    | f32 [2, 2] norm 1 sum 1 mix 1 bits 0\nvalue 0 | rank 0 | f64 [] value 1\n"
    "collectives:\n"
    "all_reduce | all    | f32[2] 2 ranks forward\n"
)
_RECORD = (
    "with golden('g', tolerance=torch.float32) as run:\n"
    "        run.record('loss', torch.ones(2, 2)); run.record('value', 1.0)"
)


def damaged(text: str, junk: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return texts with one word replaced, or cut off."""
    words = [match.span() for match in re.finditer(r"[\w.+-]+|\S", text)]
    replaced = st.builds(
        lambda span, word: text[: span[0]] + word + text[span[1] :], st.sampled_from(words), junk
    )
    return replaced | st.integers(0, len(text)).map(lambda end: text[:end])


garbage = st.one_of(
    st.sampled_from(
        ["", "[" * 100_000, "{" * 100_000, "3", "null", "[]", "{}", "[[]]", '"a"', "NaN", "\0", "9" * 5000]
    ),
    st.binary(max_size=20),
)


def held_golden(contents: str | bytes | None, ranks: int = 2) -> Case:
    """Return a test that is held to a golden with these contents."""
    return Case(in_test(_RECORD, ranks).replace("import lockstep", "import torch"), contents, ranks)


_goldens = st.builds(
    held_golden,
    st.one_of(st.just(FIFO), garbage, damaged(GOLDEN, texts)),
)
cases = st.one_of(_marks.map(Case), _marks.map(Case), _fixtures.map(Case), _goldens)


def attempt_of(cases: Sequence[Case]) -> Attempt:
    """Return one session of many tests, so that they share the seconds that ranks take to start."""
    files: dict[str, Any] = {"pytest.ini": "[pytest]\nranks_leaks = off\n"}
    for number, case in enumerate(cases):
        files[f"test_{number}.py"] = case.source
        if case.golden != "":
            files[f"goldens/test_{number}/g-{case.ranks}-gloo.txt"] = case.golden
    return Attempt((*PYTEST, "--world-timeout=20"), files, seconds=RANKS)


# Options


class _Declarations:
    """Stands for pytest's parser: lists what is declared."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.ini: list[str] = []
        parser: Any = self
        options.add_options(parser)
        options.add_short_options(parser, options.SHORT, ())
        for plugin in (conformance, *features.plugins()):
            if hasattr(plugin, "pytest_addoption"):
                plugin.pytest_addoption(parser)
            if hasattr(plugin, "pytest_ranks_short_options"):
                options.add_short_options(parser, plugin.pytest_ranks_short_options(), ())

    def getgroup(self, *_: str) -> _Declarations:
        return self

    def addoption(self, name: str, **attributes: Any) -> None:
        self.options[name] = attributes

    def addini(self, name: str, *_: Any, **__: Any) -> None:
        self.ini.append(name)


DECLARED = _Declarations()


@st.composite
def settings_of_a_run(
    draw: Callable[..., Any], left_out: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Draw options of the command line, and a configuration file with some."""
    given = []
    for name in draw(st.lists(st.sampled_from(sorted({*DECLARED.options} - {*left_out})), max_size=3)):
        takes_none = DECLARED.options[name].get("action") == "store_true"
        given.append(name if takes_none else f"{name}={draw(texts)}")
    ini = draw(st.dictionaries(st.sampled_from(DECLARED.ini), texts, max_size=2))
    ini = {name: re.sub(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]", " ", value) for name, value in ini.items()}
    ini = {"ranks_preload": "", **ini}
    if draw(st.booleans()):
        lines = [f"{name} = {json.dumps(value)}" for name, value in ini.items() if "\udcff" not in value]
        odd = draw(st.sampled_from(["3", "1.5", "true", "[]", "[3]", "2020-01-01", "{a = 1}", "[[[]]]"]))
        lines.append(f"{draw(st.sampled_from(sorted({*DECLARED.ini} - {*ini})))} = {odd}")
        return given, {"pyproject.toml": "\n".join(["[tool.pytest]", *lines]) + "\n"}
    text = "\n".join(["[pytest]", *(f"{name} = {value}" for name, value in ini.items())]) + "\n"
    return given, {"pytest.ini": text.encode(errors="surrogateescape")}  # type: ignore[dict-item]


def _run(given: tuple[list[str], dict[str, str]], *more: str, seconds: float = SECONDS) -> Attempt:
    command = (*PYTEST, "-p", "lockstep.conformance.plugin", *more, *given[0])
    return Attempt(command, {**PLACES, **given[1]}, seconds=seconds)


def _collect(given: tuple[list[str], dict[str, str]]) -> Attempt:
    asks_torch = any(word.startswith(OF_TORCH) for word in given[0])
    return _run(given, "--collect-only", seconds=RANKS if asks_torch else SECONDS)


configured = settings_of_a_run().map(_collect)
"""Runs that end before a rank is needed: what is checked when pytest is configured and has collected."""
on_ranks = settings_of_a_run(NEVER).map(lambda given: _run(given, "--world-timeout=20", seconds=RANKS))
