"""The fixture `golden`: a training run is recorded and held to a text file beside the test. Inside a rank."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import torch

from lockstep.assertions.agreement import gathered
from lockstep.assertions.closeness import TOLERANCES, Tolerance
from lockstep.features.goldens.text import Golden, GoldenEntry, differences
from lockstep.output import write_text
from lockstep.rank.world_fixture import RankWorld
from lockstep.recorders import CollectivesLog, named_tensors
from lockstep.recorders.tensors import flat_bytes, local_part, short

__all__ = ["GoldenRun", "Goldens"]

Line = tuple[str, str]
"""Name and text of a value, or of a collective, on one rank."""


class Goldens:
    """The value of the fixture `golden`: call it to record a run.

    with golden("two_layers") as run:
        for step in range(3):
            ...
            run.record("loss", loss)
            run.record("gradients", named_gradients(model))
            optimizer.step()
        run.record("parameters", named_parameters(model))
    """

    def __init__(self, request: pytest.FixtureRequest, world: RankWorld) -> None:
        self._request = request
        self._world = world
        self._used: set[str] = set()

    def __repr__(self) -> str:
        return "<goldens>"  # the same on every rank, so that equal tracebacks read the same

    def __call__(self, name: str, tolerance: Tolerance | torch.dtype | None = None) -> GoldenRun:
        """Return a context in which collectives, and what it is given, are recorded; all ranks enter it.

        Args:
            name: name of the file, one word: letters, digits, `_`, `.`, `-`.
            tolerance: None compares bit for bit; else a tolerance, or the dtype of the row of `TOLERANCES` to
                use, for the numbers of each line. The collectives must be the same in any case.

        Raises:
            ValueError: the name is no word, or this test has used it already; the tolerance is none.
        """
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise ValueError(f"golden({name!r}): it names a file: use letters, digits, `_`, `.` and `-`")
        if name in self._used:
            raise ValueError(f"golden({name!r}): this test has used the name already; give each run its own")
        if not (tolerance is None or isinstance(tolerance, Tolerance) or tolerance in [*TOLERANCES]):
            known = ", ".join(map(str, TOLERANCES))
            raise ValueError(f"golden(tolerance={tolerance!r}): write a Tolerance, or one of {known}")
        self._used.add(name)
        test = Path(self._request.path)
        file = f"{name}-{self._world.size}-{re.sub(r'[^a-z]+', '-', self._world.backend)}.txt"
        return GoldenRun(self, test.parent / "goldens" / test.stem / file, tolerance)

    def finish(self, run: GoldenRun, values: list[Line], collectives: list[Line]) -> None:
        """Compare a run with its golden, or write that under `--update-goldens`; on all ranks together.

        Raises:
            AssertionError: on every rank with the same message: there is no golden, or it differs.
        """
        __tracebackhide__ = True
        of_ranks = gathered((values, collectives))
        now = Golden(
            self._request.node.nodeid.rpartition("/")[2],
            _made_by(self._world.backend),
            _merged([of_rank[0] for of_rank in of_ranks.values()]),
            _merged_sequences([of_rank[1] for of_rank in of_ranks.values()]),
        )
        updates = bool(self._request.config.getoption("update_goldens"))
        self._request.node.user_properties.append(("golden", str(run.path)))
        done = ""
        if self._world.rank == 0:  # one rank reads and writes, so that all say the same
            try:
                done = self._write(run.path, now) if updates else self._compare(run, now)
            except OSError as error:  # the other ranks wait for the answer of this one
                done = f"the golden {run.path} cannot be read or written: {error}"
        if done := gathered(done)[0]:
            raise AssertionError(done)

    def _write(self, path: Path, now: Golden) -> str:
        # Another test of this run may have written it: its mark is in the directory that tests share.
        base = self._world.shared_tmp_path.parents[1]
        if base.name == f"popen-{os.environ.get('PYTEST_XDIST_WORKER')}":
            base = base.parent  # that of a worker of pytest-xdist is below the one of the run
        mark = base / "goldens" / hashlib.sha256(str(path).encode()).hexdigest()[:16]
        if (other := _leave_mark(mark, now.test)) != now.test:
            return f"two tests use the golden {path.name}: {other} and {now.test}; rename one"
        text = now.render()
        if not path.exists() or _without_maker(_read(path)) != _without_maker(text):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
            self._request.node.user_properties.append(("golden-written", str(path)))
        return ""

    def _compare(self, run: GoldenRun, now: Golden) -> str:
        command = f"pytest {self._request.node.nodeid} --update-goldens"
        where = os.path.relpath(run.path, self._request.config.invocation_params.dir)
        if not run.path.exists():
            return f"there is no golden {where}: write it with: {command}"
        try:
            golden = Golden.parse(_read(run.path))
        except ValueError as error:
            return f"the golden {where} cannot be read: {error}; write it again with: {command}"
        if golden.test != now.test:
            return (
                f"the golden {where} is that of {golden.test}: give this test's another name, or: {command}"
            )
        found = differences(golden, now, run.bounds)
        if not found:
            return ""
        advice = f"if the change is meant, write it again with: {command}"
        if golden.made_by != now.made_by and run.bounds is None:
            advice = f"bits differ between versions and CPUs: pass tolerance=torch.float32; or, {advice}"
        return "\n".join([f"this run differs from {where}", *found, advice])


class GoldenRun:
    """A run that is recorded.

    Attributes:
        path: path of its golden.
        bounds: bounds of the comparison; None is bit for bit.
    """

    def __init__(self, goldens: Goldens, path: Path, tolerance: Tolerance | torch.dtype | None) -> None:
        self.path = path
        self.bounds = TOLERANCES[tolerance] if isinstance(tolerance, torch.dtype) else tolerance
        self._goldens = goldens
        self._log = CollectivesLog()
        self._values: list[Line] = []
        self._counts: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<run held to {self.path.name}>"

    def __enter__(self) -> Self:
        self._log.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self._log.__exit__(kind, error, traceback)
        if error is None:
            collectives = [(entry.op, _of_collective(entry)) for entry in self._log]
            self._goldens.finish(self, self._values, collectives)

    def record(self, name: str, value: Any) -> None:
        """Record a tensor, a number, or tensors in mappings and sequences; None has no line.

        Of a DTensor the local part is recorded. What is recorded under one name more than once is numbered.
        """
        number = self._counts[name] = self._counts.get(name, -1) + 1
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float64)
        tensors = named_tensors(value if not isinstance(value, Mapping) else dict(value))
        if not tensors:
            raise TypeError(f"golden: {name} holds no tensor and no number: {value!r}")
        for path, tensor in tensors.items():
            self._values.append((f"{name} {number}{f': {path}' if path else ''}", describe(tensor)))


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape, numbers that stand for the values, and a digest of the bits."""
    local = local_part(tensor).detach().cpu().contiguous()
    head = f"{short(local.dtype)} {list(local.shape)}"
    if not local.dim() and not local.is_complex():
        digits = 17 if local.dtype == torch.float64 else 9
        value = local.item()
        return f"{head} value {value:.{digits}g}" if isinstance(value, float) else f"{head} value {value}"
    bits = hashlib.sha256(flat_bytes(local).numpy().tobytes()).hexdigest()[:12]
    if local.is_complex():
        local = torch.view_as_real(local)
    flat = local.reshape(-1).double()
    # Weights that differ from place to place, so that two elements that change places change the sum.
    weights = (torch.arange(flat.numel(), dtype=torch.float64) * 0.6180339887498949).frac()
    norm, total, mix = float(flat.norm()), float(flat.sum()), float((flat * weights).sum())
    return f"{head} norm {norm:.9g} sum {total:.9g} mix {mix:.9g} bits {bits}"


def _of_collective(entry: Any) -> str:
    shapes = zip(entry.dtypes, entry.shapes, strict=True)
    inputs = ", ".join(f"{short(dtype)}{list(shape)}" for dtype, shape in shapes)
    phase = "backward" if entry.in_backward else "forward"
    return " ".join(filter(None, (inputs, f"{entry.group_size} ranks", phase, entry.label)))


def _merged(of_ranks: list[list[Line]]) -> tuple[GoldenEntry, ...]:
    """Return one line for what is the same on all ranks, else one for each rank, in the order of rank 0."""
    by_name: dict[str, dict[int, str]] = {}
    for rank, lines in enumerate(of_ranks):
        for name, text in lines:
            by_name.setdefault(name, {})[rank] = text
    found: list[GoldenEntry] = []
    for name, texts in by_name.items():
        if len(texts) == len(of_ranks) and len(set(texts.values())) == 1:
            found.append(GoldenEntry(name, "all", texts[0]))
        else:
            found += [GoldenEntry(name, f"rank {rank}", text) for rank, text in texts.items()]
    return tuple(found)


def _merged_sequences(of_ranks: list[list[Line]]) -> tuple[GoldenEntry, ...]:
    """Return one sequence if all ranks have the same, else that of each rank."""
    if all(lines == of_ranks[0] for lines in of_ranks):
        return tuple(GoldenEntry(name, "all", text) for name, text in of_ranks[0])
    return tuple(
        GoldenEntry(name, f"rank {rank}", text) for rank, lines in enumerate(of_ranks) for name, text in lines
    )


def _made_by(backend: str) -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {platform.machine()} {capability}, {backend}"


def _leave_mark(mark: Path, test: str) -> str:
    """Return which test was the first to leave its name in a file; another process may be first."""
    mark.parent.mkdir(exist_ok=True)
    part = mark.with_name(f"{mark.name}-{os.getpid()}")
    write_text(part, test)
    with contextlib.suppress(FileExistsError):
        mark.hardlink_to(part)
    part.unlink()
    return _read(mark)


def _read(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):  # the open of a FIFO waits for a process that writes
        raise OSError("it is no regular file")
    return path.read_text(encoding="utf-8", errors="backslashreplace")


def _without_maker(text: str) -> str:
    """Return a golden without its second line: one that is the same otherwise stays as it is."""
    lines = text.splitlines()
    return "\n".join([*lines[:1], *lines[2:]])
