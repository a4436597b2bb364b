"""Where torch's engines, or torch below another, are known to break claims on CPU ranks. Without torch.

The files next to this one have the deviations, read off runs with torch 2.13 and 2.15.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

__all__ = ["Deviation", "expand", "known_deviations"]


@dataclass(frozen=True)
class Deviation:
    """A strict expected failure: where the engine holds one of these claims after all, the run fails.

    What `since` and `before` name is the first version of torch that was run and differs: PyTorch's engines
    were with 2.13 and 2.15, and not with 2.14.

    Attributes:
        claims: node ids below the folder of suites, without the engine's name: a file, and a pattern of names
            in it. In patterns `*` matches any text, and all else itself.
        why: the reason, in a sentence.
        cases: patterns of cases of `run_subtests`; None if the test fails as a whole.
        issue: number of the issue in pytorch/pytorch.
        since: version of torch, as in "2.15": older engines hold the claims.
        before: version of torch: from it on engines hold them.
        run: whether to try at all, not for a world that hangs, or a claim that is held at times.
    """

    claims: tuple[str, ...]
    why: str
    cases: tuple[str, ...] | None = None
    issue: int | None = None
    since: str | None = None
    before: str | None = None
    run: bool = True

    @property
    def reason(self) -> str:
        """The reason that reports give."""
        return f"{self.why} (pytorch#{self.issue})" if self.issue else self.why

    def is_of(self, torch: str) -> bool:
        """Return whether it is known of this version of torch."""
        release = _release(torch)
        is_over = self.before is not None and release >= _release(self.before)
        return not is_over and (self.since is None or release >= _release(self.since))

    def is_about_case(self, case: str) -> bool:
        """Return whether this case, of a test that is meant, is meant too."""
        return self.cases is not None and _compiled(self.cases).fullmatch(case) is not None


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches each of the patterns. fnmatch would read node ids' brackets as sets."""
    return re.compile("|".join(".*".join(map(re.escape, each.split("*"))) for each in patterns), re.DOTALL)


def expand(*patterns: str) -> tuple[str, ...]:
    """Return each pattern with every choice from its braces, as a shell does: `{a,b}c` is `ac` and `bc`."""
    expanded: list[str] = []
    for pattern in patterns:
        pieces = re.split(r"[{}]", pattern)  # every second one was in braces
        choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
        expanded += map("".join, product(*choices))
    return tuple(expanded)


# Names of tables: file and array.
_DTENSORS = ("shared.nan", "shared.dtensor_norms")
_AMP_SCALER = ("refusals.scalers", "refusals.amp_scaler", "shared.amp_scaler")
_FSDPS = ("shared.fsdps", "shared.scale")
_DDP = ("torch_ddp.own", "shared.scale", *_AMP_SCALER)

# The first that is about a case counts.
_TABLES_OF = {
    "lockstep-composable": (*_DTENSORS, "shared.dtensor_meshes"),
    "torch-ddp": _DDP,
    "torch-fsdp1": (
        *(*_FSDPS, "shared.nan", "torch_fsdp1.core", "wrapper.fsdp1"),
        *("refusals.scalers", "refusals.fsdp1_scaler", "outside.both", "outside.fsdp1"),
        *("torch_fsdp1.scaler", "torch_fsdp1.mixed_precision", "torch_fsdp1.compiled"),
    ),
    "torch-fsdp2": (
        *(*_FSDPS, *_DTENSORS, *_AMP_SCALER, "torch_fsdp2.core", "outside.both", "outside.fsdp2"),
        *("refusals.fsdp2", "torch_fsdp2.replicate", "torch_fsdp2.scaler"),
        *("torch_fsdp2.mixed_precision", "torch_fsdp2.two_d"),
    ),
    "torch-zero1": _DDP,  # its gradients are DDP's; its steps deviate nowhere
}


def _read_tables() -> dict[str, tuple[Deviation, ...]]:
    """Return the deviations of each engine."""
    files = {
        path.stem: tomllib.loads(path.read_text("utf-8")) for path in Path(__file__).parent.glob("*.toml")
    }
    tables = {f"{file}.{name}": entries for file, arrays in files.items() for name, entries in arrays.items()}
    return {
        engine: tuple(_deviation(**entry) for name in names for entry in tables[name])
        for engine, names in _TABLES_OF.items()
    }


def _deviation(claims: list[str], why: str, cases: list[str] | None = None, **others: Any) -> Deviation:
    return Deviation(expand(*claims), why, None if cases is None else expand(*cases), **others)


_TABLES = _read_tables()
_TORCH = importlib.metadata.version("torch")


def known_deviations(engine: str | None, claim: str) -> tuple[Deviation, ...]:
    """Return what is known of `engine`, with the installed torch, and the test of this node id."""
    file, _, name = claim.partition("::")
    known = _known_in(file, engine or "", _TORCH)
    return tuple(deviation for names, deviation in known if names.fullmatch(name))


@cache
def _known_in(file: str, engine: str, torch: str) -> list[tuple[re.Pattern[str], Deviation]]:
    """Return what is known of claims of a file, and of which: each world asks it of all that it collects."""
    known = []
    for deviation in _TABLES.get(engine, ()):
        claims = [claim.split("::", 1) for claim in deviation.claims]
        names = tuple(name for of, name in claims if f"/{file}".endswith(f"/{of}"))
        if names and deviation.is_of(torch):
            known.append((_compiled(names), deviation))
    return known
