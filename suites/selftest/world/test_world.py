"""The controller's handle on a world whose ranks are no processes: started, run, interrupted and ended."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import WorldError
from lockstep.output import OutputDirectory
from lockstep.protocol import Close, Finished, Interrupt, RankStatus, Ready, StartFailed, Warned
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.world import world as module
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome
from lockstep.world.world import CLOSE_WITHIN, START_WITHIN, World

KEY = WorldKey(2, "gloo", "cpu")
DEAD = Died(-9, "its last words", 0.0)
NOT_USABLE = Finished(False, 0, 0)


class Handle:
    """A handle on a rank that is no process: its state is what a test says."""

    def __init__(self, spec: RankSpec, started: Any) -> None:
        self.spec, self.started, self.rank = spec, started, spec.rank
        self.died: Died | None = None
        self.ends = self.lives = True
        self.how: Died | None = None
        self.host = ""
        self.sent: list[Any] = []
        self.awaited: list[float] = []
        self.refuses: OSError | None = None
        self.printed: list[tuple[Path, int]] = []

    def __str__(self) -> str:
        return f"rank {self.rank}"

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def log(self) -> str:
        return f"log of {self.rank}"

    def await_end(self, until: float) -> bool:
        self.awaited.append(until)
        return self.ends

    def how_it_closed(self) -> Died | None:
        return self.how

    def is_alive(self) -> bool:
        return self.lives

    def lost_host(self) -> str:
        return self.host

    def output(self) -> Any:
        return SimpleNamespace(append_to=self.append_to, log=Path(self.spec.path_of("log")))

    def append_to(self, folder: Path, rank: int) -> None:
        if self.refuses:
            raise self.refuses
        self.printed.append((folder, rank))

    def close(self) -> None:
        self.started.calls.append(("close", self.rank))


class Launcher:
    """A launcher that starts nothing and notes what it is asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.calls: list[tuple[Any, ...]] = []
        self.specs: list[RankSpec] = []

    def restore_directory(self) -> None:
        self.calls.append(("restore",))

    def start(self, specs: list[RankSpec], deadline: float) -> list[Any]:
        self.specs = specs
        self.calls.append(("start", deadline))
        return [self.process(spec.rank) for spec in specs]

    def process(self, rank: int) -> Any:
        return SimpleNamespace(rank=rank, calls=self.calls, kill=lambda: self.calls.append(("kill", rank)))

    def forget(self, started: Any) -> None:
        self.calls.append(("forget", started.rank))

    def end_world(self, directory: str) -> None:
        self.calls.append(("end_world", directory))


class Share:
    """A share of the machine that notes what becomes of it."""

    gpus = ("0",)
    held = "/held"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def leave_to_ranks(self) -> None:
        self.calls.append("leave")

    def rest(self) -> bool:
        return True

    def resume(self) -> bool:
        return True

    def end(self) -> None:
        self.calls.append("end")


class Made:
    """A world, with its launcher and what its ranks say as they start, moment by moment."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher = Launcher(path / "launcher")
        self.path = path
        self.share: Share | None = None
        self.now = 100.0
        self.moments: list[list[tuple[int, Any]]] = []
        self.waits: list[float] = []
        self.statuses: dict[int, RankStatus] = {}
        self.asked: list[int] = []
        self.outputs = ""
        self.worlds: list[World] = []
        monkeypatch.setattr(module, "RankHandle", Handle)
        monkeypatch.setattr(module, "receive", self.receive)
        monkeypatch.setattr(module, "request_statuses", self.request_statuses)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def receive(self, handles: Collection[Any], timeout: float) -> list[tuple[int, Any]]:
        self.waits.append(timeout)
        self.now += 1
        return self.moments.pop(0) if self.moments else []

    def request_statuses(self, handles: Collection[Any]) -> dict[int, RankStatus]:
        self.asked = [handle.rank for handle in handles]
        return {rank: self.statuses[rank] for rank in self.asked}

    def world(self) -> World:
        session = SessionSpec((), "/", (), (), {}, {"workerid": "gw5"}, True, self.outputs)
        world = World(KEY, "world-1", session, self.launcher, self.share)  # type: ignore[arg-type]
        self.worlds.append(world)
        return world

    def start(self, timeout: float = 1.0) -> World:
        world = self.world()
        self.moments = self.moments or [[(1, Ready())], [(0, Ready())]]
        world.start(7, ("a",), self.path / "base", timeout)
        return world


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    made = Made(tmp_path, monkeypatch)
    yield made
    for world in made.worlds:
        world.kill()


def handles_of(world: World) -> list[Any]:
    return world._handles


# The start


def test_ranks_start_with_their_specifications_and_are_awaited(made: Made) -> None:
    made.share = Share()
    world = made.start()
    assert (world.key, world.name, world.share) == (KEY, "world-1", made.share)
    directory = f"{made.launcher.directory}/world-1"
    assert os.stat(directory).st_mode & 0o777 == 0o700
    assert world._port is not None
    address, port = world._port.getsockname()
    assert address == "127.0.0.1"
    base = f"{made.path}/base/world-1-rank"
    assert made.launcher.specs == [
        RankSpec(rank, KEY, world._session, 7, directory, f"{base}{rank}", "/held", ("a",), port)
        for rank in (0, 1)
    ]
    assert [(each.rank, each.started.rank) for each in handles_of(world)] == [(0, 0), (1, 1)]
    assert made.launcher.calls == [("restore",), ("start", 100 + START_WITHIN)]
    assert made.waits == [START_WITHIN, START_WITHIN - 1]
    assert made.share.calls == ["leave"]


def test_a_world_without_a_share_holds_no_file(made: Made) -> None:
    made.start(timeout=START_WITHIN + 5)
    assert [spec.held for spec in made.launcher.specs] == ["", ""]
    assert made.waits == [START_WITHIN + 5, START_WITHIN + 4]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (StartFailed("no licence"), "rank 1 did not start: no licence\nlog of 1"),
        (DEAD, "rank 1 died: SIGKILL while starting\nits last words"),
    ],
    ids=["failed", "died"],
)
def test_a_rank_that_does_not_start_ends_the_start(made: Made, message: Any, words: str) -> None:
    made.moments = [[(0, Ready())], [(1, message)]]
    with pytest.raises(WorldError) as raised:
        made.start()
    assert str(raised.value) == words


def test_ranks_that_are_late_are_named_with_their_stacks(made: Made) -> None:
    made.moments = [[(0, Ready())]]
    made.statuses = {rank: RankStatus(f"stack of {rank}", "") for rank in (0, 1)}
    made.share = Share()
    with pytest.raises(WorldError) as raised:
        made.start(timeout=90)
    assert made.asked == [1]
    assert str(raised.value) == f"rank 1 of {KEY}: not ready after 90 s\nrank 1: stack of 1"
    assert made.waits == [*map(float, range(90, 0, -1))]
    assert made.share.calls == []


def test_all_ranks_that_are_not_ready_are_named(made: Made) -> None:
    made.moments = [[]]
    made.statuses = {rank: RankStatus(f"stack of {rank}", "") for rank in (0, 1)}
    with pytest.raises(WorldError) as raised:
        made.start(timeout=61)
    stacks = "rank 0: stack of 0\nrank 1: stack of 1"
    assert str(raised.value) == f"rank 0, 1 of {KEY}: not ready after 61 s\n{stacks}"


def test_ranks_that_are_ready_at_the_last_moment_are_ready(made: Made) -> None:
    made.moments = [[]] * 59 + [[(0, Ready()), (1, Ready())]]
    made.start()
    assert made.now == 160


# A test


def outcome_of(*fates: Any) -> ItemOutcome:
    ranks = tuple(RankOutcome(rank, fate=fate) for rank, fate in enumerate(fates))
    return ItemOutcome(ranks, 1.0, False, 1.0)


def run_of(world: World, outcome: ItemOutcome | OSError) -> ItemRun:
    def run(handles: list[Any]) -> ItemOutcome:
        assert handles is world._handles
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    made: Any = SimpleNamespace(run=run, label="test_a.py::test_a")
    return made


def test_output_of_ranks_that_did_not_finish_is_kept(made: Made) -> None:
    made.outputs = f"{made.path}/outputs"
    folder = OutputDirectory(made.outputs).of_test("test_a.py::test_a")
    folder.mkdir(parents=True)
    (folder / "rank-0.stdout").touch()
    world = made.start()
    outcome = outcome_of(NOT_USABLE, DEAD)
    assert world.run(run_of(world, outcome)) is outcome
    assert list(folder.iterdir()) == []
    first, second = handles_of(world)
    assert first.printed == []
    assert second.printed == [(folder, 1)]
    assert outcome.ranks[1].warnings == []
    for handle in (first, second):
        handle.refuses = OSError("disk full")
    world.run(run_of(world, outcome))
    (warned,) = outcome.ranks[1].warnings
    text = "--rank-output-dir: output of rank 1 is missing: disk full"
    assert warned == Warned("pytest", "PytestWarning", text, module.__file__, 0)
    assert outcome.ranks[0].warnings == []
    second.printed.clear()
    second.refuses = None
    world.run(run_of(world, outcome_of(Finished(True, 0, 0), Finished(True, 0, 0))))
    assert second.printed == []
    world.run(run_of(world, outcome_of(DEAD, DEAD)))
    assert second.printed == [(folder, 1)]


def test_output_is_kept_only_on_request(made: Made) -> None:
    world = made.start()
    outcome = outcome_of(DEAD, NOT_USABLE)
    assert world.run(run_of(world, outcome)) is outcome
    assert [handle.printed for handle in handles_of(world)] == [[], []]


def test_a_run_that_cannot_reach_its_ranks_says_why(made: Made) -> None:
    world = made.start()
    with pytest.raises(WorldError) as raised:
        world.run(run_of(world, OSError("no more files")))
    assert str(raised.value) == "no more files"
    handles_of(world)[1].lives = False
    with pytest.raises(WorldError, match=r"^a rank of 2 ranks .* ended after the test$"):
        world.run(run_of(world, OSError("no more files")))


# The end


def test_an_interrupted_world_says_what_each_rank_did(made: Made) -> None:
    world = made.start()
    made.statuses = {0: RankStatus("", "a.py:1 in f", state="idle"), 1: RankStatus("", "a.py:2 in g")}
    handles = handles_of(world)
    assert world.interrupt() == {0: "has ended the test", 1: module.place_of(made.statuses[1])}
    assert [handle.sent for handle in handles] == [[Interrupt()], [Interrupt()]]
    handles[1].died = DEAD
    assert world.interrupt() == {0: "has ended the test", 1: "died: SIGKILL"}


def test_a_closing_world_is_awaited_and_complains_of_ranks(made: Made) -> None:
    world = made.start()
    handles = handles_of(world)
    world.send_close()
    assert [handle.sent for handle in handles] == [[Close()], [Close()]]
    handles[0].ends, handles[1].how = False, DEAD
    made.now = 200.0
    made.launcher.calls.clear()
    assert world.reap() == [
        f"rank 0 of {KEY} did not end in {CLOSE_WITHIN:g} s and was killed",
        f"rank 1 of {KEY} died: SIGKILL while closing\nits last words",
    ]
    assert [handle.awaited for handle in handles] == [[200 + CLOSE_WITHIN]] * 2
    assert ("kill", 0) in made.launcher.calls


@pytest.mark.parametrize(("given", "waited"), [(None, 30.0), (0.0, 0.0), (2.25, 2.25)])
def test_a_world_closes_within_the_time_of_a_test_or_a_given_one(
    made: Made, given: float | None, waited: float
) -> None:
    world = made.start(timeout=30)
    first, second = handles_of(world)
    first.ends = given is None
    made.now = 200.0
    complaints = world.reap(given)
    words = [] if given is None else [f"rank 0 of {KEY} did not end in {round(given, 1):g} s and was killed"]
    assert complaints == words
    assert first.awaited == second.awaited == [200 + waited]


def test_a_world_that_did_not_start_has_the_usual_time_to_end(made: Made) -> None:
    assert made.world()._close_within == CLOSE_WITHIN
    assert made.world().reap() == []


def test_a_world_without_a_rank_or_its_directory_is_at_fault(made: Made) -> None:
    world = made.start()
    assert world.fault() == ""
    os.rmdir(world._directory)
    assert world.fault() == (
        f"the directory of {KEY}, {made.launcher.directory}/world-1, has been removed: does a test, or a job "
        "of the machine, clean the temporary directory?"
    )
    handles_of(world)[0].lives = False
    assert world.fault() == f"a rank of {KEY} ended after the test"


@pytest.mark.parametrize(
    ("lives", "hosts", "lost", "gone"),
    [
        ((True, True), ("", ""), False, False),
        ((True, True), ("far", "far"), False, False),
        ((True, False), ("", ""), False, False),
        ((True, False), ("far", ""), False, False),
        ((True, False), ("", "far"), True, False),
        ((False, False), ("", ""), False, True),
    ],
)
def test_a_world_is_lost_with_a_host_and_gone_with_all_ranks(
    made: Made, lives: tuple[bool, bool], hosts: tuple[str, str], lost: bool, gone: bool
) -> None:
    world = made.start()
    for rank, handle in enumerate(handles_of(world)):
        handle.lives, handle.host = lives[rank], hosts[rank]
    assert (world.is_lost(), world.is_gone()) == (lost, gone)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_killed_world_leaves_nothing_but_logs_that_are_kept(made: Made, keeps: bool) -> None:
    made.share = Share()
    made.outputs = f"{made.path}/outputs" if keeps else ""
    world = made.start()
    (Path(world._directory) / "rank-1.log").write_text("log")
    port = world._port
    assert port is not None
    made.launcher.calls.clear()
    world.kill()
    assert made.launcher.calls == [
        *(("kill", 0), ("kill", 1)),
        *(("close", 0), ("forget", 0), ("close", 1), ("forget", 1)),
        ("end_world", f"{made.launcher.directory}/world-1"),
    ]
    assert port.fileno() == -1
    assert made.share.calls == ["leave", "end"]
    assert handles_of(world) == []
    kept = [str(path.relative_to(made.path)) for path in made.path.glob("outputs/**/*.log")]
    assert kept == (["outputs/outside-of-tests/gw5/world-1/rank-1.log"] if keeps else [])
    made.launcher.calls.clear()
    world.kill()
    assert [name for name, *_ in made.launcher.calls] == ["end_world"]
