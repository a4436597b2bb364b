"""Installed pytest plugins that change how tests on ranks run. Standard library only.

docs/reference/plugins.md has what was tried, and the others, of which nothing need be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from harness.doctor.finding import Finding, note, ok

NOTES = {
    "pytest-timeout": "its limit is the deadline of a world",
    "pytest-rerunfailures": "a test is run again on all ranks, in a new world",
    "pytest-xdist": "under -n each worker has worlds of its own: set ranks_at_once where cores are few",
    "pytest-cov": "ranks are measured, and each is slower for it; --no-cov turns it off",
    "pytest-random-order": "shuffles in the controller; ranks have its seed",
    "pytest-pretty": "is left out in ranks; the controller has it",
    "pytest-playwright": "has `--device`: Lockstep's is `--ranks-device`",
}
REFUSED = {
    "pytest-benchmark": (
        "a test on ranks that uses `benchmark` is refused: each rank would choose its own number of rounds",
        "run with --benchmark-disable, which calls the function once",
    ),
    "syrupy": (
        "a test on ranks that uses its `snapshot` is refused: one process writes and counts snapshots",
        "compare with a value, with inline-snapshot, or with pytest-regressions",
    ),
    "inline-snapshot": (
        "snapshots of tests on ranks are compared, and not written",
        "create them in a test without ranks",
    ),
    "pytest-testmon": (
        "what a test on ranks depends on is not recorded reliably",
        "run tests on ranks without --testmon",
    ),
    "pytest-cases": ("3.10.1 does not work with pytest 9.2, with or without Lockstep", "uninstall it"),
    "pytest-monitor": ("1.6.6 does not work with pytest 9.2, with or without Lockstep", "uninstall it"),
}
"""What does not work, and what to do instead."""


def plugins() -> Iterator[Finding]:
    """Look at each installed plugin that is known to change something."""
    count = 0
    for name, version in sorted(_installed().items()):
        count += 1
        if name in REFUSED:
            why, remedy = REFUSED[name]
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
