"""Checks of options that no world can satisfy, before anything is collected.

Runs in the controller; imports torch only where accelerators are requested.
"""

from __future__ import annotations

import pytest

from lockstep.backends import check_backend, devices_of, takes_devices
from lockstep.backends.device import CPU, Device
from lockstep.bounds import SECONDS, SEEDS, are_seconds, shown
from lockstep.subtests import parse_selection

CHOICES = {
    "ranks_start_method": ("forkserver", "spawn"),
    "ranks_leaks": ("warn", "error", "off"),
}
"""The values that ini options take which pytest does not check."""


def output_directory_of(config: pytest.Config) -> str:
    """Return the absolute path that `--rank-output-dir` means, "" if it is not given."""
    path: str | None = config.getoption("rank_output_dir")
    return "" if path is None else str(config.invocation_params.dir / path)


def check_folder(config: pytest.Config, option: str, given: str | None) -> None:
    """Make the folder that an option names, or refuse it.

    Under `pytest -n` none stays, and who writes makes it: workers are given the same arguments, and those
    that exist decide their rootdir. Ranks get that of their controller.
    """
    if given is None or hasattr(config, "workerinput"):
        return
    if given == "":
        raise pytest.UsageError(f"{option} '': write the path of a folder")
    path = config.invocation_params.dir / given
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        if getattr(config.option, "dist", "no") != "no":
            for each in made:
                each.rmdir()
    except OSError as error:
        raise pytest.UsageError(f"{option}: cannot make the folder: {error}") from None


def check_options(config: pytest.Config) -> None:
    """Refuse options that no world can satisfy, before anything is collected.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    _check_device(config)
    if not are_seconds(seconds := config.getoption("world_timeout")):
        raise pytest.UsageError(f"--world-timeout {seconds}: write {SECONDS}")
    if (seed := config.getoption("world_seed")) not in SEEDS:
        raise pytest.UsageError(f"--world-seed {shown(seed)}: write a whole number from -2**63 to 2**64 - 1")
    try:
        parse_selection(config.getoption("subtest"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if output_directory_of(config) and config.getoption("capture", "no") == "no":
        raise pytest.UsageError("--rank-output-dir: with -s no output is captured; remove one of the two")
    check_folder(config, "--rank-output-dir", config.getoption("rank_output_dir"))
    for name, choices in CHOICES.items():
        value = config.getini(name)
        if value not in choices:
            raise pytest.UsageError(f"{name} = {value!r}: choose {', '.join(choices)}")


def _check_device(config: pytest.Config) -> None:
    backend, given = config.getoption("ranks_backend"), config.getoption("ranks_device")
    if backend is not None:
        try:
            check_backend(backend)
        except ValueError as error:
            raise pytest.UsageError(f"--backend: {error}") from None
        if given is not None and given not in devices_of(backend):
            raise pytest.UsageError(f"--backend {backend} does not work with --device {given}")
    of_backend = devices_of(backend)[0] if backend is not None and takes_devices(backend) else CPU
    device = Device(of_backend if given is None else given)
    try:
        backend = backend or device.default_backend
        if not device.is_cpu and device.count() == 0:
            raise ValueError(f"this machine has no {device.unit}; run with --backend gloo --device cpu")
        check_backend(backend)
    except ValueError as error:
        requested = f"--backend {backend}" if given is None else f"--device {given}"
        raise pytest.UsageError(f"{requested}: {error}") from None
