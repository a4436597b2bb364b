"""The file of hosts: the hosts of a run, in a file that controllers read and the rendezvous writes.

Runs in controllers; must not import torch.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.wire import Credentials

HOSTS = "LOCKSTEP_HOSTS"
"""The environment variable that names the file."""


@dataclass(frozen=True, slots=True)
class HostInfo:
    """One host of a run. The first one runs pytest."""

    name: str
    address: str
    """Address of the interface that leads to the others."""
    port: int = 0
    """Port of its agent; 0: it has none, as the ranks of the first host start without."""
    cpus: int = 1
    gpus: tuple[str, ...] = ()
    """Names of its GPUs, as CUDA_VISIBLE_DEVICES has them."""
    cwd: str = ""
    """The directory of the project there."""
    prefix: str = ""
    """Folder of Python's installation, or of its environment."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python, torch and harness."""


def this_host(name: str, address: str, port: int, versions: dict[str, str]) -> HostInfo:
    return HostInfo(
        name,
        address,
        port,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        _gpus(),
        os.getcwd(),
        sys.prefix,
        versions,
    )


def _gpus() -> tuple[str, ...]:
    """Return the names of the GPUs; without torch, which takes seconds to import here."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(filter(None, map(str.strip, named.split(","))))
    devices = Path("/proc/driver/nvidia/gpus")
    return tuple(map(str, range(len(list(devices.iterdir()))))) if devices.is_dir() else ()


@dataclass(frozen=True, slots=True)
class HostsFile:
    """The hosts of a run, by number, and what their connections begin with."""

    credentials: Credentials
    hosts: tuple[HostInfo, ...]
    environ: dict[str, str]
    """The environment of the first host before pytest ran; what changes in it, ranks elsewhere get."""
    command: tuple[str, ...] = ()
    """The words before those of pytest in the command that runs a test again on these hosts."""


def write_hosts_file(path: Path, hosts_file: HostsFile) -> None:
    """Write the file, for its owner alone, in one step."""
    content = {
        "secret": hosts_file.credentials.secret.hex(),
        "run": hosts_file.credentials.run.hex(),
        "hosts": [asdict(host) for host in hosts_file.hosts],
        "environ": hosts_file.environ,
        "command": hosts_file.command,
    }
    partial = path.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(content, file)
    partial.rename(path)


def read_hosts_file() -> HostsFile | None:
    """Return the hosts of this run; None where it has but one.

    Raises:
        OSError: the file is gone.
        LaunchError: it is no such file.
    """
    if not (path := os.environ.get(HOSTS)):
        return None
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # the open of a FIFO waits for a process that writes
            raise ValueError("it is no regular file")
        return _parse(Path(path).read_text(encoding="utf-8", errors="surrogateescape"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise LaunchError(
            f"{path}, which the variable {HOSTS} names, is no file of hosts ({error}): unset {HOSTS}; "
            f"`python -m lockstep hosts` sets it where it starts pytest"
        ) from None


def _parse(text: str) -> HostsFile:
    content = json.loads(text)
    hosts = tuple(HostInfo(**host | {"gpus": tuple(host["gpus"])}) for host in content["hosts"])
    credentials = Credentials(bytes.fromhex(content["secret"]), bytes.fromhex(content["run"]))
    hosts_file = HostsFile(credentials, hosts, content["environ"], tuple(content["command"]))
    sample = HostInfo("", "")
    pairs: list[tuple[Any, Any]] = [(hosts_file, HostsFile(credentials, (), {}))]
    pairs += [(host, sample) for host in hosts]
    for one, right in pairs:
        for each in fields(right):
            value, kind = getattr(one, each.name), type(getattr(right, each.name))
            if not isinstance(value, kind):
                raise TypeError(f"{each.name} is {value!r}, no {kind.__name__}")
    if not hosts:
        raise ValueError("it names no host")
    return hosts_file
