"""Backends of torch.distributed that worlds can use, by name: `gloo`, or `cpu:gloo,cuda:nccl`.

Used on both sides at collection; must not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

NEEDS = {"values": "that a rank receives what the others have sent"}
"""What a test may need of its backend, by the word for it in a mark; each backend names those it lacks."""


@dataclass(frozen=True, slots=True)
class Backend:
    """Facts about a backend that the harness needs before any rank runs.

    Attributes:
        devices: that a rank's tensors can be on, the default first.
        module: the one that registers it with torch.distributed, if that does not know it by itself.
        lacks: words of `NEEDS`.
    """

    devices: tuple[str, ...]
    module: str = ""
    lacks: frozenset[str] = frozenset()


BACKENDS = {
    "gloo": Backend(("cpu", "cuda")),
    "nccl": Backend(("cuda",)),
    "shm": Backend(("cpu",), module="lockstep.shm"),
    "fake": Backend(
        ("cpu", "cuda"), module="torch.testing._internal.distributed.fake_pg", lacks=frozenset({"values"})
    ),
}
"""The backends of torch.distributed that worlds can use."""

_FORM = "write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl"


def backends_of(text: str) -> dict[str, str]:
    """Return the backend of each device that a name means: of `gloo`, gloo for each device that it serves."""
    if ":" not in text:
        return dict.fromkeys(BACKENDS[text].devices, text)
    return dict(part.split(":") for part in text.split(","))


def uses(text: str, backend: str) -> bool:
    """Return whether a name means that backend for any device."""
    return backend in backends_of(text).values()


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
