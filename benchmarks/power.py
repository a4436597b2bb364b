"""Mutants of the engine: how many of them the suites notice, and how soon.

    python benchmarks/power.py --mutants 120 --jobs 2         # chosen by --seed
    python benchmarks/power.py --only gradients.py --show     # chosen, and not run
    python benchmarks/power.py --corpus                       # bugs of real engines, as edits of this one

Each mutant is one edit in a copy of its own. The claims of `suites` that run the line come first, a few of
each file, and the first failure ends it: it is killed, if that claim holds for the engine as it is. Apart are
those that time out, and those with which the session ends before a claim ("session": an import fails). A
line that no claim runs makes a survivor at once.
What cannot be noticed is in `mutants/equivalent.toml`, with its reason. Neither suites/engine nor
suites/selftest takes part.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import median

import pytest
from figures import Table, describe_machine, verdicts
from mutants.corpus import CORPUS
from mutants.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
HERE = ROOT / "benchmarks" / "mutants"
CACHE = ROOT / "build" / "power"
RECORDED = {"gloo": (4, ("suites",)), "shm": (1, ("suites/core", "suites/replicate"))}
"""How many cases of each function are recorded, of which suites: on shm some lines of the engine differ."""
FIRST = 8
"""How many claims run in a session of their own: most mutants fail one, and it collects few files."""
KILLED = ("killed", "timed out", "session")
"""The verdicts on mutants that were noticed."""
APART = ("equivalent", "elsewhere")
"""The verdicts on mutants that no claim can notice, or none on CPU ranks."""


def digest(paths: Iterable[Path], *words: str) -> str:
    """Return a name for what the files have in them, and for the words."""
    contents = (path.read_bytes() for path in sorted(paths))
    return hashlib.sha256(b"\0".join([*contents, *(word.encode() for word in words)])).hexdigest()[:16]


Row = tuple[str, int, float, Mapping[str, Sequence[int]]]
"""A claim, on how many processes it ran, the seconds that took, and the lines that it ran in each file."""


@dataclass(frozen=True)
class Claim:
    """An item of the suites: on how many processes, how long, and the lines of the engine that it runs."""

    name: str
    backend: str
    processes: int
    seconds: float
    lines: Mapping[str, frozenset[int]]
    words: frozenset[str] = frozenset()
    """Those of its test, and of what that uses of its file."""

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @cached_property
    def size(self) -> int:
        return sum(map(len, self.lines.values()))


@dataclass(frozen=True)
class Result:
    """A verdict on a mutant; `by` is the first claim that failed, or why there is none."""

    verdict: str
    by: str
    seconds: float
    tried: int


class Copy:
    """A copy of the project in which tests run; made of another copy, what that compiled comes along."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        self.folder = folder
        ignored = shutil.ignore_patterns("selftest", "projects", *(["__pycache__"] if source == ROOT else []))
        for package in ("harness", "suites"):
            shutil.copytree(source / package, folder / package, ignore=ignored)
        (folder / "lockstep").symlink_to("harness")
        for file in ("pyproject.toml", "conftest.py"):
            shutil.copy2(source / file, folder)

    @property
    def engine(self) -> Path:
        return self.folder / "harness" / "engine"

    def claims(self) -> dict[str, list[Path]]:
        """Return the names of the files of claims, each with itself and the conftest files that it sees."""
        suites = self.folder / "suites"
        files = (path for path in suites.rglob("test_*.py") if path.parts[-2] not in ("engine", "selftest"))
        return {
            str(path.relative_to(self.folder)): [
                path,
                *(
                    each
                    for folder in path.parents
                    if folder.is_relative_to(suites)
                    for each in folder.glob("conftest.py")
                ),
            ]
            for path in files
        }

    def shared(self) -> list[Path]:
        """Return the files that any claim may depend on: all that were copied but the files of claims."""
        claims = {self.folder / name for name in self.claims()}
        files = (each for each in self.folder.rglob("*") if each.is_file() and each.suffix != ".pyc")
        return [each for each in files if each not in claims and each.name != "output.txt"]

    def pytest(self, arguments: Sequence[str], limit: float, **variables: str) -> int:
        """Run pytest with the plugin `claims`; return its exit status."""
        command = [sys.executable, "-m", "pytest", "-p", "claims", "-p", "no:cacheprovider", "-q", *arguments]
        path = os.pathsep.join((str(self.folder), str(HERE)))
        with open(self.folder / "output.txt", "w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it
                process.wait()
                return -1

    def output(self, length: int = 2000) -> str:
        """Return the end of what pytest has printed; all of it for -1."""
        text = (self.folder / "output.txt").read_text(errors="replace")
        return text if length < 0 else text[-length:]


def words_of(text: str) -> frozenset[str]:
    """Return the names and longer words in a text."""
    return frozenset(re.findall(r"[A-Za-z_]{5,}", text))


def words_of_tests(base: Copy, files: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the words of each test function of the files, by its node id, and of what it uses there."""
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
                    found[name] = with_used(words_of(ast.get_source_segment(source, each) or ""), used)
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


def record(base: Copy) -> list[Claim]:
    """Return all claims with the lines that they run: recorded, where what they depend on has changed.

    Those of which no case like them is recorded have no lines.
    """
    store = CACHE / f"claims-{digest(base.shared(), version('torch'))}"
    store.mkdir(parents=True, exist_ok=True)
    claims: list[Claim] = []
    for backend, (number, folders) in RECORDED.items():
        kept = {
            name: store / f"{backend}-{name.replace('/', '-')}-{digest(files)}.json"
            for name, files in base.claims().items()
            if name.startswith(folders)
        }
        if lacking := [name for name, path in kept.items() if not path.exists()]:
            print(f"recording what {len(lacking)} files of claims run on {backend}", flush=True)
            for name, rows in _recorded(base, backend, lacking, number).items():
                kept[name].write_text(json.dumps(rows))
        words = words_of_tests(base, kept)
        for path in kept.values():
            claims += [
                Claim(
                    name,
                    backend,
                    processes,
                    seconds,
                    {file: frozenset(numbers) for file, numbers in lines.items()},
                    words.get(name.partition("[")[0], frozenset()) | words_of(name.partition("[")[2]),
                )
                for name, processes, seconds, lines in json.loads(path.read_text())
            ]
    return claims


def _recorded(base: Copy, backend: str, files: Sequence[str], number: int) -> dict[str, list[Row]]:
    """Return a row for each claim of each of `files`; without lines for those that did not run."""
    options = ["--backend", backend, *files]
    if base.pytest(["--collect-only", *options], 600):
        raise SystemExit(base.output())
    names = [line for line in base.output(-1).splitlines() if "::" in line and line.startswith("suites")]
    with tempfile.TemporaryDirectory() as folder:
        order = Path(folder) / "order.txt"
        order.write_text("\n".join(spread(names, number)))
        variables = {"LOCKSTEP_CLAIMS_RECORD": folder, "LOCKSTEP_CLAIMS_ORDER": str(order)}
        if base.pytest(options, 3600, **variables, LOCKSTEP_CLAIMS_SECONDS="3600"):
            raise SystemExit(f"the suites do not hold for the engine as it is:\n{base.output()}")
        rows = [
            json.loads(row) for path in Path(folder).glob("*.jsonl") for row in path.read_text().splitlines()
        ]
    found: dict[str, tuple[int, float, defaultdict[str, set[int]]]] = {
        name: (0, 0.0, defaultdict(set)) for name in names
    }
    for name, seconds, lines in rows:
        processes, longest, merged = found[name]
        for file, numbers in lines.items():
            merged[file] |= set(numbers)
        found[name] = (processes + bool(lines), max(longest, seconds), merged)
    by_file: dict[str, list[Row]] = {name: [] for name in files}
    for name, (processes, seconds, merged) in found.items():
        row = (name, processes, seconds, {file: sorted(numbers) for file, numbers in merged.items()})
        by_file[name.partition("::")[0]].append(row)
    return by_file


def in_order(
    claims: Sequence[Claim],
    file: str,
    lines: Sequence[int],
    branches: Sequence[int] = (),
    words: Iterable[str] = (),
) -> list[Claim]:
    """Return the claims that run one of `lines`, the first of them that any runs, the nearest first.

    First those that run the one of `branches` that the fewest run, or whose test has the one of `words` that
    the fewest have: the others seldom notice. Of these and of those first the nearest of each file of claims,
    then of each function, then second cases and so on. A claim is near if much of what it runs is in the file
    of the mutant. On gloo, if any runs the line there.
    """
    found = [each for each in claims if file in each.lines]
    if lines:
        running = ([each for each in found if line in each.lines[file]] for line in lines)
        found = next(filter(None, running), [])
    backend = "gloo" if any(each.backend == "gloo" for each in found) else "shm"

    def nearness(claim: Claim) -> float:
        return -len(claim.lines[file]) / claim.size / (0.5 + claim.seconds)

    found = [each for each in found if each.backend == backend]
    inside = filter(None, ({e.name for e in found if line in e.lines[file]} for line in branches))
    having = filter(None, ({e.name for e in found if word in e.words} for word in words))
    rarest = min(inside, key=len, default=set()) | min(having, key=len, default=set())
    rounds: defaultdict[tuple[bool, int, int], list[Claim]] = defaultdict(list)
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for claim in sorted(found, key=nearness):
        is_common = claim.name not in rarest
        rounds[is_common, functions[claim.function], min(files[claim.file], 1)].append(claim)
        files[claim.file] += 1
        functions[claim.function] += 1
    # One world after another: those of a size need no new ranks.
    return [
        c for key in sorted(rounds) for c in sorted(rounds[key], key=lambda c: (c.processes, nearness(c)))
    ]


def near_to(mutant: Mutant, claims: Sequence[Claim]) -> list[Claim]:
    """Return the claims that run a mutant, the nearest first."""
    return in_order(claims, mutant.file, mutant.lines, mutant.branches, words_of(mutant.before))


def failing(base: Copy, claims: Iterable[Claim], limit: float) -> set[tuple[str, str]]:
    """Return the names and backends of those of the claims that fail for the engine as it is, too."""
    found = set()
    unique = {(each.backend, each.name): each for each in claims}
    for backend in RECORDED:
        left = [each for each in unique.values() if each.backend == backend]
        while left and (result := run(base, [], left, limit * len(left))).verdict != "survived":
            names = [each.name for each in left]
            if result.by not in names:
                raise SystemExit(f"the claims do not run for the engine as it is: {result.by}")
            found.add((result.by, backend))
            left = left[names.index(result.by) + 1 :]
    return found


def confirm(base: Copy, results: Sequence[tuple[Result, Sequence[Claim]]], limit: float) -> list[Result]:
    """Return the results, but "undecided" for each kill by a claim that fails without the mutant too.

    Args:
        results: each with the claims that were to run.
    """
    noticed_by = [
        next((claim for claim in claims if claim.name == result.by and result.verdict in KILLED), None)
        for result, claims in results
    ]
    flaky = failing(base, filter(None, noticed_by), limit)
    return [
        Result("undecided", f"fails without it too: {result.by}", result.seconds, result.tried)
        if claim and (claim.name, claim.backend) in flaky
        else result
        for claim, (result, _) in zip(noticed_by, results, strict=True)
    ]


def verdict(status: int, by: str, late: bool) -> str:
    """Return the verdict on a mutant, "" of one that no claim noticed: by pytest's status and what failed.

    Args:
        by: the claim that failed, if one did.
        late: whether it was ended by its deadline.
    """
    if by:
        return "timed out" if late else "killed"
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit("none of the chosen claims was collected: the record of claims is not of this tree")
    return "session" if status > 0 else ""


def run(base: Copy, edits: Sequence[tuple[str, str]], claims: Sequence[Claim], limit: float) -> Result:
    """Run the claims on a copy of the engine with other texts of the files in `edits`."""
    started = time.monotonic()
    if not claims:
        return Result("survived", "no claim runs it", 0.0, 0)
    count = 0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Copy(Path(folder), base.folder)
        for file, text in edits:
            (copy.engine / file).write_text(text)
        order, failed, tried = (copy.folder / f"{name}.txt" for name in ("order", "failed", "tried"))
        for part in filter(None, (claims[:FIRST], claims[FIRST:])):
            order.write_text("\n".join(claim.name for claim in part))
            left = max(1.0, limit - (time.monotonic() - started))
            arguments = ["-x", "--tb=short", "--world-timeout=30", "--backend", part[0].backend]
            variables = {"LOCKSTEP_CLAIMS_ORDER": str(order), "LOCKSTEP_CLAIMS_SECONDS": str(left)}
            files = dict.fromkeys(claim.file for claim in part)
            status = copy.pytest([*arguments, *files], left + 120, **variables)
            by, _, reason = (failed.read_text() if failed.exists() else "").partition("\n")
            seconds = time.monotonic() - started
            ran = int(tried.read_text()) if tried.exists() else 0
            tried.unlink(missing_ok=True)
            count += ran
            if (by or ran == 0) and (found := verdict(status, by, reason == "late")):
                return Result(found, by or f"the session, exit status {status}", seconds, count)
            if status != 0 or ran < len(part):
                by = f"{count} of {len(claims)} claims in {limit:.0f} s"
                return Result("undecided", by, seconds, count)
    return Result("survived", f"{count} claims hold", seconds, count)


def choose(engine: Path, number: int, seed: int, only: str) -> list[Mutant]:
    """Return mutants of lines drawn from all that have some: a file has as many as it has lines to mutate."""
    by_line: defaultdict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for path in sorted(engine.glob("*.py")):
        for mutant in mutants_of(path.name, path.read_text()):
            if only in f"{mutant.file}:{mutant.function}:{mutant.line}:":
                by_line[mutant.file, mutant.line].append(mutant)
    draw = random.Random(seed)
    lines = list(by_line)
    draw.shuffle(lines)
    return [draw.choice(by_line[line]) for line in lines[:number]]


def equivalents(engine: Path) -> tuple[dict[tuple[str, str, str, str], str], Callable[[Mutant], str]]:
    """Return the reason of each mutant of the engine that no claim can notice.

    And a function that returns why no claim on CPU ranks runs a mutant, "" of any that one should run.
    """
    with open(HERE / "equivalent.toml", "rb") as file:
        written = tomllib.load(file)
    lengths = {
        mutant.key: written["lengths"]["reason"]
        for path in engine.glob("*.py")
        for mutant in mutants_of(path.name, path.read_text())
        if mutant.text == "False"
        and mutant.after.count("strict=True") < mutant.before.count("strict=True")
        and f"{mutant.file}:{mutant.function}" not in written["lengths"]["given"]
    }
    entries = written["equivalent"]
    reasons = lengths | {(e["file"], e["function"], e["before"], e["after"]): e["reason"] for e in entries}
    accelerators = {
        (file, line) for file, lines in written["accelerators"]["lines"].items() for line in lines
    }

    def elsewhere(mutant: Mutant) -> str:
        return written["accelerators"]["reason"] if (mutant.file, mutant.before) in accelerators else ""

    return reasons, elsewhere


def report(results: Sequence[tuple[Mutant, Result]]) -> str:
    """Return the tables: by file, and of each mutant that is left."""
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in results:
        kinds[mutant.file][result.verdict] += 1
    names = (*KILLED, "survived", "undecided", *APART)
    rows = [[file, *(str(kinds[file][name]) for name in names)] for file in sorted(kinds)]
    total = Counter(result.verdict for _, result in results)
    rows.append(["all", *(str(total[name]) for name in names)])
    left = [
        [f"{m.file}:{m.line}", f"`{m.before}` to `{m.after}`", r.verdict, r.by]
        for m, r in results
        if r.verdict in ("survived", "undecided")
    ]
    parts = [str(Table(["file", *names], rows))]
    if left:
        parts.append(str(Table(["left", "the edit", "verdict", "claims"], left)))
    if killed := [result for _, result in results if result.verdict in KILLED]:
        parts.append(f"to the first failure: {median(r.seconds for r in killed):.0f} s in the median")
    decided = len(results) - sum(total[name] for name in APART)
    share = f"{len(killed)} of {decided} that CPU ranks run and that are not equivalent are killed: 95 %"
    held = {share: len(killed) >= 0.95 * decided}
    return "\n\n".join([*parts, verdicts(held)])


def each_mutant(base: Copy, arguments: argparse.Namespace, claims: Sequence[Claim]) -> None:
    """Run the mutants that are chosen, and print what became of them."""
    reasons, elsewhere = equivalents(base.engine)
    chosen = choose(base.engine, arguments.mutants, arguments.seed, arguments.only)
    ends = time.monotonic() + 60 * arguments.minutes

    def decide(mutant: Mutant) -> tuple[Result, Sequence[Claim]] | None:
        if mutant.key in reasons:
            return Result("equivalent", reasons[mutant.key], 0.0, 0), ()
        near = near_to(mutant, claims)
        if not near and (reason := elsewhere(mutant)):
            return Result("elsewhere", reason, 0.0, 0), ()
        if time.monotonic() > ends:
            return None
        text = mutant.apply((base.engine / mutant.file).read_text())
        return run(base, [(mutant.file, text)], near, arguments.limit), near

    mutants, results = [], []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(decide, mutant): mutant for mutant in chosen}
        for future in as_completed(futures):
            mutant, decided = futures[future], future.result()
            if decided:
                mutants.append(mutant)
                results.append(decided)
                result = decided[0]
                place = f"{mutant.file}:{mutant.line} [{mutant.before}] -> [{mutant.after}]"
                print(result.verdict, f"{result.seconds:.0f} s", result.tried, place, result.by, flush=True)
    confirmed = confirm(base, results, arguments.limit)
    print("\n" + report(list(zip(mutants, confirmed, strict=True))))
    if lost := len(chosen) - len(results):
        print(f"{lost} of {len(chosen)} were not begun in {arguments.minutes} minutes")


def each_injection(base: Copy, arguments: argparse.Namespace, claims: Sequence[Claim]) -> None:
    """Run each bug of the corpus, and print the claim that notices it."""

    def decide(name: str) -> tuple[Result, Sequence[Claim]]:
        injection = CORPUS[name]
        source = (base.engine / injection.file).read_text()
        assert source.count(injection.before) == 1, f"{name}: {injection.before!r}"
        first = source[: source.index(injection.before)].count("\n") + 1
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        inside = any(n.lineno <= first <= (n.end_lineno or 0) for n in functions)
        lines = range(first, first + injection.before.count("\n") + 1) if inside else ()
        near = in_order(claims, injection.file, lines)
        return run(base, [(injection.file, injection.apply(source))], near, arguments.limit), near

    names = [name for name in CORPUS if arguments.only in name][: arguments.mutants]
    results = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, decided in zip(names, pool.map(decide, names), strict=True):
            results.append(decided)
            print(name, decided[0].verdict, decided[0].by, flush=True)
    confirmed = zip(names, confirm(base, results, arguments.limit), strict=True)
    rows = [[name, result.verdict, result.by, f"{result.seconds:.0f}"] for name, result in confirmed]
    print(f"\n{Table(['bug', 'verdict', 'the claim', 'seconds'], rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mutants", type=int, default=120, help="how many (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--only", default="", help="of this FILE:FUNCTION:LINE:, a part of it, or bug")
    parser.add_argument("--minutes", type=float, default=60, help="begin none after that (default: 60)")
    parser.add_argument(
        "--limit", type=float, default=150, help="seconds for the claims of one (default: 150)"
    )
    parser.add_argument(
        "--corpus", action="store_true", help="bugs that real engines had, in place of mutants"
    )
    parser.add_argument("--show", action="store_true", help="print the mutants and the claims that would run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="power-") as folder:
        base = Copy(Path(folder))
        claims = record(base)
        print(describe_machine(), f"{len(claims)} claims", flush=True)
        if arguments.show:
            for mutant in choose(base.engine, arguments.mutants, arguments.seed, arguments.only):
                near = near_to(mutant, claims)
                print(f"{mutant.file}:{mutant.line} {mutant.function} [{mutant.before}] -> [{mutant.after}]")
                print(f"    {len(near)} claims: {', '.join(claim.name for claim in near[:3])}")
        elif arguments.corpus:
            each_injection(base, arguments, claims)
        else:
            each_mutant(base, arguments, claims)


if __name__ == "__main__":
    main()
