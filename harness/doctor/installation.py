"""Findings on what is installed: Python, pytest, torch, Lockstep and plugins. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.doctor.finding import MIB, Finding, note, ok, problem

DISTRIBUTION = "lockstep-harness"
OLDEST_PYTHON, OLDEST_PYTEST, OLDEST_TORCH = (3, 11), (9,), (2, 11)
NEWEST_TORCH = (2, 15)
"""The newest version that docs/reference/compatibility.md has a run of."""
TORCH_WITHIN = 60
"""Seconds in which torch must have been imported."""

_ASK_TORCH = """
import json, sys
try:
    import torch, torch.distributed as dist
    answer = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    answer["distributed"] = dist.is_available()
    for name in ("gloo", "nccl", "mpi") if answer["distributed"] else ():
        answer[name] = getattr(dist, f"is_{name}_available")()
    answer["gpus"] = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        answer["gpus"].append({"name": gpu.name, "free": free, "total": gpu.total_memory})
except BaseException as error:  # whatever the import raises, SystemExit too, is the answer
    answer = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(answer))
"""


def start_asking_torch() -> subprocess.Popen[str] | None:
    """Start a process that prints, as JSON, what torch is and its GPUs; return None if torch is missing."""
    if find_spec("torch") is None:
        return None
    return subprocess.Popen(
        [sys.executable, "-c", _ASK_TORCH], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def read_torch(process: subprocess.Popen[str] | None) -> dict[str, Any]:
    """Return what the process has printed: `error` if torch cannot be imported, {} if it is missing."""
    if process is None:
        return {}
    try:
        output, _ = process.communicate(timeout=TORCH_WITHIN)
        answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"`import torch` takes more than {TORCH_WITHIN} s"}
    except (IndexError, ValueError):
        return {"error": f"`import torch` ended the process: exit code {process.returncode}"}
    return answer


def python() -> Finding:
    version = sys.version.split()[0]
    what = f"{sys.implementation.name} {version}, {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        why = f"Lockstep needs Python {_dotted(OLDEST_PYTHON)}"
        return problem("python", what, why, "make an environment with a newer one")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return note("python", f"{what}, without the GIL", "no run of Lockstep without the GIL is known")
    return ok("python", what)


def needed(distribution: str, oldest: tuple[int, ...]) -> Finding:
    """Look at a distribution that Lockstep needs."""
    least = _dotted(oldest)
    remedy = f"{sys.executable} -m pip install '{distribution}>={least}'"
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return problem(distribution, "is not installed", "Lockstep needs it", remedy)
    if version_of(version) < oldest:
        return problem(distribution, version, f"Lockstep needs {least} or a newer one", remedy)
    return ok(distribution, version)


def version_of(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13) of "2.13.0a0+git"."""
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def torch(answer: dict[str, Any]) -> Finding:
    """Look at torch: whether it is there, its version, what it was built with."""
    if not answer:
        remedy = f"{sys.executable} -m pip install torch"
        return problem("torch", "is not installed", "ranks are processes of torch.distributed", remedy)
    if "error" in answer:
        why, remedy = "every rank imports it", "mend its installation: install it again, of one index"
        return problem("torch", answer["error"], why, remedy)
    build = (
        f"CUDA {answer['cuda']}" if answer["cuda"] else f"ROCm {answer['hip']}" if answer["hip"] else "CPU"
    )
    what = f"{answer['version']}, built for {build}"
    if not answer["distributed"]:
        return problem("torch", what, "it was built without torch.distributed", "install another build")
    if version_of(answer["version"]) < OLDEST_TORCH:
        least = _dotted(OLDEST_TORCH)
        why = f"Lockstep needs torch {least} or a newer one"
        return problem("torch", what, why, f"{sys.executable} -m pip install 'torch>={least}'")
    if version_of(answer["version"]) > NEWEST_TORCH:
        why = f"the newest that Lockstep was run with is {_dotted(NEWEST_TORCH)}"
        return note("torch", what, why, "expect surprises")
    return ok("torch", what)


def registration() -> Finding:
    """Look whether pytest will load Lockstep, and where its files are."""
    where = Path(__file__).parents[1]
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        why = "pytest finds plugins by what is installed: the mark `ranks` is unknown"
        remedy = "pip install it, or add -p lockstep to the command or to addopts"
        return problem("lockstep", f"{where} is on the path, and is not installed", why, remedy)
    return ok("lockstep", f"{version}, {where}")


def gpus(answer: dict[str, Any]) -> Iterator[Finding]:
    """Look at the GPUs that torch finds, and at those that it does not."""
    found = answer.get("gpus", [])
    for number, gpu in enumerate(found):
        name, what = f"gpu-{number}", f"{gpu['name']}, {gpu['free'] // MIB} of {gpu['total'] // MIB} MiB free"
        if gpu["free"] < gpu["total"] // 10:
            yield note(name, what, "another process has nearly all of its memory", "end that process")
        else:
            yield ok(name, what)
    if found:
        return
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        variable = os.environ["CUDA_VISIBLE_DEVICES"]
        why = "tests on nccl are skipped, and --device cuda is refused"
        yield note("gpu", f"none: CUDA_VISIBLE_DEVICES={variable!r} hides them", why, "unset it")
    elif answer.get("cuda") is None and Path("/dev/nvidia0").exists():
        why = "torch was built without CUDA: tests on nccl are skipped"
        yield note("gpu", "none for torch, though the machine has one", why, "install torch built for CUDA")
    else:
        yield ok("gpu", "none: tests on ranks run on the CPU")
