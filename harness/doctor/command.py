"""`python -m lockstep doctor`: its arguments, its report and its exit status.

Must not import torch, nor pytest: it reports that they are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from lockstep.doctor import installation, machine
from lockstep.doctor.configuration import (
    Configuration,
    adoption,
    configuration,
    configured,
    start_method,
)
from lockstep.doctor.finding import Finding, problem
from lockstep.doctor.plugins import plugins
from lockstep.doctor.trial import Trial

FINE, WILL_NOT_WORK, WRONG_USAGE = 0, 1, 2
"""Exit status: no problem; at least one; arguments that it does not know."""
_SIGNS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what works on this machine, what does not, and what to do",
        description="Look at versions, plugins and limits of the machine, and run a test on two ranks of each"
        " backend, with the pytest configuration of this directory. Exit status: 0 if nothing is wrong, 1 if"
        " something will not work.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--no-trial", action="store_true", help="start no ranks, only look")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, others: Sequence[str]) -> int:
    if others:
        sys.stderr.write(f"python -m lockstep doctor: unknown arguments: {' '.join(others)}\n")
        return WRONG_USAGE
    findings = []
    for finding in _findings(not options.no_trial):
        findings.append(finding)
        if not options.json:
            sys.stdout.write(_text(finding))
            sys.stdout.flush()
    problems = [each for each in findings if each.level == "problem"]
    if options.json:
        content = {"status": WILL_NOT_WORK if problems else FINE, "findings": list(map(asdict, findings))}
        sys.stdout.write(json.dumps(content, indent=1) + "\n")
    else:
        notes = sum(each.level == "note" for each in findings)
        found = ", ".join(each.name for each in problems)
        sys.stdout.write(f"\nproblems: {found or 'none'}; notes: {notes}\n")
    return WILL_NOT_WORK if problems else FINE


def _findings(tries: bool) -> Iterator[Finding]:
    """Yield all findings. Torch is imported, and backends are tried, while the rest is looked at."""
    with ExitStack() as stack:
        asking = installation.start_asking_torch()
        if asking is not None:
            stack.callback(asking.communicate)
            stack.callback(asking.kill)
        project, has_pytest = configuration(Path.cwd()), find_spec("pytest") is not None
        registered = installation.registration()
        trial: Trial | Finding | None = None
        if tries and has_pytest and asking is not None:
            trial = _start(stack, project, registered.level == "ok")
        yield from (machine.system(), installation.python(), registered)
        yield installation.needed("pytest", installation.OLDEST_PYTEST)
        yield installation.needed("numpy", (1,))
        yield from plugins()
        yield from configured(project)
        yield start_method(project)
        yield adoption(project)
        yield from machine.environment()
        yield from machine.temporary_directory()
        yield machine.compiler()
        if has_pytest:
            yield machine.open_files()
            yield from machine.leases()
        yield from (machine.processes(), machine.processors(), machine.memory(), machine.shared_memory())
        yield from machine.kernel()
        yield machine.loopback()
        answer = installation.read_torch(asking)
        yield installation.torch(answer)
        yield from installation.gpus(answer)
        if isinstance(trial, Trial):
            yield from trial.findings()
        elif trial is not None:
            yield trial


def _start(stack: ExitStack, project: Configuration, is_loaded: bool) -> Trial | Finding:
    """Start the trial; return a problem where even that cannot be."""
    is_loaded = is_loaded and "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
    try:
        return stack.enter_context(Trial(project, None if is_loaded else "lockstep"))
    except OSError as error:
        return problem("trial", f"cannot start pytest: {error}", "no test can run", "mend what it says")


def _text(finding: Finding) -> str:
    what = finding.what.replace("\n", "\n" + " " * 10)
    lines = [f"{_SIGNS[finding.level]}  {finding.name}: {what}\n"]
    if finding.why:
        lines.append(f"{'':9}why: {finding.why}\n")
    if finding.remedy:
        lines.append(f"{'':9}do:  {finding.remedy}\n")
    return "".join(lines)
