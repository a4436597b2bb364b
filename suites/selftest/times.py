"""Write times into docs/contributing.md: `python -m suites.selftest.times [ROOM ...]`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"
ROW = re.compile(r"^\| `(?P<room>\S+)/` \| `pytest (?P<tests>\S+)` \| (?P<time>[^|]+) \|$", re.MULTILINE)


def seconds_of(tests: str) -> int:
    """Return the seconds that tests take, rounded up to a multiple of five."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "pytest", tests, "-q", "-n2", "--dist=loadfile"], check=True)
    return -int(-(time.monotonic() - begun) // 5) * 5


def main(rooms: list[str]) -> None:
    """Write the time of each room, or of those that are named."""
    for row in ROW.finditer(PAGE.read_text()):
        if not rooms or row["room"] in rooms:
            new = row[0].removesuffix(f"{row['time']} |") + f"{seconds_of(row['tests'])} s |"
            PAGE.write_text(PAGE.read_text().replace(row[0], new))


if __name__ == "__main__":
    main(sys.argv[1:])
