"""Mutants of the engine, or of the harness: how many of them the tests notice, and how soon.

    python benchmarks/power.py --mutants 120 --jobs 2         # of the engine, chosen by --seed
    python benchmarks/power.py --of core --mutants 120        # of what else is in harness
    python benchmarks/power.py --only gradients.py --show     # chosen, and not run
    python benchmarks/power.py --corpus                       # bugs of real engines, as edits of this one
    python benchmarks/power.py --of core --minutes 8 --results FILE  # again, until all have run

Each mutant is one edit, which a mount shows to its own processes alone (by `unshare`). Claims of the engine
are those of `suites`, claims of the harness its self-tests. Those that run the line come first, a few of
each file, and the first failure ends it: it is killed, if that claim holds without the edit. Apart are
those that time out, and those with which the session ends without a failure ("session": an import fails, or
pytest itself). A line that no claim runs, nor a claim of its room its file, makes a survivor at once.
What cannot be noticed is in `mutants/equivalent_engine.toml` and `equivalent_core.toml`, with its reason.
suites/engine takes part in neither.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from statistics import median

import pytest
from figures import Table, describe_machine, verdicts
from mutants.copies import HERE, ROOT, SUBJECTS, Base, Subject, copy_of, room_of
from mutants.corpus import CORPUS
from mutants.mutations import Mutant
from mutants.recording import Claim, record, words_of

FIRST = 8
"""How many claims run in a session of their own: most mutants fail one, and it collects few files."""
KILLED = ("killed", "timed out", "session")
"""The verdicts on mutants that were noticed."""
APART = ("equivalent", "elsewhere")
"""The verdicts on mutants that no claim can notice, or none on CPU ranks."""


@dataclass(frozen=True)
class Result:
    """A verdict on a mutant; `by` is the first claim that failed, or why there is none."""

    verdict: str
    by: str
    seconds: float
    tried: int


def in_order(
    claims: Sequence[Claim],
    file: str,
    lines: Sequence[int],
    branches: Sequence[int] = (),
    words: Iterable[str] = (),
    around: Iterable[str] = (),
) -> list[Claim]:
    """Return the claims that run one of `lines`, the first of them that any runs, the nearest first.

    First those that run the one of `branches` that the fewest run (if none is known to, cases that were not
    recorded), or whose test has the one of `words` that the fewest have: the others seldom notice. Of these
    and of those first the nearest of each file of claims, then of each function, then second cases and so
    on. A claim is near if much of what it runs is in the file of the mutant. Self-tests of its room or
    feature come before others. On gloo, if any runs the line there. Cases that were not recorded come after
    those of their function that were; if none was recorded, those that take long come after the others, and
    those first whose file has the name of the mutant's, and that have many of the words `around` the lines,
    of which rare ones count for more.
    Last those of the same room that run the file: under a debugger, in threads of C++ and in dynamo no line
    is recorded.
    """
    room = room_of(file)
    found, known = _running(claims, file, lines, room)
    rarest = _rarest(found, file, branches, words)
    rounds: defaultdict[tuple[bool, bool, bool, bool, bool, int, int], list[Claim]] = defaultdict(list)
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    common = Counter(word for claim in found for word in claim.words)

    def nearness(claim: Claim) -> float:
        likeness = sum(1 / common[word] for word in {*around} & claim.words)
        return _nearness(claim, file) - (likeness if claim.is_guess else 0.0)

    for claim in sorted(found, key=lambda claim: (claim.is_guess, nearness(claim))):
        is_common = claim.name not in rarest
        is_unknown = claim.name not in known
        is_far = PurePath(claim.file).parent.name != room or (claim.is_guess and not _nearness(claim, file))
        seen = functions[claim.function], 0 if claim.is_guess else min(files[claim.file], 1)
        key = is_unknown, claim.is_slow, claim.is_guess and is_far, is_common, is_far, *seen
        rounds[key].append(claim)
        files[claim.file] += 1
        functions[claim.function] += 1
    # One world after another: those of a size need no new ranks.
    ordered = [
        claim
        for key in sorted(rounds)
        for claim in sorted(rounds[key], key=lambda claim: (claim.processes, nearness(claim)))
    ]
    # Where the first of a session has run, the others cost nothing, and would cost all of it later.
    together: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in ordered:
        together[claim.shares or claim.name].append(claim)
    return [claim for claims in together.values() for claim in claims]


def _running(
    claims: Sequence[Claim], file: str, lines: Sequence[int], room: str
) -> tuple[list[Claim], set[str]]:
    """Return the claims that may run one of `lines`, and the names of those that are known to."""

    def of_room(found: Iterable[Claim]) -> list[Claim]:
        return [each for each in found if PurePath(each.file).parent.name == room]

    found = [each for each in claims if file in each.lines]
    if not (found or lines):  # it declares names, which others read
        found = of_room(each for each in claims if each.lines)
    known = {each.name for each in found}
    if lines:
        running = ([each for each in found if line in each.lines[file]] for line in lines)
        inside = of_room(found)
        found = next(filter(None, running), [])
        known = {each.name for each in found}
        found += [each for each in inside if each.name not in known]
    backend = "gloo" if any(each.backend == "gloo" for each in found) else "shm"
    return [each for each in found if each.backend == backend], known


def _rarest(found: Sequence[Claim], file: str, branches: Sequence[int], words: Iterable[str]) -> set[str]:
    """Return the names of the claims that take a branch, or have a word, that the fewest of `found` do."""
    through = [{each.name for each in found if line in each.lines[file]} for line in branches]
    having = [{each.name for each in found if word in each.words} for word in words]
    fewest = [min(filter(None, sets), key=len, default=set()) for sets in (through, having)]
    if not all(through):  # a case that was not recorded may: the others do not
        fewest.append({each.name for each in found if each.is_guess})
    return set().union(*fewest)


def _nearness(claim: Claim, file: str) -> float:
    """Return the less, the larger a part of what a claim runs is in a file, and the less time it takes."""
    if claim.is_guess:
        return -float(PurePath(file).stem in claim.file)
    return -len(claim.lines.get(file, ())) / claim.size / (0.5 + claim.seconds)


def near_to(mutant: Mutant, claims: Sequence[Claim], source: str) -> list[Claim]:
    """Return the claims that run a mutant of a file's text, the nearest first."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    inside = [node for node in nodes if node.lineno <= mutant.line <= (node.end_lineno or 0)]
    function = min(inside, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
    around = words_of(ast.unparse(function)) if function else ()
    own = words_of(mutant.before)
    return in_order(claims, mutant.file, mutant.lines, mutant.branches, own, around)


def failing(base: Base, claims: Iterable[Claim], limit: float) -> set[tuple[str, str]]:
    """Return the names and backends of those of the claims that fail without an edit, too."""
    found = set()
    unique = {(each.backend, each.name): each for each in claims}
    for backend in sorted({each.backend for each in unique.values()}):
        left = [each for each in unique.values() if each.backend == backend]
        while left and (result := run(base, [], left, limit * len(left))).verdict != "survived":
            names = [each.name for each in left]
            if result.by not in names:
                raise SystemExit(f"the claims do not run without an edit: {result.by}")
            found.add((result.by, backend))
            left = left[names.index(result.by) + 1 :]
    return found


def confirm(
    base: Base, results: Sequence[tuple[Result, Sequence[Claim]]], limit: float, jobs: int = 1
) -> list[Result]:
    """Return the results, but "undecided" for each kill by a claim that fails without the mutant too.

    Args:
        results: each with the claims that were to run.
        jobs: how many sessions run at a time.
    """
    noticed_by = [
        next((claim for claim in claims if claim.name == result.by and result.verdict in KILLED), None)
        for result, claims in results
    ]
    # Sorted, as claims of a file share fixtures.
    killing = sorted({(c.backend, c.name): c for c in noticed_by if c}.values(), key=lambda c: c.file)
    size = max(1, -(-len(killing) // jobs))
    parts = [killing[start : start + size] for start in range(0, len(killing), size)]
    with ThreadPoolExecutor(jobs) as pool:
        flaky = set().union(*pool.map(lambda part: failing(base, part, limit), parts))
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


def run(base: Base, edits: Sequence[tuple[str, str]], claims: Sequence[Claim], limit: float) -> Result:
    """Run the claims with other texts of the files in `edits`."""
    started = time.monotonic()
    if not claims:
        return Result("survived", "no claim runs it", 0.0, 0)
    count = 0
    with copy_of(base) as copy:
        for file, text in edits:
            copy.edit(file, text)
        order, failed, tried = (copy.tmp / f"{name}.txt" for name in ("order", "failed", "tried"))
        for part in filter(None, (claims[:FIRST], claims[FIRST:])):
            order.write_text("\n".join(claim.name for claim in part))
            left = max(1.0, limit - (time.monotonic() - started))
            arguments = ["-x", "--tb=short", "--world-timeout=30", "--backend", part[0].backend]
            variables = {"LOCKSTEP_CLAIMS_ORDER": "/tmp/order.txt", "LOCKSTEP_CLAIMS_SECONDS": str(left)}
            files = dict.fromkeys(claim.file for claim in part)
            status = copy.pytest([*arguments, *files], left + 120, **variables)
            by, _, reason = (failed.read_text() if failed.exists() else "").partition("\n")
            seconds = time.monotonic() - started
            ran = int(tried.read_text()) if tried.exists() else 0
            tried.unlink(missing_ok=True)
            count += ran
            is_over = by or ran == 0 or status == pytest.ExitCode.INTERNAL_ERROR
            if is_over and (found := verdict(status, by, reason == "late")):
                return Result(found, by or f"the session, exit status {status}", seconds, count)
            if status != 0 or ran < len(part):
                by = f"{count} of {len(claims)} claims in {limit:.0f} s"
                return Result("undecided", by, seconds, count)
    return Result("survived", f"{count} claims hold", seconds, count)


def choose(base: Base, number: int, seed: int, only: Sequence[str]) -> list[Mutant]:
    """Return mutants of lines drawn from all that have some: a file has as many as it has lines to mutate."""
    by_line: defaultdict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for mutant in base.subject.mutants(base.folder):
        place = f"{mutant.file}:{mutant.function}:{mutant.line}:"
        if not only or any(each in place for each in only):
            by_line[mutant.file, mutant.line].append(mutant)
    draw = random.Random(seed)
    lines = list(by_line)
    draw.shuffle(lines)
    return [draw.choice(by_line[line]) for line in lines[:number]]


def equivalents(
    subject: Subject, root: Path = ROOT
) -> tuple[dict[tuple[str, str, str, str], str], Callable[[Mutant], str]]:
    """Return the reason of each mutant that no claim can notice.

    And a function that returns why no claim on CPU ranks runs a mutant, "" of any that one should run.
    """
    with open(HERE / f"equivalent_{subject.name}.toml", "rb") as file:
        written = tomllib.load(file)
    lengths = {
        mutant.key: written["lengths"]["reason"]
        for mutant in subject.mutants(root)
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


def report(results: Sequence[tuple[Mutant, Result]], subject: Subject) -> str:
    """Return the tables: by file, or by room of the core, and of each mutant that is left."""
    of_core = subject.name == "core"
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, result in results:
        kinds[room_of(mutant.file) if of_core else mutant.file][result.verdict] += 1
    names = (*KILLED, "survived", "undecided", *APART)
    rows = [[place, *(str(kinds[place][name]) for name in names)] for place in sorted(kinds)]
    total = Counter(result.verdict for _, result in results)
    rows.append(["all", *(str(total[name]) for name in names)])
    left = [
        [f"{m.file}:{m.line}", f"`{m.before}` to `{m.after}`", r.verdict, r.by]
        for m, r in results
        if r.verdict in ("survived", "undecided")
    ]
    parts = [str(Table(["room" if of_core else "file", *names], rows))]
    if left:
        parts.append(str(Table(["left", "the edit", "verdict", "claims"], left)))
    if killed := [result for _, result in results if result.verdict in KILLED]:
        parts.append(f"to the first failure: {median(r.seconds for r in killed):.0f} s in the median")
    decided = len(results) - sum(total[name] for name in APART)
    wanted = f"{subject.wanted:.0%}"
    share = f"{len(killed)} of {decided} that CPU ranks run and are not equivalent are killed: {wanted}"
    held = {share: len(killed) >= subject.wanted * decided}
    return "\n\n".join([*parts, verdicts(held)])


class Results:
    """Verdicts in a file, by which a run goes on where an earlier one ended; in none, for the path None.

    Mutants that are undecided run again, after those that have not run.

    Attributes:
        ran: those that are confirmed.
        to_confirm: those of a run that was ended before it had confirmed them.
    """

    def __init__(self, path: Path | None, chosen: Sequence[Mutant]) -> None:
        self._path = path
        self.ran: dict[Mutant, Result] = {}
        self.to_confirm: dict[Mutant, Result] = {}
        mutants = {(mutant.line, *mutant.key): mutant for mutant in chosen}
        for row in path.read_text().splitlines() if path and path.exists() else ():
            key, result, is_confirmed = json.loads(row)
            if mutant := mutants.get(tuple(key)):
                self._keep(mutant, Result(**result), is_confirmed)

    def _keep(self, mutant: Mutant, result: Result, is_confirmed: bool) -> None:
        kept, other = self.ran, self.to_confirm
        if not is_confirmed:
            kept, other = other, kept
        kept[mutant] = result
        other.pop(mutant, None)

    def add(self, mutant: Mutant, result: Result, is_confirmed: bool) -> None:
        self._keep(mutant, result, is_confirmed)
        if self._path:
            with self._path.open("a") as file:
                print(json.dumps([(mutant.line, *mutant.key), asdict(result), is_confirmed]), file=file)


def each_mutant(
    base: Base, arguments: argparse.Namespace, chosen: Sequence[Mutant], claims: Sequence[Claim]
) -> None:
    """Run the mutants that are chosen, and print what became of them; in parts, if `--results` is given."""
    reasons, elsewhere = equivalents(base.subject, base.folder)
    ends = time.monotonic() + 60 * arguments.minutes
    results = Results(arguments.results, chosen)
    left = [mutant for mutant in chosen if mutant not in {**results.ran, **results.to_confirm}]
    left += [mutant for mutant, result in results.ran.items() if result.verdict == "undecided"]

    def source(mutant: Mutant) -> str:
        return (base.top / mutant.file).read_text()

    def decide(mutant: Mutant) -> Result | None:
        if mutant.key in reasons:
            return Result("equivalent", reasons[mutant.key], 0.0, 0)
        near = near_to(mutant, claims, source(mutant))
        if not near and (reason := elsewhere(mutant)):
            return Result("elsewhere", reason, 0.0, 0)
        if time.monotonic() > ends:
            return None
        return run(base, [(mutant.file, mutant.apply(source(mutant)))], near, arguments.limit)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        futures = {pool.submit(decide, mutant): mutant for mutant in left}
        for future in as_completed(futures):
            mutant, result = futures[future], future.result()
            if result:
                results.add(mutant, result, is_confirmed=False)
                place = f"{mutant.file}:{mutant.line} [{mutant.before}] -> [{mutant.after}]"
                print(result.verdict, f"{result.seconds:.0f} s", result.tried, place, result.by, flush=True)
    mutants = list(results.to_confirm)
    found = [(results.to_confirm[mutant], near_to(mutant, claims, source(mutant))) for mutant in mutants]
    for mutant, result in zip(mutants, confirm(base, found, arguments.limit, arguments.jobs), strict=True):
        results.add(mutant, result, is_confirmed=True)
    print("\n" + report(list(results.ran.items()), base.subject))
    if lost := len(chosen) - len(results.ran):
        print(f"{lost} of {len(chosen)} were not begun in {arguments.minutes} minutes")


def each_injection(base: Base, arguments: argparse.Namespace, claims: Sequence[Claim]) -> None:
    """Run each bug of the corpus, and print the claim that notices it."""

    def decide(name: str) -> tuple[Result, Sequence[Claim]]:
        injection = CORPUS[name]
        source = (base.top / injection.file).read_text()
        assert source.count(injection.before) == 1, f"{name}: {injection.before!r}"
        first = source[: source.index(injection.before)].count("\n") + 1
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        inside = any(n.lineno <= first <= (n.end_lineno or 0) for n in functions)
        lines = range(first, first + injection.before.count("\n") + 1) if inside else ()
        near = in_order(claims, injection.file, lines)
        return run(base, [(injection.file, injection.apply(source))], near, arguments.limit), near

    only = arguments.only or [""]
    names = [name for name in CORPUS if any(each in name for each in only)][: arguments.mutants]
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
    parser.add_argument("--of", choices=SUBJECTS, default="engine", help="what is mutated (default: engine)")
    parser.add_argument("--mutants", type=int, default=120, help="how many (default: 120)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument(
        "--only", nargs="+", default=(), help="of one of these: parts of FILE:FUNCTION:LINE:, or bugs"
    )
    parser.add_argument("--minutes", type=float, default=60, help="begin none after that (default: 60)")
    parser.add_argument(
        "--near", action="store_true", help="of the core: run self-tests of the same rooms alone"
    )
    parser.add_argument(
        "--limit", type=float, default=150, help="seconds for the claims of one (default: 150)"
    )
    parser.add_argument(
        "--corpus", action="store_true", help="bugs that real engines had, in place of mutants"
    )
    parser.add_argument(
        "--guess",
        action="store_true",
        help="of the core: record none; claims not recorded may run all of their room",
    )
    parser.add_argument("--record", action="store_true", help="record the claims, and do no more")
    parser.add_argument(
        "--results", type=Path, help="a file: verdicts are added, and mutants that have one do not run again"
    )
    parser.add_argument("--show", action="store_true", help="print the mutants and the claims that would run")
    arguments = parser.parse_args()
    if arguments.corpus and arguments.of != "engine":
        parser.error("--corpus: its bugs are those of engines")
    if (arguments.near or arguments.guess) and arguments.of != "core":
        parser.error("--near and --guess: the claims of an engine are of no room")
    if ROOT.is_relative_to("/tmp"):
        parser.error(f"each mutant has a /tmp of its own, and would not see {ROOT}: move the checkout")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that folders are removed
    with tempfile.TemporaryDirectory(prefix="power-") as folder:
        base = Base(Path(folder), SUBJECTS[arguments.of])
        chosen = choose(base, arguments.mutants, arguments.seed, arguments.only)
        rooms = {room_of(mutant.file) for mutant in chosen} if arguments.near else ()
        claims = record(base, rooms, arguments.jobs, arguments.minutes, arguments.guess)
        print(describe_machine(), f"{len(claims)} claims", flush=True)
        if arguments.record:
            return
        if arguments.show:
            for mutant in chosen:
                near = near_to(mutant, claims, (base.top / mutant.file).read_text())
                print(f"{mutant.file}:{mutant.line} {mutant.function} [{mutant.before}] -> [{mutant.after}]")
                print(f"    {len(near)} claims: {', '.join(claim.name for claim in near[:3])}")
        elif arguments.corpus:
            each_injection(base, arguments, claims)
        else:
            each_mutant(base, arguments, chosen, claims)


if __name__ == "__main__":
    main()
