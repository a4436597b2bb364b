"""The placement of ranks on hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.features.hosts.controller import spread_of
from lockstep.features.hosts.hosts_file import HOSTS, HostInfo, HostsFile, write_hosts_file
from lockstep.features.hosts.wire import Credentials
from lockstep.place import Place

FIRST = HostInfo("a", "127.0.0.1", cpus=4, gpus=("0", "1"))
HOSTS_FILE = HostsFile(Credentials(b"secret", b"run"), (FIRST, replace(FIRST, name="b")), {})


def spread(size: int, on: int | None = None, *, gpus: bool = False, per_host: int | None = None) -> Any:
    return spread_of(size, on, needs_gpus=gpus, per_host=per_host)


@pytest.fixture
def _two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hosts_file(tmp_path / "hosts.json", HOSTS_FILE)
    assert (tmp_path / "hosts.json").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(HOSTS, str(tmp_path / "hosts.json"))


@pytest.mark.usefixtures("_two_hosts")
@pytest.mark.parametrize(
    ("size", "on", "gpus", "per_host", "placed"),
    [
        (2, None, False, None, ()),
        (3, None, False, None, ((0, 2), (1, 1))),
        (3, None, False, 3, ()),
        (5, None, False, None, ((0, 3), (1, 2))),  # more than fit: they share the CPUs evenly
        (3, 2, False, None, ((0, 2), (1, 1))),
        (4, 2, True, None, ((0, 2), (1, 2))),
        (1, 1, False, None, ()),
        (5, None, True, None, "5 ranks need a GPU each, the hosts of this run have 2, 2"),
        (3, 3, False, None, "the test needs 3 hosts, this run has 2"),
    ],
)
def test_ranks_fill_hosts_or_are_spread_evenly(
    size: int, on: int | None, gpus: bool, per_host: int | None, placed: object
) -> None:
    assert spread(size, on, gpus=gpus, per_host=per_host) == placed


def test_a_run_on_one_host_has_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOSTS, raising=False)
    assert spread(2, 2) == "the test needs 2 hosts, this run has 1"
    assert spread(2) == ()


def test_the_first_host_on_which_all_fit_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (replace(FIRST, gpus=()), replace(FIRST, cpus=8, gpus=()))
    write_hosts_file(tmp_path / "hosts.json", replace(HOSTS_FILE, hosts=hosts))
    monkeypatch.setenv(HOSTS, str(tmp_path / "hosts.json"))
    assert spread(6) == ((1, 6),)


def test_directories_of_the_first_host_stand_for_those_of_another() -> None:
    place = Place(1, ("a", "b"), 1, 0, 1, "", "", moved=(("/home/me/work", "/w"),))
    assert place.path("/home/me/work/test_x.py") == "/w/test_x.py"
    assert place.path("/home/me/work") == "/w"
    assert place.path("/home/me/workshop/test_x.py") == "/home/me/workshop/test_x.py"
