"""The moments of a rank in a sweep, without ranks: recorded, and met by a fault of each kind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import InjectedFault
from lockstep.features.injection.calls import INTERCEPTION
from lockstep.features.sweep import striker as strikers
from lockstep.features.sweep.points import Point, Spot
from lockstep.features.sweep.striker import Recording, Striker
from suites.selftest.project import wait_for


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Processes that a fault has killed, with the signals."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(strikers.os, "kill", lambda pid, number: found.append((pid, number)))
    return found


@pytest.fixture
def striker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "d").mkdir()
    monkeypatch.setattr(strikers, "caller", lambda: "x.py:1")
    made = Striker(1, (str(tmp_path / "d"),))
    made.lag = 0.01
    return made


def collective(group: str = "g", nbytes: int = 8) -> Any:
    return SimpleNamespace(
        group=SimpleNamespace(group_name=group),
        about=SimpleNamespace(op="all_reduce", nbytes=nbytes),
        phase=lambda: " (backward)",
        written="written",
        read="read",
    )


def run(striker: Any, call: Any) -> Any:
    return striker._run(call, lambda *given: given)


def test_moments_are_recorded_in_their_order(
    striker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "d" / "sub" / "a")
    (tmp_path / "d" / "old").write_text("old")
    with striker.records() as recording:
        assert run(striker, collective()) == ("written", "read")
        (tmp_path / "d" / "sub").mkdir()
        Path(path).write_text("x")
        striker.before("write", path)
        striker.after("write", path, "")
        monkeypatch.setattr(strikers, "caller", lambda: strikers.NO_CODE)
        striker.before("rename", "/elsewhere/b")
        striker.after("rename", "/elsewhere/b", f"{path}.new")
        run(striker, collective(nbytes=0))
        Path(path).write_text("longer")
    assert run(striker, collective()) == ("written", "read")
    striker.before("write", path)
    assert recording.spots == [
        Spot(1, "collective", 1, 0, "all_reduce of 8 B (backward) at x.py:1"),
        Spot(1, "write", 1, 1, "write of sub/a at x.py:1"),
        Spot(1, "rename", 1, 2, "rename of b; after write of sub/a"),
        Spot(1, "collective", 2, 3, "all_reduce (backward); after rename of b; after write of sub/a"),
        Spot(1, "end", 1, 4, "the end; after rename of b; after write of sub/a"),
    ]
    assert recording.groups == ["g", "", "", "g", ""]
    assert recording.appeared == {1: frozenset({path}), 4: frozenset({path})}
    assert recording.touched == {path, "/elsewhere/b", f"{path}.new"}
    assert recording.threads == {"g": {threading.get_ident()}}
    assert recording.contents.keys() == {str(tmp_path / "d" / "old"), path}
    assert 0.0 < recording.seconds_of_looks < 60.0
    with striker.records() as again:
        striker.before("write", path)
    assert again.spots[0] == Spot(1, "write", 1, 0, "write of sub/a")


def test_moments_of_two_threads_that_use_one_group_are_marked() -> None:
    spots = [Spot(0, "collective", number, number, "") for number in (1, 2, 3)]
    recording = Recording(spots, ["g", "h", ""], {"g": {1, 2}, "h": {1}})
    assert recording.contended() == (replace(spots[0], is_contended=True), spots[1], spots[2])


def strike(striker: Any, point: Point, path: str = "", half: Callable[[], object] = lambda: None) -> None:
    with striker.strikes(point, "/no/journal"):
        if path:
            striker.before(point.op, path, half)
        else:
            run(striker, collective())


@pytest.mark.parametrize(
    ("kind", "halves", "victims"), [("kill", 0, [0]), ("torn", 1, [0]), ("all", 0, [7, 8, 0])]
)
def test_a_point_kills_its_rank_or_all(
    striker: Any, killed: list[tuple[int, int]], kind: Any, halves: int, victims: list[int]
) -> None:
    half: list[None] = []
    striker.processes = (7, os.getpid(), 8)
    strike(striker, Point(kind, 1, "write", 1), "/x", lambda: half.append(None))
    assert len(half) == halves
    assert killed == [(victim or os.getpid(), signal.SIGKILL) for victim in victims]
    assert striker.has_struck


@pytest.mark.parametrize(
    "point",
    [
        Point("kill", 0, "write", 1),
        Point("kill", 1, "open", 1),
        Point("kill", 1, "write", 2),
        Point("kill", 1, "collective", 2),
    ],
    ids=str,
)
def test_another_rank_or_moment_is_left_alone(striker: Any, killed: list[Any], point: Point) -> None:
    striker.has_struck = True
    with striker.strikes(point, "/no/journal"):
        striker.before("write", "/x")
        run(striker, collective())
    striker.before("write", "/x")
    run(striker, collective())
    assert (killed, striker.has_struck) == ([], False)
    with striker.strikes(point, "/no/journal"):
        for _ in range(2):
            striker.before("write", "/x")
            run(striker, collective())
    assert len(killed) == (point.number == 2)


def test_the_end_of_the_function_is_a_moment(striker: Any, killed: list[Any]) -> None:
    with striker.strikes(Point("kill", 1, "end", 1), "/no/journal"):
        assert killed == []
    assert killed == [(os.getpid(), signal.SIGKILL)]
    killed.clear()
    with pytest.raises(ZeroDivisionError), striker.strikes(Point("kill", 1, "end", 1), "/no/journal"):
        _ = 1 / 0
    assert killed == []


def test_a_fault_is_an_exception(striker: Any) -> None:
    half: list[None] = []
    with pytest.raises(OSError, match=r"Input/output error \(injected\)") as raised:
        strike(striker, Point("fail", 1, "write", 1), "/x", lambda: half.append(None))
    assert (raised.value.errno, raised.value.filename, half) == (errno.EIO, "/x", [])
    with pytest.raises(OSError, match=r"No space left on device \(injected\)") as raised:
        strike(striker, Point("full", 1, "write", 1), "/x", lambda: half.append(None))
    assert (raised.value.errno, raised.value.filename, half) == (errno.ENOSPC, "/x", [None])
    with pytest.raises(InjectedFault, match=r"^injected before collective 1$"):
        strike(striker, Point("fail", 1, "collective", 1))
    assert striker.has_struck


def test_a_late_rank_sleeps(striker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(strikers.time, "sleep", slept.append)
    strike(striker, Point("delay", 1, "collective", 1))
    assert (slept, striker.has_struck) == ([striker.lag], True)


def test_a_loss_of_power_has_a_journal(
    striker: Any, killed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Any] = []

    class Journal:
        def __init__(self, path: str) -> None:
            noted.append(path)

        def note(self, *given: str) -> None:
            noted.append(given)

        def close(self) -> None:
            noted.append("close")

    monkeypatch.setattr(strikers, "Journal", Journal)
    striker.processes = (os.getpid(), 7)
    with striker.strikes(Point("power", 1, "end", 1), "/journal"):
        striker.after("rename", "/a", "/b")
    striker.after("rename", "/a", "/b")
    assert noted == ["/journal", ("rename", "/a", "/b"), "close"]
    assert [pid for pid, _ in killed] == [7, os.getpid()]
    with striker.strikes(Point("kill", 1, "end", 2), "/journal"):
        striker.after("rename", "/a", "/b")
    assert len(noted) == 3


def test_what_others_write_is_hidden_for_a_while(
    striker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(strikers.time, "monotonic", lambda: now)
    folder = tmp_path / "d"
    (folder / "sub").mkdir()
    (folder / "sub" / "old").touch()
    striker.lag = 5.0
    with striker.strikes(Point("invisible", 1, "collective", 1), "/no/journal"):
        run(striker, collective())
        assert not striker.has_struck
        for name in ("new", "mine"):
            (folder / name).touch()
        striker.after("rename", "/x", str(folder / "mine"))
        assert not striker.hides(str(folder / "missing"))
        assert not striker.has_struck
        seen = [folder, folder / "sub", folder / "sub" / "old", folder / "mine", folder / "missing"]
        assert [striker.hides(str(each)) for each in seen] == [False] * 5
        assert not striker.has_struck
        assert striker.hides(str(folder / "new"))
        assert striker.has_struck
        assert not striker.hides(str(folder / "missing"))
        assert striker.has_struck
        now += 4.9
        assert striker.hides(str(folder / "new"))
        now = 105.0
        assert not striker.hides(str(folder / "new"))
        now = 100.0
    assert not striker.hides(str(folder / "new"))


@contextlib.contextmanager
def beside(striker: Any, *first: str, then: str) -> Iterator[None]:
    """Run collectives of groups on another thread once one has begun: some, and one again and again."""
    is_over = threading.Event()

    def other() -> None:
        wait_for(lambda: striker._counts["collective"], "the first has begun", 60)
        for group in first:
            run(striker, collective(group))
        while not is_over.wait(0.001):  # a turn for the thread that waits
            run(striker, collective(then))

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60)


def test_another_thread_goes_first(striker: Any) -> None:
    striker.lag = 60.0
    point = Point("order", 1, "collective", 1)
    with striker.strikes(point, "/no/journal"), beside(striker, "h", then="g"):
        run(striker, collective("g"))
        assert striker.has_struck


def test_a_thread_that_does_not_come_is_not_waited_for(striker: Any) -> None:
    striker.lag = 0.05
    point = Point("order", 1, "collective", 1)
    with striker.strikes(point, "/no/journal"), beside(striker, then="h"):
        run(striker, collective("g"))
    assert not striker.has_struck


def test_what_happens_outside_is_passed_on(striker: Any, tmp_path: Path) -> None:
    path = tmp_path / "d" / "x"
    with striker.installed():
        layers = len(INTERCEPTION._layers)
        assert not striker.has_read
        path.write_text("x")
        with striker.records() as recording:
            path.write_text("y")
        assert not striker.has_read
        path.read_text()
        assert striker.has_read
    assert len(INTERCEPTION._layers) == layers - 1
    assert [spot.op for spot in recording.spots] == ["open", "write", "end"]
    path.write_text("z")
    assert len(recording.spots) == 3
