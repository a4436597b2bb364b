"""Run tests of other projects, unedited, before and after they are adopted, and compare them test for test.

    python benchmarks/adopt_others FOLDER [--only PROJECT,...] [-k NAME] [--after OPTIONS]... [--store FILE]
    python benchmarks/adopt_others --show FILE...

FOLDER has the checkout of each project of projects.toml under its name, and beside it `PROJECT.venv`, in
which the project's tests run and Lockstep is installed. Each part of a project is one call of pytest. It runs
with `-p no:lockstep`, and right after that once with each OPTIONS (`--ranks-adopt spawn` if there are none).
adopt_others_log.py notes verdict and seconds of each test, and in the run before how it starts processes. A
checkout with an edited file is refused.

Printed are a table, a row a part, and each test whose verdicts differ; the exit status is 1 if there is one.
FILE keeps what was measured, so that projects can be measured one by one and shown together. Processes that
are left behind, or that run longer than the limit of their part, are ended and reported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from figures import Table  # noqa: E402
from porting import PR_SET_CHILD_SUBREAPER, cpu_of_children, end_children  # noqa: E402

BEFORE = "before"
STOCK = "-p no:lockstep"
VERSIONS = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
OF_AN_OUTER_RUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_ADDOPTS")


@dataclass(frozen=True)
class Part:
    """Tests of a project that run in one call of pytest."""

    project: str
    name: str
    args: list[str]
    folder: str = "."
    environ: dict[str, str] = field(default_factory=dict)
    preload: str = ""
    """What `ranks_preload` is after adoption."""
    limit: float = 900
    """Seconds of one run."""


@dataclass(frozen=True)
class Test:
    """A test of one run; `starts` is how it started processes, and empty after adoption."""

    verdict: str
    seconds: float
    message: str = ""
    starts: str = ""


@dataclass(frozen=True)
class Run:
    """One call of pytest.

    Attributes:
        options: what adoption was asked for, or `BEFORE`.
        wall: seconds from its start to its end.
        cpu: seconds of all its processes.
        load: of the machine, when it began.
        status: exit status of pytest, None if it was ended at its limit.
        tests: by their ids.
        left: command lines of processes that were alive after it.
        output: the end of its output.
    """

    options: str
    wall: float
    cpu: float
    load: float
    status: int | None
    tests: dict[str, Test]
    left: list[str]
    output: str


@dataclass(frozen=True)
class Result:
    """A part, what it is of, and its runs: before, then after."""

    part: str
    project: str
    versions: str
    runs: list[Run]

    @property
    def before(self) -> Run:
        """The run without Lockstep."""
        return self.runs[0]


def parts_of(projects: dict[str, Any], only: list[str]) -> Iterator[Part]:
    """Yield the parts of the projects that are wanted; `only` has names, or is empty for all."""
    if unknown := set(only) - set(projects):
        raise SystemExit(f"projects.toml has no {', '.join(sorted(unknown))}; it has {', '.join(projects)}")
    for name in only or projects:
        common = {key: projects[name][key] for key in ("folder", "environ") if key in projects[name]}
        for part in projects[name]["parts"]:
            yield Part(project=name, **common | part)


def versions(python: Path, checkout: Path, packages: list[str]) -> str:
    """Return the commit of a checkout, and the versions of packages in its environment."""
    found = subprocess.run(
        [python, "-c", VERSIONS, *packages], capture_output=True, text=True, check=True
    ).stdout.split()
    pairs = [f"{name} {version}" for name, version in zip(packages, found, strict=True)]
    if (checkout / ".git").exists():
        commit = subprocess.run(
            ["git", "-C", checkout, "rev-parse", "--short=10", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        pairs.insert(0, commit)
        edited = subprocess.run(
            ["git", "-C", checkout, "diff", "--name-only", "--diff-filter=M"], capture_output=True, text=True
        ).stdout.split()
        if edited:
            raise SystemExit(f"{checkout}: edited, and it must not be: {', '.join(edited)}")
    return ", ".join(pairs)


def run(part: Part, python: Path, checkout: Path, options: str) -> Run:
    """Run a part once; what it leaves is ended."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        results, log = Path(scratch) / "results", Path(scratch) / "output"
        asked = shlex.split(STOCK if options == BEFORE else options)
        if part.preload and options != BEFORE:
            asked += ["-o", f"ranks_preload={part.preload}"]
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "adopt_others_log", *asked]
        environ = {name: value for name, value in os.environ.items() if name not in OF_AN_OUTER_RUN}
        environ |= part.environ | {"TMPDIR": scratch, "ADOPT_OTHERS_LOG": str(results)}
        if options == BEFORE:
            environ["ADOPT_OTHERS_STARTS"] = "1"
        environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [part.environ.get("PYTHONPATH")])])
        load, begun, used = os.getloadavg()[0], time.monotonic(), cpu_of_children()
        with open(log, "w+", errors="replace") as output:
            process = subprocess.Popen(
                [*command, *part.args],
                cwd=checkout / part.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status: int | None = None
            left: list[str] = []
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(part.limit)
                wall = time.monotonic() - begun
            finally:
                left += end_children(process)
            output.seek(0)
            text = output.read()
        return Run(
            options, wall, cpu_of_children() - used, load, status, tests(results), left, text[-20_000:]
        )


def tests(results: Path) -> dict[str, Test]:
    """Return the tests of the file that adopt_others_log.py has written, by their ids."""
    found = {}
    if results.exists():
        for line in results.read_text().splitlines():
            test = json.loads(line)
            name = test.pop("name")
            found[name] = Test(**test)
    return found


def differences(result: Result) -> Iterator[list[str]]:
    """Yield each test whose verdicts differ: part, options, test, both verdicts, the message."""
    before = result.before.tests
    for after in result.runs[1:]:
        for name in sorted({*before, *after.tests}):
            verdicts = [
                one.tests[name].verdict if name in one.tests else "not run" for one in (result.before, after)
            ]
            if verdicts[0] != verdicts[1]:
                messages = [one.tests[name].message for one in (after, result.before) if name in one.tests]
                said = next((" ".join(text.split())[:160] for text in messages if text), "")
                yield [result.part, after.options, name, *verdicts, said.replace("|", "\\|")]


def counts(one: Run) -> str:
    """Return how many passed, failed and were skipped; `+` what else there is."""
    found = Counter(test.verdict for test in one.tests.values())
    text = "/".join(str(found.pop(verdict, 0)) for verdict in ("passed", "failed", "skipped"))
    text += "".join(f" + {count} {verdict}" for verdict, count in found.items())
    return text if one.status is not None else f"{text}, ended after {one.wall:.0f} s"


def starting(result: Result) -> list[str]:
    """Return the tests that start processes, and pass in all runs."""
    return [
        name
        for name, test in result.before.tests.items()
        if test.starts
        and all(one.tests.get(name, test).verdict == "passed" and name in one.tests for one in result.runs)
    ]


def launchers(result: Result) -> str:
    """Return how the tests of a part start processes, and how many each way."""
    ways: Counter[str] = Counter()
    for test in result.before.tests.values():
        ways.update({re.sub(r" \d+$", "", way) for way in test.starts.split(", ") if way})
    return ", ".join(f"{way}: {count}" for way, count in ways.most_common()) or "none"


def figure(seconds: float) -> str:
    """Return seconds with what of them means something."""
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2f}"


def rows(results: list[Result]) -> Iterator[list[str]]:
    """Yield a row for each part and each adoption."""
    for result in results:
        for after in result.runs[1:]:
            named = starting(Result(result.part, result.project, result.versions, [result.before, after]))
            medians = [
                median(one.tests[name].seconds for name in named) if named else None
                for one in (result.before, after)
            ]
            yield [
                result.part,
                launchers(result),
                after.options,
                counts(result.before),
                counts(after),
                *(f"{one.wall:.0f} / {one.cpu:.0f}" for one in (result.before, after)),
                str(len(named)),
                " to ".join("-" if each is None else figure(each) for each in medians),
                "-" if None in medians or not medians[1] else f"{medians[0] / medians[1]:.1f}",
                f"{result.before.load:.0f}, {after.load:.0f}",
            ]


HEAD = [
    "tests",
    "started by: tests",
    "adopted by",
    "before",
    "after",
    "run before, s wall / CPU",
    "after",
    "compared",
    "a test, s",
    "before / after",
    "load",
]


def show(results: list[Result]) -> int:
    """Print what was measured; return how many verdicts differ."""
    print(Table(HEAD, list(rows(results))), end="\n\n")
    for text in dict.fromkeys(f"{result.project}: {result.versions}" for result in results):
        print(text)
    found = [row for result in results for row in differences(result)]
    if found:
        header = ["tests", "adopted by", "test", "before", "after", "message"]
        print(f"\n{Table(header, found)}")
    for result in results:
        for one in result.runs:
            for line in one.left:
                print(f"{result.part}, {one.options}: left behind: {line}")
            if not one.tests:
                print(
                    f"{result.part}, {one.options}: no report, exit status {one.status}\n{one.output[-3000:]}"
                )
    return len(found)


def load(text: str) -> Result:
    """Return a result from a line of a stored file."""
    raw = json.loads(text)
    raw["runs"] = [
        Run(**one | {"tests": {name: Test(**test) for name, test in one["tests"].items()}})
        for one in raw["runs"]
    ]
    return Result(**raw)


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="the checkouts and their environments")
    parser.add_argument("--only", default="", help="names of projects.toml, separated by commas")
    parser.add_argument("-k", default="", help="measure the parts whose name has this text")
    parser.add_argument("--after", action="append", help="options of a run (default: --ranks-adopt spawn)")
    parser.add_argument(
        "--projects", type=Path, default=HERE / "projects.toml", help="(default: %(default)s)"
    )
    parser.add_argument("--store", type=Path, help="append what was measured to this file")
    parser.add_argument("--show", nargs="+", type=Path, help="measure nothing, show stored files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended first
    if options.show:
        results = [load(line) for path in options.show for line in path.read_text().splitlines()]
        sys.exit(show(results) > 0)
    if not options.folder:
        parser.error("give the folder of the checkouts, or --show FILE")
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    projects = tomllib.loads(options.projects.read_text())
    results = []
    for part in parts_of(projects, options.only.split(",") if options.only else []):
        if options.k not in part.name:
            continue
        checkout, python = (
            options.folder / part.project,
            options.folder / f"{part.project}.venv" / "bin" / "python",
        )
        if not checkout.exists() or not python.exists():
            raise SystemExit(f"{checkout} is to be the checkout of {part.project}, {python} its interpreter")
        named = versions(python, checkout, projects[part.project]["packages"])
        runs = []
        for asked in (BEFORE, *(options.after or ["--ranks-adopt spawn"])):
            runs.append(run(part, python, checkout, asked))
            print(
                f"{part.name}, {asked}: {counts(runs[-1])}, {runs[-1].wall:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        results.append(Result(part.name, part.project, named, runs))
        if options.store:
            with open(options.store, "a") as stored:
                stored.write(json.dumps(asdict(results[-1])) + "\n")
    sys.exit(show(results) > 0)


if __name__ == "__main__":
    main()
