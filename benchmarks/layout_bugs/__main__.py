"""Plant bugs in right plans over dp, fsdp, ep, cp, tp and pp: which does `lockstep.layouts` catch, and name?

    python benchmarks/layout_bugs [--only NAME] [--log FILE] [--json FILE]

Each bug runs on its layouts, in one pytest session on warm ranks, and so does each plan without a bug, which
must hold. Next to the verdict is what three usual checks see of the same run: a loss within 5 %, a norm
within 5 %, gradients within 5e-3. bug.py has the format of entries; the known ones are in reductions.py,
losses.py, norms.py and modules.py, and those in unseen.py, if it exists, are by someone who has not read the
diagnoser. The exit status is 1 if a bug is not caught or is named wrongly, or a right plan does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from bug import Bug  # noqa: E402
from figures import Table, describe_machine, write_json  # noqa: E402
from files import all_bugs, bugs_of, right_plans  # noqa: E402

USUAL = {"loss": 0.05, "norm": 0.05, "gradients": 5e-3}
"""What usual tests let pass: of the loss and of the norm a part, of gradients an absolute difference."""
SECONDS = 1800.0
NO_NAME = re.compile(
    r"first divergence: .*|all outputs and their gradients agree.*|largest: .*|note: .*|"
    r"all outputs agree, the gradient of the last one .*|"
    r".* differs; no single reduction.*|.* differs, which that may have caused|"
    r"loss is [-\d.naif, ]+(expected [-\d.e]+|off by [-\d.e+]+)|"
    r"total norm (differs|is that of the gradients that the ranks hold) .*"
)
"""Sentences of a report that name no cause."""
NAMED, NOT_NAMED, WRONGLY, LOST = "named", "not named", "NAMED WRONGLY", "NOT CAUGHT"


@dataclass(frozen=True)
class Result:
    """A bug on one layout, and what was said of it; differences are those that usual tests measure."""

    bug: Bug
    layout: str
    report: str
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The first sentence of the report, without the title."""
        lines = [line.strip() for line in self.report.splitlines()]
        first = lines[0].partition(": ")[2] if lines else ""
        return first if first else next(iter(lines[1:]), "")

    @property
    def verdict(self) -> str:
        if not self.report:
            return LOST
        if self.bug.hangs:
            return NAMED if re.search(self.bug.hangs, self.report) else NOT_NAMED
        if NO_NAME.fullmatch(self.sentence):
            return NOT_NAMED
        return NAMED if self.bug.names and re.search(self.bug.names, self.sentence) else WRONGLY

    @property
    def is_module_right(self) -> bool | None:
        """Whether the first divergence is where it should be; None if it does not matter, or is not known."""
        place = r"(?:first divergence: .*?output of |the gradient of the last one \()(?:`(.*?)`|the model)"
        found = re.search(place, self.report)
        return bool(re.match(self.bug.module, found[1] or "")) if self.bug.module and found else None

    def sees(self, what: str) -> bool:
        return self.differences.get(what, 0.0) > USUAL[what]


def run(only: str, log: Path) -> str:
    """Run pytest, which logs results; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "lockstep", f"--junitxml={log.with_suffix('.xml')}"],
        cwd=HERE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "LAYOUT_BUGS_LOG": str(log),
            "LAYOUT_BUGS_ONLY": only,
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
    )
    return done.stdout


def read(log: Path) -> list[Result]:
    """Return the results in a log, and those of tests that failed themselves, such as of bugs that hang."""
    bugs = all_bugs()
    by_name = {bug.name: bug for bug in (*bugs, *right_plans(bugs))}
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = [
        Result(by_name[each["bug"]], each["layout"], each["report"], each["differences"]) for each in entries
    ]
    for case in ElementTree.parse(log.with_suffix(".xml")).iter("testcase"):
        found_id = re.search(r"\[((?:[a-z_]+\d+-)*[a-z_]+\d+)-(.+)\]$", case.get("name") or "")
        if found_id and (failure := case.find("failure")) is not None:
            text = f"{failure.get('message')}\n{failure.text}"
            found.append(Result(by_name[found_id[2]], found_id[1], text))
    order = {name: place for place, name in enumerate(by_name)}
    return sorted(found, key=lambda each: order[each.bug.name])


def report(results: Sequence[Result]) -> Table:
    """Return the table of bugs."""
    module = {None: "", True: "right", False: "wrong"}
    rows = [
        [
            *(each.bug.name, each.layout, each.verdict, module[each.is_module_right]),
            *("sees" if each.sees(what) else "" for what in USUAL),
            each.sentence.replace("|", "/"),
        ]
        for each in results
    ]
    header = [
        "bug",
        "layout",
        "verdict",
        "module",
        "loss 5 %",
        "norm 5 %",
        "gradients 5e-3",
        "first sentence",
    ]
    return Table(header, rows)


def totals(results: Sequence[Result]) -> Table:
    """Return how many bugs are caught and named, of all and of those in unseen.py."""
    unseen = {bug.name for bug in bugs_of("unseen")}
    counts = [count(results), count([each for each in results if each.bug.name in unseen])]
    header = ["", "all", f"the {counts[1]['bugs']} by others"]
    return Table(header, [[what, *(each[what] for each in counts)] for what in counts[0]])


def count(results: Sequence[Result]) -> dict[str, str]:
    """Return what holds of these results."""
    verdicts = [each.verdict for each in results]
    to_name = [each for each in results if each.bug.names or each.bug.hangs]
    to_place = [each for each in results if each.bug.module]
    ran = [each for each in results if each.differences]
    missed = {what: sum(not each.sees(what) for each in ran) for what in USUAL}
    missed["all three"] = sum(not any(each.sees(what) for what in USUAL) for each in ran)
    of_name = f"{sum(each.verdict == NAMED for each in to_name)} of {len(to_name)}"
    of_place = f"{sum(bool(each.is_module_right) for each in to_place)} of {len(to_place)}"
    of_usual = " / ".join(map(str, missed.values()))
    return {
        "bugs": str(len({each.bug.name for each in results})),
        "runs on a layout": str(len(results)),
        "caught": str(len(results) - verdicts.count(LOST)),
        "one reduction, factor or part is wrong: named in the first sentence": of_name,
        "named wrongly": str(verdicts.count(WRONGLY)),
        "otherwise: the module of the first divergence is right": of_place,
        "missed by loss 5 % / norm 5 % / gradients 5e-3 / all three": f"{of_usual} of {len(ran)}",
    }


def main() -> int:
    """Return 1 if a bug is not caught or named wrongly, or a plan without a bug does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of bugs to plant")
    parser.add_argument("--log", type=Path, help="file to keep the results in")
    parser.add_argument("--json", type=Path, help="file for the tables")
    options, machine = parser.parse_args(), describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        log = options.log.absolute() if options.log else Path(folder) / "log.jsonl"
        log.unlink(missing_ok=True)
        output = run(options.only, log)
        results = read(log)
    if not results:
        raise SystemExit(output)
    planted = [each for each in results if each.bug.edits]
    broken = [each for each in results if not each.bug.edits and each.report]
    tables = {"all": report(planted), "totals": totals(planted)}
    print(*tables.values(), sep="\n\n")
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    write_json(options.json, machine, tables)
    for each in broken:
        print(f"\nNOT HELD: {each.bug.name} on {each.layout}\n{each.report}")
    return int(bool(broken) or any(each.verdict in (LOST, WRONGLY) for each in planted))


if __name__ == "__main__":
    sys.exit(main())
