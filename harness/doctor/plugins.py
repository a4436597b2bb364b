"""Installed pytest plugins that change how tests on ranks run. Standard library only.

Sentences are those of docs/reference/plugins.md, which also has the others, of which nothing need be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from lockstep.doctor.finding import Finding, note, ok

NOTES = {
    "pytest-timeout": "its limit is the deadline of the world",
    "pytest-rerunfailures": "flaky, --reruns and its other options run the test again on all ranks",
    "pytest-xdist": "each worker has warm worlds of its own: set ranks_at_once where cores are few",
    "pytest-cov": "lines that ranks run count, and each rank is slower for it: --no-cov turns it off",
    "pytest-random-order": "shuffles in the controller; ranks have its seed",
    "pytest-pretty": "is left out in ranks, and a warning names it; the controller has it",
    "pytest-mpl": "without pytest-xdist it is left out in ranks; the controller has it",
    "pytest-playwright": "has --device: Lockstep's is --ranks-device",
}
LIMITS = {
    "pytest-benchmark": (
        "the fixture benchmark of pytest-benchmark does not work on ranks: "
        "each would choose its own number of rounds",
        "run with --benchmark-disable, which calls the function once",
    ),
    "syrupy": (
        "the fixture snapshot of syrupy does not work on ranks: "
        "its snapshots are written and counted by one process",
        "compare with a value in the test, with inline-snapshot, or with pytest-regressions",
    ),
    "inline-snapshot": (
        "snapshots are compared on each rank, and not written",
        "create them in a test without ranks",
    ),
    "pytest-regressions": (
        "each rank compares what it obtained with the same file, and writes it, "
        "with --force-regen or where it is missing",
        "let one rank check what differs between ranks",
    ),
    "pytest-testmon": (
        "what a test on ranks depends on is not recorded reliably",
        "run those tests without --testmon",
    ),
    "pytest-cases": ("3.10.1 does not work with pytest 9.2, with or without Lockstep", "uninstall it"),
    "pytest-monitor": ("1.6.6 does not work with pytest 9.2, with or without Lockstep", "uninstall it"),
}
"""Limits of each plugin, and what to do instead; a self-test holds both tables to the page."""


def plugins() -> Iterator[Finding]:
    """Look at each installed plugin that is known to change something."""
    count = 0
    for name, version in sorted(_installed().items()):
        count += 1
        if name in LIMITS:
            why, remedy = LIMITS[name]
            yield note(f"plugin-{name}", f"{name} {version}", why, remedy)
        elif name in NOTES:
            yield ok(f"plugin-{name}", f"{name} {version}: {NOTES[name]}")
    yield ok("plugins", f"{count} installed that pytest loads by itself")


def _installed() -> dict[str, str]:
    """Return the versions of distributions with a plugin of pytest, by name, as package indexes write it."""
    found = {}
    for distribution in metadata.distributions():
        if any(entry.group == "pytest11" for entry in distribution.entry_points):
            name = (distribution.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
            found[name] = distribution.version
    found.pop("lockstep-harness", None)
    return found
