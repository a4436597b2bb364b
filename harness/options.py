"""The command-line and ini options of tests on ranks. Used on both sides; must not import torch."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import pytest

DEFAULTS: Mapping[str, Any] = {
    "ranks_backend": None,
    "ranks_device": None,
    "world_seed": 0,
    "world_timeout": 60.0,
    "fresh_worlds": False,
    "check_collectives": False,
}
"""Options that change how a test runs: the command that runs it again repeats those with another value."""

Options = Mapping[str, Mapping[str, Any]]
"""Attributes of options by name, without dashes in front."""

SHORT: Options = {
    "backend": {
        "help": "backend of torch.distributed, gloo, nccl, shm or fake, or one for each device, such as "
        "cpu:gloo,cuda:nccl, for tests whose mark names none",
    },
    "device": {
        "metavar": "TYPE",
        "help": "device of the ranks: cpu, cuda or another accelerator (default: cpu, cuda under nccl)",
    },
}
"""Options whose names many projects have, and keep: ours are `--ranks-backend`, `--ranks-device`, ... too."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's."""
    group = parser.getgroup("ranks", "tests on several ranks (marker `ranks`)")
    add_long_names(parser, SHORT)
    group.addoption(
        "--world-timeout",
        type=float,
        default=DEFAULTS["world_timeout"],
        metavar="SECONDS",
        help="deadline of a test on ranks, set-up and tear-down included, and of each example of a property "
        "(default: %(default)s)",
    )
    group.addoption(
        "--world-seed", type=int, default=DEFAULTS["world_seed"], help="seed of ranks (default: %(default)s)"
    )
    group.addoption(
        "--check-collectives",
        action="store_true",
        help="after each test compare the collectives of all ranks (operation, dtypes, sizes): a mismatch "
        "fails it, even one that raised no error",
    )
    group.addoption("--fresh-worlds", action="store_true", help="start new processes for every test on ranks")
    group.addoption(
        "--rank-output",
        choices=("failed", "all", "none"),
        default="failed",
        help="whose captured output a failure shows: that of the ranks that caused it, of all, of none "
        "(default: %(default)s)",
    )
    group.addoption(
        "--rank-output-dir",
        metavar="DIR",
        help="keep everything that ranks print, in full, in DIR/<test>/rank-N.stdout, .stderr and .log; "
        "of a rank that died or hung also .output: what was written outside of pytest's capture",
    )
    group.addoption(
        "--subtest",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="run only the cases of run_subtests with these settings; exit status 5 if no test that was "
        "selected has one",
    )
    parser.addini(
        "ranks_preload",
        "modules that the server imports once for all ranks, in addition to torch",
        "args",
        default=[],
    )
    parser.addini("ranks_start_method", "how rank processes start: forkserver or spawn", default="forkserver")
    parser.addini(
        "ranks_leaks",
        "what happens to a test that leaves something behind in its rank: warn, error (at tear-down) or off",
        default="warn",
    )


def add_long_names(parser: pytest.Parser, options: Options) -> None:
    """Add `--ranks-backend` for "backend", and so on: names that no other plugin has."""
    group = parser.getgroup("ranks")
    for name, attributes in options.items():
        attributes = {**attributes, "help": f"--{name} where another plugin has that"}
        group.addoption(f"--ranks-{name}", dest=f"ranks_{name}".replace("-", "_"), **attributes)


def add_short_options(parser: pytest.Parser, options: Options, taken: Container[str]) -> None:
    """Add `--backend` for "backend", and so on, unless a conftest or another plugin has taken that name."""
    group = parser.getgroup("ranks")
    for name, attributes in options.items():
        if f"--{name}" not in taken:
            group.addoption(f"--{name}", dest=f"ranks_{name}".replace("-", "_"), **attributes)


def default_backend(config: pytest.Config) -> str:
    """Return the backend of items that name none: `--backend`, else what suits `--device`."""
    backend: str | None = config.getoption("ranks_backend")
    if backend is not None:
        return backend
    from lockstep.backends.device import CPU, Device  # of runs that have tests on ranks

    device: str | None = config.getoption("ranks_device")
    return Device(CPU if device is None else device).default_backend
