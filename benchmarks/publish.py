"""Run benchmarks, and write their tables into the pages of the documentation.

    python benchmarks/publish.py [NAME ...]     run these, all by default, and publish what they measure
                --from DIR                      publish DIR/NAME.json, which a run with --json has written
                --list                          show names, commands, pages, age and commit, and run nothing
                --check                         exit 1 if a page differs from the figures that are kept

A block of a page lies between two comments, `<!-- figures: engine (ratios, memory) -->` and
`<!-- end of figures -->`: the name, and the tables, if it does not show all. What a run wrote stays in
build/figures; of that the tables that pages show are kept in benchmarks/published, with the command, the
date and the machine, so that each block can be made again.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from figures import ROOT, Table

FIGURES = {
    "adopt_spawn": "adopt_spawn.py --limit 90",
    "calls": "calls.py",
    "collectives": "collectives.py --dtypes fp32 --sizes 4K,1M,64M "
    "--ops all_gather,reduce_scatter,all_reduce",
    "compile_cache": "compile_cache.py",
    "conformance": "conformance.py --python .tox/torch2.15/bin/python",
    "engine": "engine.py --repeats 3",
    "engine_shm": "engine.py --repeats 3 --backend shm --dtypes fp32",
    "faults": "faults.py",
    "harness": "harness.py",
    "layout_bugs": "layout_bugs",
    "layouts": "layouts.py",
    "porting": "porting.py",
    "properties": "properties.py",
    "races": "races.py",
    "recorder": "recorder.py",
    "scale": "scale.py",
    "suites": "suites.py",
    "sweep": "sweep.py",
}
"""Arguments of python, below benchmarks, that measure the figures of a name."""

FRESH, KEPT = Path("build/figures"), Path("benchmarks/published")
"""What runs wrote, and what of it is published, below the root of the project."""

END = "<!-- end of figures -->"
BLOCK = re.compile(rf"<!-- figures: (\w+)(?: \(([\w, ]+)\))? -->\n(.*?){END}", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Part of a page between two marks; it shows all tables if it names none."""

    page: Path
    name: str
    tables: tuple[str, ...]
    text: str


def blocks(root: Path) -> Iterator[Block]:
    """Yield the blocks of all pages, in order."""
    for page in (root / "README.md", *sorted(root.glob("docs/**/*.md"))):
        for name, tables, text in BLOCK.findall(page.read_text()):
            yield Block(page, name, named(tables), text)


def kept(root: Path, name: str) -> dict[str, Any]:
    """Return the figures that are published under a name."""
    figures: dict[str, Any] = json.loads((root / KEPT / f"{name}.json").read_text())
    return figures


def text_of(figures: dict[str, Any], tables: Sequence[str]) -> str:
    """Return what a block shows: these tables, or all, and a line on how they were measured."""
    shown = [Table(**figures["tables"][table]).markdown() for table in tables or figures["tables"]]
    machine = "Python {python}, torch {torch}, {cores} cores, load before it {load}".format(
        **figures["machine"]
    )
    commit = f", commit {figures['machine']['commit']}" if "commit" in figures["machine"] else ""
    measured = f"`{figures['command']}`, {figures['date']}{commit}: {machine}."
    return "\n" + "\n\n".join([*shown, measured]) + "\n\n"


def differing(root: Path) -> list[Block]:
    """Return the blocks that are not what their figures give, or have none."""
    return [
        block
        for block in blocks(root)
        if not (root / KEPT / f"{block.name}.json").exists()
        or block.text != text_of(kept(root, block.name), block.tables)
    ]


def publish(root: Path, name: str, source: Path) -> None:
    """Keep what a run wrote, without what no page shows, and write it into the pages."""
    of_name = [block for block in blocks(root) if block.name == name]
    if not of_name:
        sys.exit(f"no page has a block {name}: <!-- figures: {name} --> and {END}")
    figures = json.loads(source.read_text())
    figures.pop("samples")
    if all(block.tables for block in of_name):
        shown = {table for block in of_name for table in block.tables}
        figures["tables"] = {table: rest for table, rest in figures["tables"].items() if table in shown}
    (root / KEPT).mkdir(parents=True, exist_ok=True)
    (root / KEPT / f"{name}.json").write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    for page in {block.page for block in of_name}:
        page.write_text(BLOCK.sub(lambda found: rewritten(found, name, figures), page.read_text()))


def rewritten(found: re.Match[str], name: str, figures: dict[str, Any]) -> str:
    """Return a block as its figures give it, with its marks; one of another name as it is."""
    if found[1] != name:
        return found[0]
    mark = found[0].partition("\n")[0]
    return f"{mark}\n{text_of(figures, named(found[2]))}{END}"


def named(tables: str | None) -> tuple[str, ...]:
    """Return the names of tables in a mark."""
    return tuple(re.findall(r"\w+", tables or ""))


def run(root: Path, name: str) -> Path:
    """Run a benchmark; return the file that it wrote."""
    path = root / FRESH / f"{name}.json"
    path.unlink(missing_ok=True)
    program, *options = shlex.split(FIGURES[name])
    command = [sys.executable, f"benchmarks/{program}", *options, "--json", str(path)]
    print(f"{name}: {shlex.join(command)}", file=sys.stderr)
    subprocess.run(command, cwd=root, check=True)
    return path


def table_of_names(root: Path) -> Table:
    """Return what there is: names, commands, pages, days since it was measured, and the commit."""
    rows = []
    for name, line in FIGURES.items():
        pages = {str(block.page.relative_to(root)): None for block in blocks(root) if block.name == name}
        path = root / KEPT / f"{name}.json"
        age = commit = "never"
        if path.exists():
            figures = kept(root, name)
            age = f"{(date.today() - date.fromisoformat(figures['date'])).days} days"
            commit = figures["machine"].get("commit", "not kept")
        rows.append([name, line, ", ".join(pages) or "none", age, commit])
    return Table(["name", "benchmark", "pages", "age", "commit"], rows)


def main() -> int:
    """Return 1 if `--check` finds a block that differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FIGURES))
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"no figures named {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    if options.list:
        print(table_of_names(ROOT))
    elif options.check:
        found = differing(ROOT)
        for block in found:
            print(f"{block.page.relative_to(ROOT)}: {block.name} is not what {KEPT}/{block.name}.json gives")
        return int(bool(found))
    else:
        published = {block.name for block in blocks(ROOT)}
        for name in options.names or [name for name in FIGURES if name in published]:
            publish(ROOT, name, options.source / f"{name}.json" if options.source else run(ROOT, name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
