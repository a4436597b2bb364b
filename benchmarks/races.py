"""Races planted in the engine, one by one: how often plain runs notice each, and how often skewed ones do.

    python benchmarks/races.py [NAME ...] [--json FILE]

Each race is an edit of a copy of the engine; the trainings of `suites/selftest/projects/races` run on it,
twenty times undisturbed and under twenty seeds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from figures import Table, describe_machine, write_json

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "suites" / "selftest" / "projects" / "races"
TRIES = 20


@dataclass(frozen=True)
class Race:
    """Edits of files of the engine, `{file: [(before, after), ...]}`, and the training that comes by them."""

    edits: dict[str, list[tuple[str, str]]]
    training: str = "FULL_SHARD"


def in_collectives(before: str, after: str, training: str = "FULL_SHARD") -> Race:
    return Race({"collectives.py": [(before, after)]}, training)


SCATTER = "return _after(dist.all_to_all_single(received, full, group=axis.group, async_op=True), result)"
STARTED = "work = dist.all_to_all_single(received, full, group=axis.group, async_op=True)"
FINISH = """                if self._after("prefetch"):
                    self._start_all_gather(dtypes)
                self._finish_all_gather()
"""
NOT_AHEAD = """                if self._after("prefetch"):
                    self._start_all_gather(dtypes)
                    self._finish_all_gather()
"""
# What a unit gathers just before it needs it, as nothing had prefetched it, is waited for: no race to win.
OWN = [
    ("            self.group.prefetch(dtypes)\n", "            self.group.unshard(dtypes)\n"),
    ("                group.prefetch(full.dtypes)\n", "                group.unshard(full.dtypes)\n"),
]
HALVED = "    full.div_(before)\n    if usage:\n        usage.set(full)\n    work = dist.all_reduce("
DIVIDED = """    return _after(
        work, lambda: keep(usage if usage and usage.needed else None, (full,), lambda: full.div_(after))
    )
"""
FLAG = """        everyones = collectives.total(found_inf, groups)
        return {found_inf.device: everyones.clamp_(max=1.0)}
"""
LAST = """            dist.broadcast(copy, source, group=group)
"""
FLAT = """        finish = self._start(flat, full.dtypes.gradient, pool)
"""
PACKED = """        self.settle()
        # Where nothing is sharded"""
SETTLE = """        self._settle()
        group.gradients.reduce(full, self._pool)
"""
RACES = {
    "a gather that was prefetched is not waited for": Race(
        {
            "param_group.py": [(FINISH, f"{NOT_AHEAD}                self._arrive = None\n")],
            "unit.py": OWN,
        }
    ),
    "it is waited for one layer later, when its unit reshards": Race(
        {"param_group.py": [(FINISH, NOT_AHEAD)], "unit.py": OWN}
    ),
    "prefetch into a buffer that is still read": Race(
        {
            "param_group.py": [
                (
                    FINISH,
                    f"{FINISH}                self.full.buffer.zero_()\n"
                    "                self._start_all_gather(dtypes)\n",
                )
            ]
        }
    ),
    "the copy that a gather sends is freed before its wait": Race(
        {
            "param_group.py": [
                (
                    "            self._arrive()\n            self._forget_all_gather()\n\n",
                    "            arrive = self._arrive\n            if self.state is GroupState.PREFETCHED:\n"
                    "                self._forget_all_gather()\n            arrive()\n"
                    "            self._forget_all_gather()\n\n",
                )
            ],
            "unit.py": OWN,
        },
        "low_precision",
    ),
    "reduced gradients are read without a wait": in_collectives(SCATTER, f"{STARTED}\n    return result"),
    "their wait has moved behind the optimizer's step": Race(
        {
            "collectives.py": [
                (SCATTER, f"{STARTED}\n    LATE.append(work)\n    return result"),
                ("MEAN = Sum()\n", "MEAN = Sum()\nLATE: list[dist.Work] = []\n"),
                (
                    "def _start_gather(full: Tensor, shard: Tensor, axis: Axis) -> Finish:\n",
                    "def _start_gather(full: Tensor, shard: Tensor, axis: Axis) -> Finish:\n"
                    "    while LATE and not torch._C._current_graph_task_id() + 1:\n"
                    "        LATE.pop().wait()\n",
                ),
            ]
        }
    ),
    "sent gradients are freed one layer later, before their wait": Race(
        {
            "gradients.py": [(FLAT, f"{FLAT}        self.sent = flat\n")],
            "root.py": [
                (
                    SETTLE,
                    "        if self._reducing:\n"
                    "            self._reducing.gradients.sent.untyped_storage().resize_(0)\n"
                    f"{SETTLE}",
                )
            ],
        },
    ),
    "sent gradients are overwritten by the next ones": Race(
        {
            "gradients.py": [(FLAT, f"{FLAT}        pool.give(flat)\n")],
            "root.py": [
                (
                    SETTLE,
                    "        before = self._reducing\n        group.gradients.reduce(full, self._pool)\n"
                    "        if before:\n            before.gradients.settle()\n",
                )
            ],
        },
    ),
    "a gradient is packed before its last contribution, of the other rank": in_collectives(
        "_start_gather(padded, scattered(), axis)()",
        "_start_gather(padded, scattered.__closure__[0].cell_contents(), axis)()",
        "low_replicas",
    ),
    "the all-reduce of replicas is not waited for": in_collectives(
        "    return _after(\n        work, lambda: keep(usage",
        "    return (lambda _, result: result)(\n        work, lambda: keep(usage",
        "NO_SHARD",
    ),
    "the sum of replicas is divided before the all-reduce's wait": Race(
        {
            "collectives.py": [
                (
                    f"    before, after = divide_factors(divisor)\n{HALVED}",
                    f"    before, after = 1, divisor\n{HALVED}",
                ),
                (DIVIDED, "    return lambda: (full.div_(after), work.wait())[0]\n"),
            ]
        },
        "NO_SHARD",
    ),
    "the scaler's flag is read before its all-reduce has ended": Race(
        {
            "grad_scaler.py": [
                (
                    FLAG,
                    "        dist.all_reduce(found_inf, group=next(iter(groups)), async_op=True)\n"
                    "        return {found_inf.device: found_inf}\n",
                )
            ]
        },
    ),
    "of several broadcasts the last alone is waited for": in_collectives(
        LAST,
        "            work = dist.broadcast(copy, source, group=group, async_op=True)\n"
        "            if copy is sent[-1][1]:\n                work.wait()\n",
    ),
}


ENGINES = ("torch-fsdp1", "torch-fsdp2", "torch-ddp")


def run(race: Race | None, training: str) -> list[str]:
    """Return the cells of a row: how many of the runs failed, and what those under skew say."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "harness", path / "lockstep", ignore=ignored)
        shutil.copy(PROJECT / "test_training.py", path)
        (path / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")
        for name, edits in race.edits.items() if race else ():
            file = path / "lockstep" / "engine" / name
            source = file.read_text()
            for before, after in edits:
                assert source.count(before) == 1, before
                source = source.replace(before, after)
            file.write_text(source)
        plain = _pytest(path, f"undisturbed and {training}")
        skewed = _pytest(path, f"skewed and {training}")
    passed = [len(re.findall(r"^PASSED ", text, re.MULTILINE)) for text in (plain, skewed)]
    sections = re.split(r"^_{3,} (?=.*_{3,}$)", skewed, flags=re.MULTILINE)
    named = sum(
        bool(re.match(r"test_skewed.* \[skew=", each)) and "CollectiveRace:" in each for each in sections
    )
    if race is None and passed != [TRIES, TRIES]:
        raise SystemExit(plain + skewed)
    return [str(TRIES - passed[0]), str(TRIES - passed[1]), str(named)]


def _pytest(path: Path, keyword: str) -> str:
    """Return what pytest prints of the tests of a project that match."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--world-timeout=100"]
    return subprocess.run(
        [*command, "-k", keyword],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout


def main() -> None:
    """Print the table of the races and engines with one of these words in their names, of all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of the name of a race or an engine")
    parser.add_argument("--json", type=Path, help="file for the table")
    options, machine = parser.parse_args(), describe_machine()
    trainings: dict[str, tuple[Race | None, str]] = {
        "none": (None, "FULL_SHARD"),
        **{f"none, {engine}": (None, engine) for engine in ENGINES},
        **{name: (race, race.training) for name, race in RACES.items()},
    }
    rows = []
    for name, training in trainings.items():
        if not options.names or any(word in name for word in options.names):
            rows.append([name, *run(*training)])
            print(*rows[-1], sep=" | ", flush=True)
    header = [
        "race",
        f"plain runs that fail, of {TRIES}",
        f"under skew, of {TRIES}",
        "of these, named with its line",
    ]
    table = Table(header, rows)
    print(table)
    print(machine)
    write_json(options.json, machine, {"all": table})


if __name__ == "__main__":
    main()
