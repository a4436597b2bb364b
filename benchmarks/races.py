"""Races planted in the engine, one by one: how often plain runs notice each, and how often skewed ones do.

    python benchmarks/races.py [NAME ...]

Each race is an edit of a copy of the engine; the trainings of `suites/selftest/projects/races` run on it, ten
times undisturbed and under ten seeds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "suites" / "selftest" / "projects" / "races"


@dataclass(frozen=True)
class Race:
    """An edit of `collectives.py`; `strategy` is the one whose training comes by it."""

    before: str
    after: str
    strategy: str = "FULL_SHARD"


GATHER = "    return _after(work, lambda: full)"
SCATTER = "return _after(dist.all_to_all_single(received, full, group=axis.group, async_op=True), result)"
STARTED = "work = dist.all_to_all_single(received, full, group=axis.group, async_op=True)"
REDUCE = "work = dist.all_reduce(full, group=axis.group, async_op=True)\n"
RACES = {
    "unsharded parameters used before the gather's wait": Race(
        GATHER, "    return lambda: (full.add_(0), work.wait())[0]"
    ),
    "gather started, its handle dropped": Race(GATHER, "    return lambda: full"),
    "shard overwritten while it is gathered": Race(GATHER, f"    shard.data.zero_()\n{GATHER}"),
    "gathered buffer cleared after the gather began": Race(GATHER, f"    full.zero_()\n{GATHER}"),
    "reduced gradients read before the wait": Race(
        SCATTER, f"{STARTED}\n    return lambda: (result(), work.wait())[0]"
    ),
    "reduction started, its handle dropped": Race(SCATTER, f"{STARTED}\n    return result"),
    "sent gradients overwritten too early": Race(
        SCATTER, f"{STARTED}\n    full.zero_()\n    return _after(work, result)"
    ),
    "sent gradients freed too early": Race(
        SCATTER, f"{STARTED}\n    full.untyped_storage().resize_(0)\n    return _after(work, result)"
    ),
    "receive buffer given back to the pool, and filled, too early": Race(
        SCATTER, f"{STARTED}\n    pool.give(received, poison=True)\n    return _after(work, result)"
    ),
    "gradients of replicas divided before the all-reduce's wait": Race(
        REDUCE, REDUCE + "    full.div_(after)\n    after = 1\n", "NO_SHARD"
    ),
    "the scaler's flag and the norm read before their all-reduce ended": Race(
        "dist.all_reduce(values, group=group)", "dist.all_reduce(values, group=group, async_op=True)"
    ),
    "the largest gradient read before its all-gather ended": Race(
        "_all_gather(everyone, values.reshape(-1), group=group)",
        "_all_gather(everyone, values.reshape(-1), group=group, async_op=True)",
    ),
    "parameters of rank 0 read before their broadcast ended": Race(
        "dist.broadcast(copy, source, group=group)",
        "dist.broadcast(copy, source, group=group, async_op=True)",
    ),
}


def run(race: Race | None) -> str:
    """Return a row of the table: how many of the runs failed, and what those under skew say."""
    strategy = race.strategy if race else "FULL_SHARD"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for package in ("harness", "lockstep"):
            shutil.copytree(ROOT / package, path / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(PROJECT / "test_training.py", path)
        (path / "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore::FutureWarning\n")
        if race:
            file = path / "harness" / "engine" / "collectives.py"
            source = file.read_text()
            assert source.count(race.before) == 1, race.before
            file.write_text(source.replace(race.before, race.after))
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", strategy]
        done = subprocess.run(
            [*command, "--world-timeout=60"],
            cwd=path,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=True,
            text=True,
            timeout=600,
        )
    text = done.stdout
    plain = len(re.findall(r"^FAILED \S*test_undisturbed", text, re.MULTILINE))
    skewed = len(re.findall(r"^SUBFAILED\[skew", text, re.MULTILINE))
    sections = re.split(r"^_{3,} (?=.*_{3,}$)", text, flags=re.MULTILINE)
    named = sum(
        bool(re.match(r"test_skewed.* \[skew=", each)) and "CollectiveRace:" in each for each in sections
    )
    if plain + skewed == 0 and "passed" not in text:
        raise SystemExit(text)
    return f"{plain} | {skewed} | {named}"


def main(names: list[str]) -> None:
    """Print the table of these races, of all by default."""
    print("| race | plain runs that fail, of 10 | under skew, of 10 | of these, named with its line |")
    print("|---|---|---|---|")
    if not names:
        print(f"| none | {run(None)} |", flush=True)
    for name, race in RACES.items():
        if not names or name in names:
            print(f"| {name} | {run(race)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
