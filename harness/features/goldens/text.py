"""The text of a golden: lines of values and of collectives, and how it differs from that of another run.

Inside a rank; imports the tolerances, and so torch.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.assertions.closeness import Tolerance

MAX_DIFF = 14
"""Lines of a diff of collectives that a message shows."""

_TITLE = "# Golden of "
_MADE_BY = "# Made by "
_COLLECTIVES = "collectives:"
_ENTRY = re.compile(r"(?P<name>.+?) +\| (?P<ranks>all|rank \d+) +\| (?P<text>.*)")
_NUMBER = re.compile(r"(value|norm|sum|mix) (\S+)")
_SIZE = re.compile(r"\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True)
class GoldenEntry:
    """One line: a value, or a collective, and the ranks that have it."""

    name: str
    ranks: str
    text: str

    def line(self, width: int) -> str:
        return f"{self.name:<{width}} | {self.ranks:<6} | {self.text}".rstrip()


@dataclass(frozen=True)
class Golden:
    """The contents of a file.

    Attributes:
        test: node id, without the directory.
        made_by: versions and machine, in words.
        values: in the order in which they were recorded.
        collectives: in the order of each rank, which is the entry's `ranks`.
    """

    test: str
    made_by: str
    values: tuple[GoldenEntry, ...]
    collectives: tuple[GoldenEntry, ...]

    def render(self) -> str:
        """Return the text of the file."""
        lines = [f"{_TITLE}{self.test}. Written by: pytest --update-goldens", f"{_MADE_BY}{self.made_by}"]
        lines += [*_lines(self.values), _COLLECTIVES, *_lines(self.collectives)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Golden:
        """Read the text of a file.

        Raises:
            ValueError: it is not one that `render` has made, or was damaged: the line.
        """
        lines = text.splitlines()
        if len(lines) < 2 or not lines[0].startswith(_TITLE) or not lines[1].startswith(_MADE_BY):
            raise ValueError("line 1: a golden begins with two lines of comments; a merge may have cut them")
        if _COLLECTIVES not in lines:
            raise ValueError(f"there is no line `{_COLLECTIVES}`")
        test = lines[0].removeprefix(_TITLE).partition(". Written by")[0]
        middle = lines.index(_COLLECTIVES)
        parts: list[list[GoldenEntry]] = [[], []]
        seen: set[tuple[str, str]] = set()
        for number, line in enumerate(lines[2:], 3):
            if number == middle + 1 or not line:
                continue
            if (match := _ENTRY.fullmatch(f"{line.rstrip()} ")) is None:
                raise ValueError(f"line {number}: not a line of a golden: {line!r}")
            entry = GoldenEntry(match["name"].strip(), match["ranks"], match["text"].strip())
            if number <= middle:
                if (entry.name, entry.ranks) in seen:  # by a merge that kept both sides
                    raise ValueError(f"line {number}: a second line of {entry.name} ({entry.ranks})")
                if wrong := _no_numbers(entry.text):
                    raise ValueError(f"line {number}: {', '.join(wrong)} of {entry.name} is no number")
                seen.add((entry.name, entry.ranks))
            parts[number > middle + 1].append(entry)
        return cls(test, lines[1].removeprefix(_MADE_BY), tuple(parts[0]), tuple(parts[1]))


def _lines(entries: Sequence[GoldenEntry]) -> list[str]:
    width = max((len(entry.name) for entry in entries), default=0)
    return [entry.line(width) for entry in entries]


def differences(golden: Golden, now: Golden, bounds: Tolerance | None) -> list[str]:
    """Return what to say of a run that differs from its golden; nothing if it does not.

    Args:
        bounds: the tolerance of each element, of which the numbers of a line summarise many; None compares
            bit for bit.
    """
    lines = _of_values(golden.values, now.values, bounds)
    if golden.collectives != now.collectives:
        lines += ["the sequence of collectives differs (- golden, + this run):"]
        lines += [f"  {line}" for line in _diff(golden.collectives, now.collectives)]
    if lines and golden.made_by != now.made_by:
        lines.append(f"the golden was made by {golden.made_by}; this is {now.made_by}")
    return lines


def _of_values(
    golden: Sequence[GoldenEntry], now: Sequence[GoldenEntry], bounds: Tolerance | None
) -> list[str]:
    expected = {(entry.name, entry.ranks): entry for entry in _by_rank(golden, now)}
    actual = {(entry.name, entry.ranks): entry for entry in _by_rank(now, golden)}
    keys = list(dict.fromkeys([*actual, *expected]))
    wrong = [key for key in keys if not _is_close(expected.get(key), actual.get(key), bounds)]
    if not wrong:
        return []
    name, ranks = first = wrong[0]
    owners = "all ranks" if ranks == "all" else ranks
    before = keys.index(first)
    return [
        f"first difference: {name} ({owners}), after {before} values that agree",
        f"  golden    {expected[first].text if first in expected else 'has no such value'}",
        f"  this run  {actual[first].text if first in actual else 'has no such value'}",
        f"  {len(wrong)} of {len(keys)} values differ" + ("" if bounds is None else " beyond the tolerance"),
    ]


def _by_rank(entries: Sequence[GoldenEntry], others: Sequence[GoldenEntry]) -> list[GoldenEntry]:
    """Write out what is the same on all ranks for each rank where the other text has it rank by rank."""
    ranks: dict[str, list[str]] = {}
    for entry in others:
        ranks.setdefault(entry.name, []).append(entry.ranks)
    found = []
    for entry in entries:
        as_there = ranks.get(entry.name, ["all"])
        split = entry.ranks == "all" and "all" not in as_there
        found += [
            GoldenEntry(entry.name, rank, entry.text) for rank in (as_there if split else [entry.ranks])
        ]
    return found


def _is_close(golden: GoldenEntry | None, now: GoldenEntry | None, bounds: Tolerance | None) -> bool:
    if golden is None or now is None:
        return False
    if golden.text == now.text or bounds is None:
        return golden.text == now.text
    if golden.text.split(" ", 1)[0] != now.text.split(" ", 1)[0]:  # the dtype
        return False
    ours, theirs = (dict(_NUMBER.findall(entry.text)) for entry in (now, golden))
    sizes = [found[1] if (found := _SIZE.search(entry.text)) else "" for entry in (golden, now)]
    if sizes[0] != sizes[1] or ours.keys() != theirs.keys() or not ours:
        return False
    count = math.prod(int(size) for size in sizes[0].split(",") if size.strip())
    # Each element is off by atol + rtol * |element|: the norm by this then, and a sum by sqrt(count) as much.
    norm = abs(_number(theirs.get("norm") or theirs["value"]))
    slack = bounds.atol * math.sqrt(count) + bounds.rtol * norm
    root = math.sqrt(count)
    return all(
        _is_within(_number(ours[key]), _number(theirs[key]), slack * (root if key in ("sum", "mix") else 1))
        for key in ours
    )


def _no_numbers(text: str) -> list[str]:
    """Return what a line of a value has in the place of numbers, such as "norm 0.5x"."""
    wrong = []
    for name, number in _NUMBER.findall(text):
        try:
            _number(number)
        except ValueError:
            wrong.append(f"{name} {number}")
    return wrong


def _number(text: str) -> float:
    """Read a number of a line; a value of dtype bool is written as True or False.

    Raises:
        ValueError: it is none.
    """
    return float(text == "True") if text in ("True", "False") else float(text)


def _is_within(now: float, golden: float, slack: float) -> bool:
    if math.isnan(now) or math.isnan(golden):
        return math.isnan(now) and math.isnan(golden)
    return now == golden or abs(now - golden) <= slack


def _diff(golden: Sequence[GoldenEntry], now: Sequence[GoldenEntry]) -> list[str]:
    before, after = ([f"{each.name} {each.text} ({each.ranks})" for each in of] for of in (golden, now))
    found = [
        line
        for line in difflib.unified_diff(before, after, n=2, lineterm="")
        if line[:3] not in ("---", "+++")
    ]
    more = len(found) - MAX_DIFF
    return found if more <= 0 else [*found[:MAX_DIFF], f"and {more} more lines"]
