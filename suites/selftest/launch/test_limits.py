"""Errors of starts in words, and the end of a rank that cannot start or join."""

from __future__ import annotations

import errno
import os
import pkgutil
import signal
import sys
from types import SimpleNamespace
from typing import Any, Never, cast

import pytest

from lockstep.launch import bootstrap
from lockstep.launch.limits import explain
from lockstep.protocol import StartFailed


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file"), "The directory that pytest runs in is gone"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (OSError(errno.EIO, "it broke"), "[Errno 5] it broke"),
        (RuntimeError("it broke"), "RuntimeError: it broke"),
        (RuntimeError(), "RuntimeError: RuntimeError"),
        (
            RuntimeError("Unable to find address for: lo"),
            "Unable to find address for: lo. Bring the loopback interface up: `ip link set lo up`",
        ),
    ],
)
def test_an_error_is_explained(error: BaseException, text: str) -> None:
    assert explain(error) == text


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOSPC])
def test_a_limit_that_was_met_has_a_remedy(number: int) -> None:
    by_number, by_words = explain(OSError(number, "it broke")), explain(RuntimeError(os.strerror(number)))
    said, remedy = by_words.split(". ", 1)
    assert said == os.strerror(number)
    assert by_number == f"[Errno {number}] it broke. {remedy}"


def _start_without_process(monkeypatch: pytest.MonkeyPatch, wire: Any) -> None:
    """Call `start_rank` in this process, which it would otherwise make its own."""
    for name in ("setsid", "set_inheritable"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    bootstrap.start_rank("a:b", cast(Any, SimpleNamespace(held="")), wire, None)


def test_a_rank_without_a_directory_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def refuse(spec: object) -> Never:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    monkeypatch.setattr(bootstrap, "_take_over", refuse)
    _start_without_process(monkeypatch, SimpleNamespace(fileno=lambda: 0, send=sent.append))
    assert sent == [(StartFailed("The directory that pytest runs in is gone"),)]


def test_a_rank_that_cannot_join_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def refuse() -> Never:
        raise RuntimeError("no route")

    def end(code: int) -> Never:
        raise SystemExit(code)

    rank = SimpleNamespace(join=refuse, fail_to_start=said.append, run=lambda **_: said.append("runs"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(bootstrap, "_take_over", lambda spec: None)
    monkeypatch.setattr(pkgutil, "resolve_name", lambda name: lambda spec, wire: rank)
    with pytest.raises(SystemExit) as ended:
        _start_without_process(monkeypatch, SimpleNamespace(fileno=lambda: 0))
    assert ended.value.code == 1
    assert said == ["it could not join its process group: RuntimeError: no route"]
