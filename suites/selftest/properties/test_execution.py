"""The execution of a property: the database, constants, settings and facts that ranks share."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
from hypothesis import Phase, settings
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.data import ConjectureData

from lockstep.exceptions import Diverged, PeerFailed
from lockstep.features.properties import hypothesis_internals as internals
from lockstep.features.properties.desync import EndedByOthers
from lockstep.features.properties.execution import (
    LockstepDatabase,
    SharedConstants,
    _Engine,
    _Execution,
    keep_in_step,
)
from lockstep.features.properties.messages import CrashedExample
from lockstep.protocol import TRIAL
from suites.selftest.properties.stand_ins import Peers, example_of, same_vote

KEY = b"key"


# The database


def test_only_rank_0_uses_the_database_and_writes_at_the_end() -> None:
    theirs = [InMemoryExampleDatabase(), InMemoryExampleDatabase()]
    theirs[0].save(KEY, b"a")
    theirs[1].save(KEY, b"unseen")
    agree = [lambda _, read: read, lambda *_: [b"a"]]
    shared = [LockstepDatabase(theirs[rank], rank == 0, agree[rank]) for rank in (0, 1)]
    for database in shared:
        database.save(KEY, b"b")
        database.move(KEY, b"second", b"a")
        assert list(database.fetch(KEY)) == [b"b"]
    assert list(theirs[0].fetch(KEY)) == [b"a"]
    for database in shared:
        database.write()
    assert [sorted(each.fetch(KEY)) for each in theirs] == [[b"b"], [b"unseen"]]
    assert list(theirs[0].fetch(b"second")) == [b"a"]


class _Database(InMemoryExampleDatabase):
    def fetch(self, key: bytes) -> Iterable[bytes]:
        raise OSError("gone")


def test_changes_of_a_database_are_made_once_in_order() -> None:
    theirs = InMemoryExampleDatabase()
    shared = LockstepDatabase(theirs, True, lambda _, read: read or [])
    shared.save(KEY, b"a")
    shared.delete(KEY, b"a")
    shared.delete(KEY, b"unknown")
    assert list(shared.fetch(KEY)) == []
    assert repr(shared) == repr(theirs)
    shared.write()
    assert list(theirs.fetch(KEY)) == []
    theirs.save(KEY, b"of another run")
    theirs.save(KEY, b"a")
    shared.write()
    assert sorted(theirs.fetch(KEY)) == [b"a", b"of another run"]


def test_a_database_that_cannot_be_read_after_writing_is_written() -> None:
    theirs = _Database()
    shared = LockstepDatabase(theirs, True, lambda *_: [])
    shared._known[KEY] = {}
    shared.save(KEY, b"a")
    shared.write()
    assert list(InMemoryExampleDatabase.fetch(theirs, KEY)) == [b"a"]


def test_what_all_ranks_read_of_a_database_is_asked_for_once() -> None:
    asked: list[tuple[bytes, list[bytes] | None]] = []
    for is_writer in (True, False):
        shared = LockstepDatabase(
            InMemoryExampleDatabase(), is_writer, lambda key, read: asked.append((key, read)) or [b"c", b"a"]
        )
        assert [list(shared.fetch(KEY)) for _ in range(2)] == [[b"c", b"a"]] * 2
    assert asked == [(KEY, []), (KEY, None)]


# Constants


class _OtherRank:
    """Votes as a rank 0 that has read only one constant."""

    def exchange(self, case: str, value: object) -> list[object]:
        if isinstance(value, dict):
            return [{kind: [5] if kind == "integers" else [] for kind in value}, value]
        return [b"another", value]


def test_all_ranks_draw_from_the_constants_of_rank_0() -> None:
    shared = SharedConstants(_OtherRank())  # type: ignore[arg-type]
    before = providers._get_local_constants
    shared.share()
    try:
        assert list(providers._get_local_constants()) == [5]
    finally:
        shared.release()
    assert providers._get_local_constants is before


class _SameRank:
    def __init__(self) -> None:
        self.cases: list[str] = []

    def exchange(self, case: str, value: object) -> list[object]:
        self.cases.append(case)
        return [value, value]


def test_constants_that_are_equal_are_kept_and_caches_emptied_after_a_difference() -> None:
    same, other = _SameRank(), _OtherRank()
    shared = SharedConstants(same)  # type: ignore[arg-type]
    cache = providers.CONSTANTS_CACHE.cache
    emptied = []
    internals.read_constants()  # which empties them after an import
    try:
        for ranks in (same, other, same, same):
            shared._examples = ranks  # type: ignore[assignment]
            cache["key"] = "value"
            shared.share()
            emptied.append("key" not in cache)
    finally:
        shared.release()
        cache.clear()
    assert emptied == [False, True, True, False]
    assert same.cases == ["the constants of modules"] * 3


# A run


class _Run(_Execution):
    """The execution of a property, of which Hypothesis's own part is replaced."""

    def __init__(self, examples: Any) -> None:
        self._examples, self._database, self._is_in_step = examples, Mock(), True
        self._constants = Mock()


def test_settings_of_a_property_are_adapted_to_ranks(tmp_path: Path) -> None:
    peers = Peers(tmp_path, lambda vote: replace(vote, more=[b"of rank 1"]), rank=1)
    run = _Run(peers.examples)
    theirs = InMemoryExampleDatabase()
    given = settings(database=theirs, deadline=200, report_multiple_bugs=True, print_blob=False)
    adapted = run._adapt(given)
    assert (adapted.deadline, adapted.report_multiple_bugs, adapted.print_blob) == (None, False, True)
    assert adapted.phases == given.phases
    assert isinstance(adapted.database, LockstepDatabase)
    assert adapted.database is run._database
    adapted.database.save(KEY, b"mine")
    adapted.database.write()
    assert list(theirs.fetch(KEY)) == []
    assert list(adapted.database.fetch(KEY)) == [b"of rank 1", b"mine"]
    assert peers.votes[-1].case == f"the database, {KEY.hex()[:8]}"
    own = run._adapt(settings(database=None, deadline=300))
    assert (own.database, own.deadline) == (None, timedelta(milliseconds=300))
    peers.examples.crash_guard.begin_item((CrashedExample(example_of(b"a"), "how"),))
    assert run._adapt(given).phases == tuple(each for each in given.phases if each is not Phase.explain)


def _ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, **state: Any) -> str:
    """Return what is done after a run of the engine that ends with an error, in order, and what it raises."""
    run, raises = _Run(Mock()), Mock(side_effect=error)
    vars(run).update(state)
    monkeypatch.setattr(internals.PropertyExecution, "run_engine", raises)
    raised = ""
    try:
        run.run_engine()
    except BaseException as found:
        raised = f" {type(found).__name__}"
    done: list[str] = []
    if run._database is not None:
        done += ["write" for each in run._database.mock_calls if each == call.write()]
    done += ["end" for each in run._examples.mock_calls if each == call.end_run()]
    done += ["release" for each in run._constants.mock_calls if each == call.release()]
    return " ".join(done) + raised


def test_a_property_ends_in_step_whatever_it_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(error: BaseException | None, **state: Any) -> str:
        return _ended(tmp_path, monkeypatch, error, **state)

    of_peers = ExceptionGroup("several", [PeerFailed("a"), PeerFailed("b")])
    both = ExceptionGroup("several", [PeerFailed("a"), ValueError("b")])
    assert ended(None) == "write end release"
    assert ended(ValueError("wrong")) == "write end release ValueError"
    assert ended(of_peers) == "write end release PeerFailed"
    assert ended(both) == "write end release ExceptionGroup"
    assert ended(EndedByOthers("rank 1")) == "release EndedByOthers"
    assert ended(KeyboardInterrupt()) == "write release KeyboardInterrupt"
    assert ended(pytest.exit.Exception("enough")) == "write release Exit"
    assert ended(None, _is_in_step=False) == "write release"
    assert ended(None, _database=None) == "end release"


@pytest.mark.parametrize(
    ("options", "is_recorded"),
    [
        ({}, False),
        ({"expected_failure": None}, False),
        ({"expected_failure": (ValueError("wrong"), "")}, False),
        ({"expected_failure": (Diverged("apart"), "")}, True),
    ],
)
def test_the_last_example_is_recorded_where_ranks_part_in_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_recorded: bool
) -> None:
    execute = Mock(return_value="result")
    monkeypatch.setattr(internals.PropertyExecution, "execute_once", execute)
    examples = MagicMock()
    data: Any = "data"
    assert _Run(examples).execute_once(data, **options) == "result"
    execute.assert_called_once_with(data, **options)
    assert examples.recorded.called == is_recorded


@pytest.mark.parametrize("database", [None, InMemoryExampleDatabase()], ids=["without", "with"])
def test_a_property_begins_with_the_facts_that_ranks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Any
) -> None:
    def begin(self: Any, stuff: Any, test: Any, given: Any, *_: Any, **options: Any) -> None:
        self.test, self.test_runner, self.given = test, lambda data, function: function(data), given

    def body() -> str:
        return "ran"

    monkeypatch.setattr(internals.PropertyExecution, "__init__", begin)
    peers, constants = Peers(tmp_path, same_vote), Mock()
    peers.rank.hook.pytest_ranks_example.return_value = None
    monkeypatch.setattr(_Execution, "_examples", peers.examples, raising=False)
    monkeypatch.setattr(_Execution, "_constants", constants, raising=False)
    peers.examples.begin_run = Mock()  # type: ignore[method-assign]
    wrapped = SimpleNamespace(_hypothesis_internal_use_seed=3, _hypothesis_internal_use_generated_seed=4)
    given = settings(database=database, deadline=None, max_examples=7)

    def make() -> Any:
        return _Execution(None, body, given, random.Random(1), wrapped)

    run = make()
    (name, facts), _ = peers.examples.begin_run.call_args
    assert (name, facts["seed"], list(facts)) == ("body", "3", ["seed", "randomness", "settings", "database"])
    assert facts["database"] == ("None" if database is None else "of examples")
    assert "max_examples=7" in facts["settings"]
    assert facts["settings"] == repr(settings(given, database=None))
    assert len(facts["randomness"]) == 16
    assert peers.examples.seed == (4 if database is None else None)
    assert constants.share.call_count == 1
    assert run.given.print_blob
    assert run.test() == "ran"
    assert peers.examples.running.now().is_in_body
    assert run.test_runner(ConjectureData.for_choices([]), lambda _: "in step") == "in step"
    assert peers.votes[-1].case == f"{TRIAL}1"
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(make).result()
    assert (other.given, other.test) == (given, body)
    peers.examples.is_active = False
    assert (make().given, make().test) == (given, body)
    assert constants.share.call_count == 1


def test_an_engine_stops_once_its_search_must(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[object] = []
    monkeypatch.setattr(internals.Engine, "test_function", Mock())
    monkeypatch.setattr(internals, "stop_shrinking", stopped.append)
    runner = _Engine.__new__(_Engine)
    for is_active in (True, False):
        for must_stop in (True, False):
            runner._examples = Mock(is_active=is_active, must_stop=lambda must_stop=must_stop: must_stop)
            runner.test_function(ConjectureData.for_choices([]))
            assert len(stopped) == 1


def test_hypothesis_is_replaced_by_what_keeps_it_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.features.properties.execution.internals", replaced := Mock(wraps=internals))
    for name in (
        "replace_execution",
        "replace_engine_clock",
        "respect_set_origins",
        "exclude_from_explanations",
    ):
        setattr(replaced, name, Mock())
    peers = Peers(tmp_path, same_vote)
    peers.examples.crash_guard.install = Mock()  # type: ignore[method-assign]
    keep_in_step(peers.examples)
    execution, runner = replaced.replace_execution.call_args.args
    assert execution._examples is runner._examples is peers.examples
    assert execution._constants._examples is peers.examples
    replaced.replace_engine_clock.assert_called_once_with(peers.examples.clock)
    replaced.respect_set_origins.assert_called_once_with()
    folders = [Path(each).name for each in replaced.exclude_from_explanations.call_args.args]
    assert folders == ["features", "rank"]
    assert Path(replaced.exclude_from_explanations.call_args.args[1], "process.py").exists()
    peers.examples.crash_guard.install.assert_called_once_with()
