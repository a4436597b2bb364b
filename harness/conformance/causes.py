"""Broken cases grouped by their cause, the most frequent first. Controller; must not import torch."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath

from harness.conformance.registry import DEFAULT
from harness.conformance.table import Case, Claim, Outcome, Table
from lockstep.names import package


@dataclass(frozen=True)
class Cause:
    """A failure that broken cases of one engine have in common.

    Attributes:
        where: the deepest line of the user's code, "file.py:12"; "" if the text names none.
        what: the exception's type and its message, without numbers and ids.
        broken: each claim with those of its cases.
    """

    engine: str
    where: str
    what: str
    broken: tuple[tuple[Claim, Case], ...]

    @property
    def claims(self) -> dict[str, list[str]]:
        """The names of the cases, by claim; none for a test without subtests."""
        found: dict[str, list[str]] = {}
        for claim, case in self.broken:
            found.setdefault(claim.id, []).extend([case.name] if case.name else [])
        return found

    @property
    def rerun(self) -> str:
        """The line that runs the first of the cases again."""
        claim, case = self.broken[0]
        printed = [line for line in case.text.splitlines() if line.startswith("pytest ")]
        if printed:
            return printed[-1]
        engine = [] if self.engine == DEFAULT else ["--engine", self.engine]
        return shlex.join(["pytest", claim.id, "-p", f"{package()}.conformance.plugin", *engine])


def causes(table: Table) -> list[Cause]:
    """Return the causes of all broken cases: of each engine those of most cases first."""
    found: dict[tuple[str, str, str], list[tuple[Claim, Case]]] = {}
    for engine in table.engines:
        for claim in table.claims.values():
            for case in table.cell(claim, engine).having(Outcome.BROKEN):
                found.setdefault((engine, *_cause_of(case)), []).append((claim, case))
    order = {engine: number for number, engine in enumerate(table.engines)}
    return sorted(
        (Cause(*key, tuple(broken)) for key, broken in found.items()),
        key=lambda cause: (order[cause.engine], -len(cause.broken)),
    )


def brief(case: Case) -> str:
    """Return the line of a failure that says most: pytest's first line of the error."""
    lines = [line for line in case.text.splitlines() if line.strip()]
    errors = (line.removeprefix("E").strip() for line in lines if line.startswith("E  "))
    return next(errors, lines[0] if lines else "")


# A line of pytest's traceback: "path.py:12: AssertionError", "path.py:12: in function", "path.py:12: ".
_PLACE = re.compile(r"^(?P<file>[^\s:]+\.py):(?P<line>\d+): ?(?P<type>[\w.]*)", re.MULTILINE)
# Between the tracebacks of two ranks, and around the end.
_RANK = re.compile(r"^-{5,} .*$", re.MULTILINE)
_ID_OR_NUMBER = re.compile(
    r"(?P<id>0x[0-9a-f]+|\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{12,}\b)|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
)
LONGEST_MESSAGE = 200


def _cause_of(case: Case) -> tuple[str, str]:
    """Return where a case failed, and with what."""
    first, *_ = _RANK.split(case.text)  # of the rank that is to blame
    places = list(_PLACE.finditer(first)) or list(_PLACE.finditer(case.text))
    own = [place for place in places if not _is_foreign(place["file"])]
    where = f"{own[-1]['file']}:{own[-1]['line']}" if own else ""
    message = brief(case)
    kind = places[-1]["type"] if places else ""
    if kind not in ("", "in") and kind not in message:  # pytest leaves out that of a bare assert
        message = f"{kind}: {message}"
    message = _ID_OR_NUMBER.sub(lambda found: "ID" if found["id"] else "N", message)
    return where, message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]} ..."


def _is_foreign(file: str) -> bool:
    """Return whether a file is of an installed package, of Python, or of this one but its engine."""
    parts = PurePath(file).parts
    is_ours = "harness" in parts[:-1] and package() == "harness"  # else the project has such a folder
    room = parts[parts.index("harness") + 1] if is_ours else "engine"
    return bool({"site-packages", "dist-packages"} & {*parts}) or "/lib/python" in file or room != "engine"
