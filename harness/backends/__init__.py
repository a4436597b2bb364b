"""Backends of torch.distributed that worlds can use, by name: `gloo`, or `cpu:gloo,cuda:nccl`.

Used on both sides at collection; must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.backends.backend import Backend
from lockstep.backends.fake import Fake
from lockstep.backends.gloo import Gloo
from lockstep.backends.nccl import Nccl
from lockstep.backends.shm import Shm

BACKENDS: Mapping[str, Backend] = {each.name: each for each in (Gloo(), Nccl(), Shm(), Fake())}
"""The backends of torch.distributed that worlds can use."""

BROKEN_CONNECTION = re.compile(
    "|".join(each.broken_connection for each in BACKENDS.values() if each.broken_connection),
    re.DOTALL | re.IGNORECASE,
)
"""Matches what a collective raises on a rank when another rank has closed its connection, or has ended."""

_FORM = "write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"


def backends_of(text: str) -> dict[str, str]:
    """Return the backend of each device that a name means: of `gloo`, gloo for each device that it serves."""
    if ":" not in text:
        return dict.fromkeys(BACKENDS[text].devices, text)
    return dict(part.split(":") for part in text.split(","))


def objects_of(text: str) -> list[Backend]:
    """Return the backends that a name means, each once."""
    return [BACKENDS[name] for name in dict.fromkeys(backends_of(text).values())]


def takes_devices(text: str) -> bool:
    """Return whether each rank needs an accelerator of its own."""
    return any(backend.takes_devices for backend in objects_of(text))


def devices_of(text: str) -> tuple[str, ...]:
    """Return the devices that a rank's tensors can be on, the default first.

    With a part for cuda they are there: the part for cpu serves what the test keeps on the CPU beside.
    """
    devices = tuple(backends_of(text))
    return devices if ":" not in text else ("cuda" if "cuda" in devices else "cpu",)


def check_backend(text: object) -> None:
    """Raise ValueError unless `text` names a backend that worlds can use; the message says what to write."""
    if not isinstance(text, str) or (":" not in text and text not in BACKENDS):
        raise ValueError(f"unknown backend {text!r}; there are {', '.join(BACKENDS)}")
    if ":" not in text:
        return
    seen: set[str] = set()
    for part in text.split(","):
        device, _, name = part.partition(":")
        if not device or not name or ":" in name or part != part.strip():
            raise ValueError(f"backend {text!r}: {_FORM}")
        if name not in BACKENDS:
            raise ValueError(f"backend {text!r}: unknown backend {name!r}; there are {', '.join(BACKENDS)}")
        if name == "fake":
            raise ValueError(f"backend {text!r}: a fake world has no other backend: write 'fake'")
        if device not in BACKENDS[name].devices:
            works = " and ".join(BACKENDS[name].devices)
            raise ValueError(f"backend {text!r}: {name} works on {works}, not on {device!r}")
        if device in seen:
            raise ValueError(f"backend {text!r}: names {device} twice")
        seen.add(device)
