"""The end of a child that a test has forked from its rank, in this process."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.rank.forks import Forks


class Ended(BaseException):
    """A process ends with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(os, "write", lambda *given: found.append(given))
    return found


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Forks:
    """As a child of rank 3 has them."""
    called: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: called.append(after_in_child))
    world: Any = SimpleNamespace(rank=3)
    made = Forks(world, print)
    assert called == [print]
    made.end_child(ValueError("in the rank"))
    monkeypatch.setattr(made, "_pid", -1)
    return made


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "how", "code"),
    [
        (None, "reached the end of its code there and was ended", 0),
        (SystemExit(), "exited with None", 0),
        (SystemExit(5), "exited with 5", 5),
        (SystemExit("no"), "exited with 'no'", 1),
        (raised(ValueError("bad")), f"raised ValueError: bad at {__file__}:", 1),
    ],
    ids=["end", "exit", "code", "text", "error"],
)
def test_a_child_says_how_it_ended(
    forks: Forks, written: list[tuple[int, bytes]], error: BaseException | None, how: str, code: int
) -> None:
    with pytest.raises(Ended) as ended:
        forks.end_child(error)
    assert ended.value.code == code
    [(stream, text)] = written
    assert stream == 2
    assert text.decode().startswith(f"rank 3: process {os.getpid()}, forked by the test, {how}")
    assert text.endswith(b" and was ended\n" if code in (0, 1) and "exited" not in how else b"\n")


def test_a_child_that_comes_out_of_a_hook_ends(forks: Forks, written: list[tuple[int, bytes]]) -> None:
    guard = forks.guard()
    next(guard)
    with pytest.raises(Ended) as ended:
        guard.send("result")
    assert ended.value.code == 0
    for guard in (forks.guard(), forks.pytest_fixture_setup()):
        next(guard)
        with pytest.raises(Ended) as ended:
            guard.throw(KeyError("key"))
        assert ended.value.code == 1
    assert len(written) == 3


def test_a_rank_comes_out_of_a_hook_with_its_result(
    forks: Forks, written: list[tuple[int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_pid", os.getpid())
    guard = forks.pytest_fixture_setup()
    next(guard)
    with pytest.raises(StopIteration) as end:
        guard.send("result")
    assert end.value.value == "result"
    guard = forks.guard()
    next(guard)
    with pytest.raises(KeyError):
        guard.throw(KeyError("key"))
    assert written == []
