"""The guards around an item, with streams, states and reports of a test, in this process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from lockstep.rank import item as module
from lockstep.rank.item import ItemGuards, StateGuard, StreamGuard
from lockstep.subtests import RunSubtests


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self.name}>"


def put_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """Put streams in place in the call of a test: pytest's capture puts its own there before it."""
    out, err = Stream("out"), Stream("err")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def drive(hook: Generator[None, object, object], result: object = None) -> object:
    """Run a wrapper of a hook around one that returns `result`."""
    next(hook)
    try:
        hook.send(result)
    except StopIteration as end:
        return end.value
    raise AssertionError("it yielded twice")


# Streams


def test_a_stream_that_a_test_closes_stays_open_and_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = put_streams(monkeypatch)
    guard = StreamGuard()
    guard.before()
    sys.stderr.close()
    sys.stdout.close()
    assert streams[0].is_open
    assert streams[1].is_open
    guard.before()
    sys.stdout.close()
    assert guard.take_notes() == ["sys.stderr closed", "sys.stdout closed", "sys.stdout closed"]
    assert guard.take_notes() == []


def test_a_stream_that_a_test_replaces_is_put_back_and_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = put_streams(monkeypatch)
    guard = StreamGuard()
    guard.before()
    guard.before_call()
    monkeypatch.setattr(sys, "stderr", Stream("other"))
    assert drive(guard.pytest_runtest_teardown(), "result") == "result"
    assert (sys.stdout, sys.stderr) == streams
    assert guard.take_notes() == ["sys.stderr replaced by <other>"]
    monkeypatch.setattr(sys, "stdout", None)
    hook = guard.pytest_runtest_teardown()
    next(hook)
    with pytest.raises(KeyError):
        hook.throw(KeyError("of a tear-down"))
    assert sys.stdout is streams[0]
    assert guard.take_notes() == ["sys.stdout replaced by None"]


def test_a_stream_of_a_fixture_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_streams(monkeypatch)
    guard = StreamGuard()
    guard.before()
    of_fixture = Stream("of a fixture")
    monkeypatch.setattr(sys, "stdout", of_fixture)
    guard.before_call()
    drive(guard.pytest_runtest_teardown())
    assert sys.stdout is of_fixture
    assert guard.take_notes() == []


def test_a_process_may_have_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    guard = StreamGuard()
    guard.before()
    drive(guard.pytest_runtest_teardown())
    assert guard.take_notes() == []


# Guards


class Guard:
    """A guard whose snapshots are tuples, that says what its part was left with."""

    warning = UserWarning

    def __init__(self, name: str, calls: list[Any], *left: str) -> None:
        self.name, self.calls, self.left = name, calls, left
        self.baseline: Any = Snapshot()
        self.now = Snapshot()

    def capture(self) -> Any:
        return self.now

    def before(self) -> None:
        self.calls.append((self.name, "before"))

    def after(self, raised: bool) -> Sequence[str]:
        self.calls.append((self.name, raised))
        return self.left


class Snapshot(frozenset[str]):
    def with_changes(self, before: Snapshot, after: Snapshot) -> Snapshot:
        return Snapshot(self - (before - after) | (after - before))


class Fixture:
    def __init__(self, scope: str) -> None:
        self.scope = scope


class Forks:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def guard(self) -> Generator[None, object, object]:
        self.calls.append("fork guard")
        return (yield)

    def end_child(self) -> None:
        self.calls.append("end child")


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def guards(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> ItemGuards:
    monkeypatch.setattr(module, "tear_down_except_for", lambda item: calls.append("tear down"))
    monkeypatch.setattr(module, "forget_ended_dependents", lambda fixture: calls.append(("forget", fixture)))
    hook = SimpleNamespace(pytest_ranks_called=lambda: calls.append("called"))
    spec = SimpleNamespace(key=SimpleNamespace(has_group=True))
    rank: Any = SimpleNamespace(forks=Forks(calls), hook=hook, spec=spec)
    made = ItemGuards(rank, SimpleNamespace())  # type: ignore[arg-type]
    made._policy = "warn"
    state: Any = Guard("state", calls, "a variable", "a seed")
    made._guards = (state, Guard("other", calls, "a thread"))
    item: Any = SimpleNamespace(path="/here/test_a.py", location=("test_a.py", 6, "test_a"))
    made.raised = True
    made.pytest_runtest_setup(item)
    return made


def left_by(guards: ItemGuards) -> list[str]:
    """Run the tear-down of an item; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert drive(guards.pytest_runtest_teardown(), "result") == "result"
    return [f"{each.filename}:{each.lineno}: {each.category.__name__}: {each.message}" for each in caught]


OF_STATE = "/here/test_a.py:7: UserWarning: the test left behind a variable; a seed"
OF_OTHER = "/here/test_a.py:7: UserWarning: the test left behind a thread"


def test_guards_look_in_their_order_and_warn_at_the_line_of_the_test(
    guards: ItemGuards, calls: list[Any]
) -> None:
    assert calls == [("state", "before"), ("other", "before"), "tear down"]
    calls.clear()
    assert left_by(guards) == [OF_STATE, OF_OTHER]
    assert calls == [("state", False), ("other", False)]


def test_guards_hear_that_a_test_has_failed(guards: ItemGuards, calls: list[Any]) -> None:
    guards.raised = True
    guards._policy = "error"
    calls.clear()
    assert left_by(guards) == [OF_STATE, OF_OTHER]
    assert calls == [("state", True), ("other", True)]


def test_a_tear_down_that_raises_is_followed_by_the_other_guards(
    guards: ItemGuards, calls: list[Any]
) -> None:
    calls.clear()
    hook = guards.pytest_runtest_teardown()
    next(hook)
    with pytest.raises(KeyError), pytest.warns(UserWarning, match="a thread"):
        hook.throw(KeyError("of a tear-down"))
    assert calls == [("other", True)]


def test_by_the_policy_what_is_left_fails_the_test_or_is_ignored(
    guards: ItemGuards, calls: list[Any]
) -> None:
    guards._policy = "error"
    message = r"\Athe test left behind a variable; a seed \(ranks_leaks = error\)\Z"
    calls.clear()
    with pytest.raises(pytest.fail.Exception, match=message), pytest.warns(UserWarning, match="a thread"):
        drive(guards.pytest_runtest_teardown())
    assert calls == [("state", False), ("other", True)]
    two: Any = Guard("two", calls, "more")
    guards._guards = (*guards._guards, two)
    failed = pytest.raises(pytest.fail.Exception, match="a variable")
    with failed, pytest.warns(UserWarning, match="left behind") as caught:
        drive(guards.pytest_runtest_teardown())
    assert [str(each.message) for each in caught] == [
        "the test left behind a thread",
        "the test left behind more",
    ]
    guards._guards[0].left = ()  # type: ignore[attr-defined]
    guards._guards[1].left = ()  # type: ignore[attr-defined]
    with pytest.raises(pytest.fail.Exception, match="left behind more"):
        drive(guards.pytest_runtest_teardown())
    guards._guards = guards._guards[:2]
    guards._guards[1].left = ("a thread",)  # type: ignore[attr-defined]
    with pytest.raises(pytest.fail.Exception, match="left behind a thread"):
        drive(guards.pytest_runtest_teardown())
    guards._policy = "off"
    calls.clear()
    assert left_by(guards) == []
    assert calls == [("state", False), ("other", False)]


def test_a_call_is_in_the_guard_of_forks_and_features_hear_of_it(
    guards: ItemGuards, calls: list[Any]
) -> None:
    calls.clear()
    assert drive(guards.pytest_runtest_call(), "result") == "result"
    assert calls == ["fork guard", "called"]
    calls.clear()
    item: Any = SimpleNamespace(funcargs={})
    assert drive(guards.pytest_pyfunc_call(item), True) is True
    assert calls == ["fork guard"]


def test_streams_are_looked_at_before_an_item_and_before_its_call(
    guards: ItemGuards, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = Mock()
    monkeypatch.setattr(guards, "_streams", streams)
    item: Any = SimpleNamespace(path="/here/test_a.py", location=("test_a.py", None, "test_a"))
    guards.pytest_runtest_setup(item)
    assert [name for name, *_ in streams.mock_calls] == ["before"]
    assert guards._place == ("/here/test_a.py", 1)
    drive(guards.pytest_runtest_call())
    assert [name for name, *_ in streams.mock_calls] == ["before", "before_call"]


def test_a_test_of_whose_subtests_none_ran_is_skipped(guards: ItemGuards) -> None:
    runner = Mock(spec=RunSubtests)
    item: Any = SimpleNamespace(funcargs={"run_subtests": runner})
    drive(guards.pytest_pyfunc_call(item))
    runner.skip_if_nothing_ran.assert_called_once_with()


def test_guards_are_those_of_the_rank_and_of_features() -> None:
    forks, other = object(), object()
    spec = SimpleNamespace(key=SimpleNamespace(has_group=True))
    rank: Any = SimpleNamespace(forks=forks, spec=spec)
    made = ItemGuards(rank, Mock())
    assert not made.raised
    config = Mock()
    config.getini.side_effect = {"ranks_leaks": "off"}.__getitem__
    config.hook.pytest_ranks_guard.side_effect = lambda policy: [other] if policy == "off" else []
    made.pytest_configure(config)
    registered = [call.args[0] for call in config.pluginmanager.register.call_args_list]
    assert registered == [made._streams, forks]
    assert made._guards == (made.state, other)
    assert made._policy == "off"


def test_what_a_wide_fixture_changes_stands_until_it_ends(guards: ItemGuards, calls: list[Any]) -> None:
    state: Any = guards._guards[0]
    outer: Any = Fixture("session")
    inner: Any = Fixture("module")
    narrow: Any = Fixture("function")
    outer_hook, inner_hook = guards.pytest_fixture_setup(outer), guards.pytest_fixture_setup(inner)
    next(outer_hook)
    state.now = Snapshot({"outer"})
    next(inner_hook)
    state.now = Snapshot({"outer", "inner"})
    with pytest.raises(StopIteration) as end:
        inner_hook.send("value")
    assert end.value.value == "value"
    assert state.baseline == {"inner"}
    with pytest.raises(StopIteration):
        outer_hook.send(None)
    assert state.baseline == {"outer", "inner"}
    assert drive(guards.pytest_fixture_setup(narrow), "narrow") == "narrow"
    calls.clear()
    left_by(guards)
    assert [call for call in calls if call[0] == "forget"] == [("forget", inner), ("forget", outer)]
    calls.clear()
    guards.pytest_fixture_post_finalizer(narrow)
    guards.pytest_fixture_post_finalizer(outer)
    assert state.baseline == {"inner"}
    guards.pytest_fixture_post_finalizer(inner)
    guards.pytest_fixture_post_finalizer(inner)
    assert state.baseline == set()
    assert calls == ["end child"] * 4


def test_a_wide_fixture_that_fails_changes_nothing(guards: ItemGuards) -> None:
    hook = guards.pytest_fixture_setup(Fixture("module"))  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(KeyError):
        hook.throw(KeyError())
    assert not guards._setups
    assert not guards._changes


# State


def test_state_that_was_changed_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    reports: Any = SimpleNamespace(enable=lambda: calls.append("enable"))
    streams = StreamGuard()
    guard = StateGuard(streams, reports, has_group=True)
    results: Any = SimpleNamespace(
        install=lambda: calls.append("install"),
        begin_test=lambda: calls.append("begin"),
        end_test=lambda: calls.append("end"),
    )
    guard._dtensor_results = results
    guard.start()
    try:
        guard.before()
        assert calls == ["install", "begin"]
        assert guard.after(raised=False) == []
        assert guard.is_restored
        monkeypatch.setenv("OF_A_FILE", "1")
        guard.before()
        monkeypatch.setenv("OF_A_TEST", "1")
        streams._notes.append("sys.stdout closed")
        left = guard.after(raised=False)
        assert left == ["environ: OF_A_TEST", "sys.stdout closed"]
        assert guard.is_restored
        assert guard.after(raised=False) == []
        assert calls[2:] == ["enable", "end", "begin", "enable", "end", "enable", "end"]
        assert "OF_A_TEST" not in os.environ
        assert os.environ["OF_A_FILE"] == "1"
    finally:
        monkeypatch.undo()


@dataclass(frozen=True)
class Names:
    """The state of a rank as names; those that begin with "fixed" cannot be restored."""

    names: frozenset[str] = frozenset()
    process_groups: frozenset[str] = frozenset()

    now: ClassVar[Names]
    ended: ClassVar[int]

    @classmethod
    def capture(cls) -> Names:
        return Names.now

    def with_changes(self, before: Names, after: Names) -> Names:
        names = self.names - (before.names - after.names) | (after.names - before.names)
        return replace(self, names=names)

    def changes(self, now: Names) -> list[str]:
        return sorted((now.names ^ self.names) | (now.process_groups ^ self.process_groups))

    def restore(self) -> None:
        Names.now = replace(
            Names.now, names=self.names | {n for n in Names.now.names if n.startswith("fixed")}
        )

    def end_groups(self) -> list[str]:
        Names.ended += 1
        ended = Names.now.process_groups - self.process_groups
        Names.now = replace(Names.now, process_groups=self.process_groups)
        return sorted(ended)


def state_guard(monkeypatch: pytest.MonkeyPatch, has_group: bool = True) -> StateGuard:
    """Return the guard of a rank that begins with one process group."""
    monkeypatch.setattr(module, "RankState", Names)
    monkeypatch.setattr(module, "DTensorResults", lambda: Mock())
    Names.now, Names.ended = Names(process_groups=frozenset({"default"})), 0
    guard = StateGuard(StreamGuard(), Mock(), has_group)
    guard.start()
    guard.before()
    return guard


def with_names(*names: str, groups: tuple[str, ...] = ("default",)) -> Names:
    return Names(frozenset(names), frozenset(groups))


def test_what_cannot_be_restored_is_known_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state_guard(monkeypatch)
    Names.now = with_names("fixed", "free")
    assert guard.after(raised=False) == ["fixed", "free"]
    assert not guard.is_restored
    assert Names.now == with_names("fixed")
    Names.now = with_names("free")
    guard.after(raised=False)
    assert guard.is_restored


def test_groups_that_a_test_leaves_end_once_all_ranks_have_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state_guard(monkeypatch)
    guard.end_groups()
    assert Names.ended == 0
    Names.now = with_names(groups=("default", "own"))
    assert guard.after(raised=False) == ["own"]
    assert guard.is_restored
    guard.end_groups()
    guard.end_groups()
    assert Names.ended == 1
    guard.before()
    assert guard.baseline == with_names()


def test_destructors_of_some_groups_run_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, dropped = state_guard(monkeypatch), []

    def release(*lists: list[str]) -> None:
        dropped.append([group for groups in lists for group in groups])

    monkeypatch.setattr(module, "BACKENDS", {"gloo": SimpleNamespace(release=release)})
    for test in range(10):
        Names.now = with_names(groups=("default", f"own {test}"))
        guard.after(raised=False)
        guard.end_groups()
    assert dropped == [[f"own {test}" for test in range(9)]]


def test_groups_are_expected_in_a_world_that_starts_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state_guard(monkeypatch, has_group=False)
    Names.now = with_names(groups=("default", "own"))
    assert guard.after(raised=False) == []
    Names.now = with_names(groups=())
    assert guard.after(raised=False) == ["default"]


def test_groups_that_are_gone_after_a_failure_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state_guard(monkeypatch)
    Names.now = with_names(groups=())
    assert guard.after(raised=True) == []
    assert guard.after(raised=False) == ["default"]
    assert not guard.is_restored


def test_what_the_harness_changes_is_of_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = state_guard(monkeypatch)
    Names.now = with_names("of a test")
    before = guard.capture()
    Names.now = with_names("of a test", "of the harness")
    guard.adopt(before)
    assert guard.after(raised=False) == ["of a test"]
    assert Names.now == with_names("of the harness")
