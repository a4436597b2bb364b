"""The secret that a user gives is not handed on. That tests do not see it is a test of worlds."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.join_info import SECRET_VARIABLE, JoinInfo, SharedFile, WithoutSecret
from lockstep.features.hosts.launchers import NodePlace
from suites.selftest.hosts.bed import SECRET


def test_a_secret_that_the_user_gives_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it does not help to read the join info, or to leave another one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    place = NodePlace(0, 2, "srun", job="7.0")
    given = WithoutSecret(SharedFile(place), SECRET.encode())
    given.publish(JoinInfo("10.0.0.1", 4000, SECRET.encode()), 0)
    (path,) = tmp_path.rglob("hosts-srun-7.0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == ["10.0.0.1", 4000, ""]
    assert given.find(0).secret == SECRET.encode()
    with pytest.raises(LaunchError, match=f"this host was not: set {SECRET_VARIABLE}, or give --secret-file"):
        WithoutSecret(SharedFile(place), None).find(0)
    path.write_text(JoinInfo("10.0.0.9", 4000, b"the secret of a stranger").pack())
    assert given.find(0).secret == SECRET.encode()
