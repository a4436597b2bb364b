"""The store in which the ranks of a world on one host meet is torch's file, looked at more often."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lockstep.rank import file_store as module
from lockstep.rank.file_store import EagerFileStore


@pytest.fixture
def stores(tmp_path: Path) -> tuple[EagerFileStore, EagerFileStore]:
    """The stores of two ranks."""
    return EagerFileStore(str(tmp_path / "store"), 2), EagerFileStore(str(tmp_path / "store"), 2)


def own(store: EagerFileStore) -> dist.Store:
    return store


def by_torch(store: EagerFileStore) -> dist.Store:
    """Return a store of torch's, which calls that one from C++."""
    return dist.PrefixStore("group", store)


@pytest.mark.parametrize("called", [own, by_torch])
def test_ranks_read_what_another_one_writes(
    stores: tuple[EagerFileStore, EagerFileStore], called: Callable[[EagerFileStore], dist.Store]
) -> None:
    first, second = map(called, stores)
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert first.add("count", 2) == 2
    assert second.add("count", 3) == 5
    assert second.check(["key", "count"])
    assert not second.check(["key", "other"])
    assert second.compare_set("key", "value", "new") == b"new"
    assert first.compare_set("key", "value", "newer") == b"new"
    second.append("key", "er")
    assert first.multi_get(["key", "count"]) == [b"newer", b"5"]
    first.clone().set("cloned", "1")
    assert second.get("cloned") == b"1"
    keys = first.num_keys()
    assert second.delete_key("key")
    assert first.num_keys() == keys - 1


@pytest.mark.parametrize("called", [own, by_torch])
def test_a_rank_waits_for_a_key_of_another_one(
    stores: tuple[EagerFileStore, EagerFileStore], called: Callable[[EagerFileStore], dist.Store]
) -> None:
    first, second = map(called, stores)
    waiting = threading.Event()

    def write() -> None:
        waiting.wait()
        first.set("key", "value")

    writer = threading.Thread(target=write)
    writer.start()
    file = stores[1]._file

    def check(keys: list[str]) -> bool:
        found = file.check(keys)
        waiting.set()
        return found

    stores[1]._file = Mock(wraps=file, check=Mock(side_effect=check))
    assert second.get("key") == b"value"
    writer.join()
    assert stores[1]._file.check.call_count > 1


@pytest.mark.parametrize("called", [own, by_torch])
def test_a_wait_for_a_key_that_never_comes_ends(
    stores: tuple[EagerFileStore, EagerFileStore], called: Callable[[EagerFileStore], dist.Store]
) -> None:
    store = called(stores[0])
    with pytest.raises(dist.DistStoreError, match=r"Wait timeout after 0\.01 s, for .*never"):
        store.wait(["never"], datetime.timedelta(milliseconds=10))
    stores[0].set_timeout(datetime.timedelta(milliseconds=20))
    with pytest.raises(dist.DistStoreError, match=r"Wait timeout after 0\.02 s, for .*never"):
        store.get("never")


def test_clocks_that_a_test_replaces_are_not_asked(
    stores: tuple[EagerFileStore, EagerFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sleep", "monotonic"):
        monkeypatch.setattr(f"time.{name}", Mock(side_effect=AssertionError))
    with pytest.raises(dist.DistStoreError):
        stores[0].wait(["never"], datetime.timedelta(milliseconds=1))


def test_what_is_written_has_no_timeout_where_that_is_zero(
    stores: tuple[EagerFileStore, EagerFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(module, "sleep", looks.append)
    monkeypatch.setattr(module, "monotonic", lambda: 1e6 * len(looks))
    stores[0]._file = Mock(check=lambda keys: len(looks) == 3)
    stores[0].wait(["key"], datetime.timedelta(0))
    stores[0].set_timeout(datetime.timedelta(0))
    looks.clear()
    stores[0].wait(["key"])
    assert len(looks) == 3


def test_pauses_grow_to_two_milliseconds(
    stores: tuple[EagerFileStore, EagerFileStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[Any] = []
    monkeypatch.setattr(module, "sleep", pauses.append)
    stores[0]._file = Mock(check=lambda keys: len(pauses) == 12)
    stores[0].wait(["key"])
    assert pauses[:3] == pytest.approx([5e-5, 7.5e-5, 1.125e-4])
    assert pauses[-2:] == [2e-3, 2e-3]
