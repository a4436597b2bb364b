"""Lines that claims run: recorded once for each state of the project, and kept in build/power."""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path, PurePath

from mutants.copies import HERE, ROOT, Base, copy_of, digest, room_of

CACHE = ROOT / "build" / "power"
BATCH = 10
"""How many files of claims are recorded in one session."""
OWN_SESSIONS = {
    *("project", "pytester", "run_module", "run_pytest", "copy_project", "make_project", "start_browser"),
    *("two_hosts", "bed", "subprocess", "supervisor"),
}
SHARED_SESSIONS = {"shared_project", "session", "run", "run_faults", "browser"}
"""Words of self-tests that take seconds, as pytest runs in them; by these, once for several."""


@dataclass(frozen=True)
class Claim:
    """A test: on how many processes, how long, and the lines of what is mutated that it runs."""

    name: str
    backend: str
    processes: int
    seconds: float
    lines: Mapping[str, frozenset[int]]
    words: frozenset[str] = frozenset()
    """Those of its test, and of what that uses of its file."""
    shares: str = ""
    """The name of the longest fixture that it shares with other claims of its file."""
    is_guess: bool = False
    """Whether its lines are those of other cases of its function: it may run more."""
    is_slow: bool = False
    """Whether it takes seconds, as far as its words say; where it was recorded, its seconds do."""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.lines.values()))


def words_of(text: str) -> frozenset[str]:
    """Return the names and longer words in a text."""
    return frozenset(re.findall(r"[A-Za-z_]{5,}", text))


def words_of_tests(base: Base, files: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the words of each test function of the files, by its node id, and of what it uses there.

    Its parameters are among them, however short.
    """
    found = {}
    for file in files:
        source = (base.folder / file).read_text()
        body = ast.parse(source).body
        used = {
            each.name: words_of(ast.get_source_segment(source, each) or "")
            for each in body
            if isinstance(each, ast.FunctionDef | ast.ClassDef)
        }
        for node in body:
            inside = (
                [(node.name, each) for each in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
            )
            for owner, each in inside:
                if isinstance(each, ast.FunctionDef):
                    name = "::".join(filter(None, (file, owner, each.name)))
                    own = words_of(ast.get_source_segment(source, each) or "")
                    found[name] = with_used(own | {every.arg for every in each.args.args}, used)
    return found


def with_used(words: frozenset[str], used: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the words, and those of each name in `used` that is among them."""
    more = words.union(*(used[name] for name in used if name in words))
    return words if more == words else with_used(more, used)


def spread(names: Iterable[str], number: int) -> list[str]:
    """Return `number` cases of each function, drawn by its name: in steps they might share a parameter."""
    cases: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        cases[name.partition("[")[0]].append(name)
    return [
        name
        for function, each in cases.items()
        for name in (random.Random(function).sample(each, number) if number < len(each) else each)
    ]


def record(base: Base, rooms: Collection[str], jobs: int, minutes: float, guess: bool = False) -> list[Claim]:
    """Return all claims with the lines that they run: recorded, where what they depend on has changed.

    A case that is not recorded has the lines of those of its function that are; claims that fail are none.

    Args:
        rooms: the names of the only folders of claims that are of interest; all, if empty.
        minutes: after which no more files are begun, and the program ends.
        guess: record none; claims that are not recorded may run all that their room has.
    """
    ends = time.monotonic() + 60 * minutes
    store = CACHE / f"{base.subject.name}-{digest(base.shared(), version('torch'))}"
    store.mkdir(parents=True, exist_ok=True)
    claims: list[Claim] = []
    lines_of = functools.cache(frozenset[int])  # many claims run the same of a file
    for backend, (number, folders) in base.subject.recorded.items():
        kept = {
            name: store / f"{backend}-{name.replace('/', '-')}-{digest(files)}.json"
            for name, files in base.claims().items()
            if name.startswith(folders) and (not rooms or PurePath(name).parent.name in rooms)
        }
        lacking = [name for name, path in kept.items() if not path.exists()]
        if guess and lacking:
            claims += guesses_of_rooms(base, backend, lacking)
            kept = {name: path for name, path in kept.items() if path.exists()}
            lacking = []
        for begin in range(0, len(lacking), BATCH):
            print(f"recording on {backend}: {begin} of {len(lacking)} files of claims", flush=True)
            if time.monotonic() > ends:
                raise SystemExit(f"not all were recorded in {minutes} minutes: start again")
            batch = lacking[begin : begin + BATCH]
            for name, rows in recorded(base, backend, batch, number, jobs).items():
                kept[name].write_text(json.dumps(rows))
        words = words_of_tests(base, kept)
        for path in kept.values():
            found = [
                Claim(
                    name,
                    backend,
                    processes,
                    seconds,
                    {file: lines_of(tuple(numbers)) for file, numbers in lines.items()},
                    words.get(name.partition("[")[0], frozenset()) | words_of(name.partition("[")[2]),
                    shares,
                )
                for name, processes, seconds, lines, shares in json.loads(path.read_text())
            ]
            claims += with_guesses(found)
    return claims


def guesses_of_rooms(base: Base, backend: str, files: Sequence[str]) -> list[Claim]:
    """Return the claims of `files`, as if each ran all of its room; those of a shared session together."""
    words = words_of_tests(base, files)
    lines_by_room: defaultdict[str, dict[str, frozenset[int]]] = defaultdict(dict)
    for path in base.subject.files(base.folder):
        name = str(path.relative_to(base.top))
        every = range(1, path.read_text().count("\n") + 2)
        lines_by_room[room_of(name)][name] = frozenset(every)
    claims = []
    for name in names_of(base, ["--backend", backend, *files]):
        file = name.partition("::")[0]
        used = words.get(name.partition("[")[0], frozenset())
        shares = file if used & SHARED_SESSIONS else ""
        lines = lines_by_room[PurePath(file).parent.name]
        found = used | words_of(name.partition("[")[2])
        is_slow = bool(shares or used & OWN_SESSIONS)
        claims.append(Claim(name, backend, 2, 1.0, lines, found, shares, is_guess=True, is_slow=is_slow))
    return claims


def names_of(base: Base, options: Sequence[str]) -> list[str]:
    """Return the node ids of the claims that pytest collects."""
    with copy_of(base) as copy:
        if copy.pytest(["--collect-only", *options], 600):
            raise SystemExit(copy.output())
        return [line for line in copy.output(-1).splitlines() if "::" in line and line.startswith("suites")]


def with_guesses(claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims; cases that were not recorded run what the longest of their function does."""
    cases: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.seconds:
            cases[claim.function].append(claim)
    longest = {function: max(each, key=lambda claim: claim.seconds) for function, each in cases.items()}
    return [
        replace(longest[claim.function], name=claim.name, words=claim.words, is_guess=True)
        if not claim.seconds and claim.function in longest
        else claim
        for claim in claims
    ]


Row = tuple[str, int, float, Mapping[str, Sequence[int]], str]
"""What a `Claim` is made of: name, processes, seconds, lines, and what it shares."""


def recorded(base: Base, backend: str, files: Sequence[str], number: int, jobs: int) -> dict[str, list[Row]]:
    """Return a row for each claim of each of `files`; without lines for those that did not run."""
    options = ["--backend", backend, *files]
    names = names_of(base, options)
    with copy_of(base) as copy:
        chosen = {*spread(names, number)}
        (copy.tmp / "order.txt").write_text("\n".join(name for name in names if name in chosen))
        variables = {
            "LOCKSTEP_CLAIMS_RECORD": "/tmp/record",
            "LOCKSTEP_CLAIMS_SOURCE": str(ROOT / base.subject.folder),
            "LOCKSTEP_CLAIMS_ORDER": "/tmp/order.txt",
            "LOCKSTEP_CLAIMS_SECONDS": "3600",
        }
        found = copy.tmp / "record"
        found.mkdir()
        at_once = ["-n", str(jobs), "--dist=loadfile"] if jobs > 1 else []
        if copy.pytest([*at_once, *options], 3600, [HERE / "traced"], **variables) not in (0, 1):
            raise SystemExit(copy.output())
        ended, failed = (
            [json.loads(row) for path in found.glob(f"*.{kind}") for row in path.read_text().splitlines()]
            for kind in ("names", "failed")
        )
        ran = lines_in(found)
    if failed:
        print("these fail without an edit, and are no claims:", *sorted({name for (name,) in failed}))
    seconds: defaultdict[str, float] = defaultdict(float)
    shared: dict[str, list[str]] = {}
    for name, lasted, fixtures in ended:
        seconds[name] = max(lasted, seconds[name])
        shared[name] = fixtures
    by_file: dict[str, list[Row]] = {name: [] for name in files}
    for name in names:
        if [name] not in failed:
            own = (name, *shared.get(name, ()))
            parts = [ran[each] for each in own if each in ran]
            merged: defaultdict[str, set[int]] = defaultdict(set)
            for file, line in set[tuple[str, int]]().union(*(lines for _, lines in parts)):
                merged[file].add(line)
            processes = len({pid for pids, _ in parts for pid in pids})
            lines = {file: sorted(numbers) for file, numbers in merged.items()}
            longest = max(own[1:], key=lambda each: seconds[each], default="")
            shares = longest if seconds[longest] > 1 else ""
            row = name, processes, max(seconds[each] for each in own), lines, shares
            by_file[name.partition("::")[0]].append(row)
    return by_file


def lines_in(folder: Path) -> dict[str, tuple[set[str], set[tuple[str, int]]]]:
    """Return the processes that ran something for each item or fixture, and what they ran."""
    found: defaultdict[str, tuple[set[str], set[tuple[str, int]]]] = defaultdict(lambda: (set(), set()))
    for path in folder.glob("*.lines"):
        pids, lines = found[""]
        for row in path.read_text().splitlines():
            if row.startswith("@"):
                pids, lines = found[row[1:]]
                pids.add(path.stem)
            else:
                file, _, line = row.rpartition(":")
                lines.add((file, int(line)))
    return found
