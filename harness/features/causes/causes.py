"""Failures grouped by their cause, and what narrows a run to the tests of one.

Used by the summary of a run and by the page of conformance. Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

LONGEST_MESSAGE = 200

# A line of pytest's traceback: "path.py:12: AssertionError", "path.py:12: in function", "path.py:12: ".
_PLACE = re.compile(r"^(?P<file>[^\s:]+\.py):(?P<line>\d+): ?(?P<type>[\w.]*)", re.MULTILINE)
# The same of Python's own, under --tb=native.
_NATIVE_PLACE = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+), in (?P<type>)', re.MULTILINE)
_NATIVE = "Traceback (most recent call last)"
_NATIVE_ERROR = re.compile(r"^(?P<error>[A-Za-z_][\w.]*(?:: .*)?)$", re.MULTILINE)
# Between the tracebacks of two ranks, and around the end; between two exceptions of a chain.
_NEXT = re.compile(r"^-{5,} .*$|^(?:The above exception was|During handling of the above).*$", re.MULTILINE)

# Above the message of a failure on ranks: the first line, and those on the other ranks.
_FAILED = re.compile(r"(?:all \d+ ranks|rank \d+ of [^:]*) failed\b")
_OF_OTHERS = re.compile(r"ranks? \d[^:]*: ")

# What differs between failures of one cause, the longer first.
_FOLDER = re.compile(r"(?<![\w/])/(?:[^\s/'\"]+/)+(?=[^\s/'\"]+)")
_ID_OR_NUMBER = re.compile(
    r"(?P<id>0x[0-9a-f]+|\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{12,}\b)|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
)
_SHAPE = re.compile(r"([\[(])(?:N(?:, ?|(?=[\])])))+(?=[\])])")
# Of a tensor that is compared. Tried at the start of a word alone: at each letter of 40,000 it took 10 s.
_NAME = re.compile(r"(?<![^\s:])[^\s:]+(?=: Mismatched elements)")
_DIFFERENCE = re.compile(r"; Greatest absolute difference: .*")
_SAME = re.compile(r", with the same [^,;]*; this is rank .*")
_TENSOR = re.compile(r"\btensor\(.*?\)(?=$|[^\w)\]])")


@dataclass(frozen=True, slots=True)
class Ran:
    """A test that has run, or a subtest of one."""

    nodeid: str
    case: str = ""
    """Settings of a case of `run_subtests`: "key=value, key=value"."""
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Arguments of pytest that select the failures of a cause, and as few other tests as was found."""

    path: str
    """Common beginning of the node ids of all failures; "" if there is none."""
    selecting: tuple[str, ...]
    """Options."""
    num_selected: int
    """Number of the tests and subtests that have run which they select."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.path, *self.selecting) if self.path else self.selecting


def cause_of(text: str) -> tuple[str, str]:
    """Return where a test failed and with what, from pytest's text of the failure.

    Returns:
        The deepest line of the user's code, "file.py:12", "" if the text names none; the exception's type and
        the first line of its message without numbers, ids, shapes and folders.
    """
    pattern = _NATIVE_PLACE if _NATIVE in text else _PLACE
    first, *_ = _NEXT.split(text)  # of the rank that is to blame, and of what it came from
    places = list(pattern.finditer(first)) or list(pattern.finditer(text))
    own = [place for place in places if not is_foreign(place["file"])]
    where = f"{own[-1]['file']}:{own[-1]['line']}" if own else ""
    message = brief(text)
    kind = places[-1]["type"] if places else ""
    if kind not in ("", "in") and kind not in message:  # pytest leaves out that of a bare assert
        message = f"{kind}: {message}"
    return where, _without_details(message)


def brief(text: str) -> str:
    """Return the line of a failure that says most: pytest's first line of the error.

    One that ends in a colon is followed by the next, which it announces.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    if _NATIVE in text and (found := _NATIVE_ERROR.search(text.partition(_NATIVE)[2])):
        return found["error"]
    if not errors and lines and _FAILED.match(lines[0]):  # without a traceback the message is below
        said = _NEXT.split(text)[0].splitlines()[1:]
        errors = [line for line in said if line.strip() and not _OF_OTHERS.match(line)]
    if len(errors) > 1 and errors[0].endswith(":"):
        return f"{errors[0]} {errors[1].strip()}"
    return next(iter(errors or lines), "")


def _without_details(message: str) -> str:
    """Return a message without what differs between failures of one cause, and not too long."""
    message = _SAME.sub("", message)
    message = _DIFFERENCE.sub("", _NAME.sub("NAME", message))
    message = _FOLDER.sub(".../", message)
    message = _TENSOR.sub("tensor(...)", message)
    message = _ID_OR_NUMBER.sub(lambda found: "ID" if found["id"] else "N", message)
    message = _SHAPE.sub(r"\1...", message)
    return message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."


def is_foreign(file: str) -> bool:
    """Return whether a file is of an installed package, of Python, or of this one but its engine."""
    parts = PurePath(file).parts
    room = parts[parts.index("lockstep") + 1] if "lockstep" in parts[:-1] else "engine"
    return bool({"site-packages", "dist-packages"} & {*parts}) or "/lib/python" in file or room != "engine"


# What narrows to a cause


def narrow(failed: Sequence[Ran], ran: Iterable[Ran]) -> Narrowed:
    """Return the arguments that select all of `failed`, and of the others that have run as few as possible.

    What the failed ones have in common is taken in this order, each only if it leaves out more: the longest
    part of their node ids, settings of their subtests, marks, words of their parameters.
    """
    path = _common_path([each.nodeid for each in failed])
    left = [each for each in ran if not path or _is_below(each.nodeid, path)]
    common = frozenset.intersection(*(_settings(each.case) for each in failed))
    settings, left = _fewer(common, left, lambda each, word: word in _settings(each.case))
    selecting = ["--subtest", ",".join(settings)] if settings else []
    common = frozenset.intersection(*(each.marks for each in failed))
    marks, left = _fewer(common, left, lambda each, word: word in each.marks)
    common = frozenset.intersection(*(_parameters(each) for each in failed))
    words, left = _fewer(common, left, lambda each, word: word.lower() in each.nodeid.lower())  # as `-k` does
    selecting += ["-m", " and ".join(marks)] if marks else []
    selecting += ["-k", " and ".join(words)] if words else []
    return Narrowed(path, tuple(selecting), len(left))


def _fewer(
    words: Iterable[str], left: list[Ran], has: Callable[[Ran, str], bool]
) -> tuple[list[str], list[Ran]]:
    """Return the words that leave out some of what is left, and what is left then."""
    chosen: list[str] = []
    for word in sorted(words):
        fewer = [each for each in left if has(each, word)]
        if len(fewer) < len(left):
            left, chosen = fewer, [*chosen, word]
    return chosen, left


def _settings(case: str) -> frozenset[str]:
    return frozenset(part for part in case.split(", ") if "=" in part)


def _parameters(ran: Ran) -> frozenset[str]:
    """Return the words of a test's parameters that `-k` can select."""
    words = ran.nodeid.partition("[")[2].removesuffix("]").split("-")
    return frozenset(word for word in words if re.fullmatch(r"[A-Za-z_]\w*", word) and word not in _NO_WORDS)


_NO_WORDS = {"and", "or", "not", "True", "False", "None", "ranks", "rank"}


def _common_path(nodeids: Sequence[str]) -> str:
    """Return the longest node id, or folder, that all of these are at or below."""
    first, *others = [_steps(nodeid) for nodeid in nodeids]
    common = first
    for steps in others:
        same = (number for number, (one, two) in enumerate(zip(common, steps, strict=False)) if one != two)
        common = common[: next(same, min(len(common), len(steps)))]
    return "".join(common).rstrip("/")


def _steps(nodeid: str) -> list[str]:
    """Return the parts of a node id, which put together are it: folders, file, classes, test, parameters."""
    file, separator, names = nodeid.partition("::")
    *folders, name = file.split("/")
    test, bracket, parameters = names.partition("[")
    classes = [f"::{part}" for part in test.split("::")] if separator else []
    return [
        *(f"{folder}/" for folder in folders),
        name,
        *classes,
        *([bracket + parameters] if bracket else []),
    ]


def _is_below(nodeid: str, path: str) -> bool:
    return nodeid == path or nodeid.startswith((f"{path}/", f"{path}::", f"{path}["))
