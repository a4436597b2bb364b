"""Cases of all suites that each engine holds on gloo, with one version of torch or several.

    python benchmarks/conformance.py                         # with the torch of this interpreter
    python benchmarks/conformance.py --python .tox/torch2.15/bin/python   # and with that of another one
    python benchmarks/conformance.py --engine torch-fsdp2    # this engine alone; may be given several times
    python benchmarks/conformance.py --keep                  # run nothing that DIR has already

Each engine has a run of its own, whose tables stay in DIR/VERSION/ENGINE (`--output`). The figures are of all
tables in DIR. Not in it: suites/properties, whose models are drawn at random.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from figures import ROOT, Table, describe_machine, verdicts, write_json

from lockstep.conformance import table as conformance
from lockstep.conformance.registry import built_in_names
from lockstep.conformance.stored import load, merge

VERSION = "import importlib.metadata; print(importlib.metadata.version('torch').partition('+')[0])"
SECONDS_PER_RUN = 3600


def run(python: str, engine: str, output: Path) -> None:
    """Run the suites against one engine on gloo, whose deviations are known; leave its table in `output`."""
    (output / "conformance.json").unlink(missing_ok=True)  # a run that fails must not leave an older one
    arguments = ["--engine", engine, "--output", str(output), "--backend", "gloo", "-n", "2", "-q"]
    command = [python, "-m", "lockstep", "conformance", *arguments]
    # Status 1 says that claims are broken or mended: the table has them.
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=SECONDS_PER_RUN, check=False)
    if done.returncode > 1 or not (output / "conformance.json").exists():
        sys.exit(f"{' '.join(command)}: status {done.returncode}")


def suites(table: conformance.Table) -> Table:
    """Return the table: of each engine the cases held / not held / not offered, by suite."""
    by_suite: dict[str, list[conformance.Claim]] = {}
    for claim in table.claims.values():
        by_suite.setdefault(claim.suite.removeprefix("suites/").partition("/")[0], []).append(claim)
    columns = [("all", [*table.claims.values()]), *((name, by_suite[name]) for name in sorted(by_suite))]
    order = {name: place for place, name in enumerate(built_in_names())}

    def cell(engine: str, claims: list[conformance.Claim]) -> str:
        everything, offered = table.share(engine, claims), table.share_of_offered(engine, claims)
        counts = everything.held, offered.total - everything.held, everything.total - offered.total
        return f"{' / '.join(map(str, counts))}, {everything.percent} %"

    engines = sorted(table.engines, key=lambda engine: (order[engine.partition(" ")[0]], engine))
    rows = [[engine, *(cell(engine, claims) for _, claims in columns)] for engine in engines]
    return Table(["engine", *(name for name, _ in columns)], rows)


def unexpected(table: conformance.Table) -> dict[str, int]:
    """Return how many claims are broken, mended, skipped or were not run, those of all engines together."""
    names = conformance.Outcome
    wrong = (names.BROKEN, names.MENDED, names.SKIPPED, names.NOT_RUN)
    cells = [table.cell(claim, engine) for claim in table.claims.values() for engine in table.engines]
    return {outcome: sum(cell.outcome == outcome for cell in cells) for outcome in wrong}


def main() -> int:
    """Return 1 if a claim is broken or mended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PATH", help="another interpreter, too")
    parser.add_argument(
        "--engine", action="append", metavar="NAME", help="default: all that come with Lockstep"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build/conformance", metavar="DIR", help="of the tables"
    )
    parser.add_argument("--keep", action="store_true", help="run nothing that DIR has already")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    machine = describe_machine()
    for python in [sys.executable, *(options.python or [])]:
        version = subprocess.run(
            [python, "-c", VERSION], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for engine in options.engine or built_in_names():
            output = options.output / version.strip() / engine
            if not (options.keep and (output / "conformance.json").exists()):
                run(python, engine, output)
    stored = sorted(options.output.glob("*/*/conformance.json"))
    table = merge([load(path) for path in stored])
    printed = suites(table)
    found = unexpected(table)
    held = {f"{count} claims {outcome}": not count for outcome, count in found.items()}
    print(f"{printed}\n\n{verdicts(held)}")
    versions = sorted({path.parts[-3] for path in stored})
    write_json(options.json, {**machine, "torch": " and ".join(versions)}, {"suites": printed}, found)
    return int(bool(found[conformance.Outcome.BROKEN] or found[conformance.Outcome.MENDED]))


if __name__ == "__main__":
    sys.exit(main())
