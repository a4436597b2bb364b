"""One finding of the doctor. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is, for programs: it does not change between versions of Lockstep.
        level: `problem`: something will not work; `note`: a limit, or something to know; `ok`.
        what: what was found.
        why: why that matters; empty where nothing is wrong.
        remedy: what to do; empty where nothing need be done.
    """

    name: str
    level: Literal["ok", "note", "problem"]
    what: str
    why: str = ""
    remedy: str = ""


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", what)


def note(name: str, what: str, why: str, remedy: str = "") -> Finding:
    return Finding(name, "note", what, why, remedy)


def problem(name: str, what: str, why: str, remedy: str) -> Finding:
    return Finding(name, "problem", what, why, remedy)
