"""Backends of torch.distributed that worlds can use, by name: `gloo`, or `cpu:gloo,cuda:nccl`.

Used on both sides at collection; must not import torch, except to look for one that is not listed here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from lockstep.backends.backend import AcceleratorBackend, Backend
from lockstep.backends.device import CPU, accelerator
from lockstep.backends.fake import Fake
from lockstep.backends.gloo import Gloo
from lockstep.backends.nccl import Nccl
from lockstep.backends.shm import Shm

BACKENDS: Mapping[str, Backend] = {each.name: each for each in (Gloo(), Nccl(), Shm(), Fake())}
"""The backends that worlds can use; `backend_named` finds that of another accelerator."""

BROKEN_CONNECTION = re.compile(
    "|".join(each.broken_connection for each in BACKENDS.values() if each.broken_connection),
    re.DOTALL | re.IGNORECASE,
)
"""Matches what a collective raises on a rank when another rank has closed its connection, or has ended."""

_FORM = "write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"


def backend_named(name: object) -> Backend:
    """Return a backend: one of `BACKENDS`, or the default one of this machine's accelerator.

    Raises:
        ValueError: there is no such backend.
    """
    if isinstance(name, str) and name in BACKENDS:
        return BACKENDS[name]
    with contextlib.suppress(ValueError):  # the accelerator has no backend at all
        if name and (device := accelerator()) is not None and device.default_backend == name:
            return AcceleratorBackend(device.default_backend, device.type)
    raise ValueError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")


def backends_of(text: str) -> dict[str, str]:
    """Return the backend of each device that a name means: of `gloo`, gloo for each device that it serves."""
    if ":" not in text:
        return dict.fromkeys(backend_named(text).devices, text)
    return dict(part.split(":") for part in text.split(","))


def objects_of(text: str) -> list[Backend]:
    """Return the backends that a name means, each once."""
    return [backend_named(name) for name in dict.fromkeys(backends_of(text).values())]


def takes_devices(text: str) -> bool:
    """Return whether each rank needs an accelerator of its own."""
    return any(backend.takes_devices for backend in objects_of(text))


def meets(text: str) -> bool:
    """Return whether ranks are processes that meet; else one process stands for any of them."""
    return all(backend.meets for backend in objects_of(text))


def devices_of(text: str) -> tuple[str, ...]:
    """Return the devices that a rank's tensors can be on, the default first.

    With a part for an accelerator they are there: that for cpu serves what the test keeps on the CPU beside.
    """
    devices = tuple(backends_of(text))
    return devices if ":" not in text else (next((each for each in devices if each != CPU), CPU),)


def check_backend(text: object) -> None:
    """Raise ValueError unless `text` names a backend that worlds can use; the message says what to write."""
    if not isinstance(text, str) or ":" not in text:
        backend_named(text)
        return
    seen: set[str] = set()
    for part in text.split(","):
        device, _, name = part.partition(":")
        if not device or not name or ":" in name or part != part.strip():
            raise ValueError(f"backend {text!r}: {_FORM}")
        try:
            backend = backend_named(name)
        except ValueError as error:
            raise ValueError(f"backend {text!r}: {error}") from None
        if not backend.meets:
            raise ValueError(f"backend {text!r}: a {name} world has no other backend: write {name!r}")
        if device not in backend.devices:
            works = " and ".join(backend.devices)
            raise ValueError(f"backend {text!r}: {name} works on {works}, not on {device!r}")
        if device in seen:
            raise ValueError(f"backend {text!r}: names {device} twice")
        seen.add(device)
