"""The comparison of the code of hosts."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.hosts.code import CodeComparison, _imported_by, _is_installed, digests


def test_a_file_that_differs_is_named_with_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    files = {name: tmp_path / name for name in ("a/test_x.py", "conftest.py", "own.py", "other.py")}
    for name in ("a/test_x.py", "own.py"):
        files[name].write_text(name)
    for name, file, things in (
        ("test_x", "a/test_x.py", "own"),
        ("own", "own.py", "other"),
        ("other", "other.py", "sys"),
    ):
        module = SimpleNamespace(__file__=str(files[file]))
        thing = type(sys)(things)
        module.thing = thing
        module.installed, module.beside = type(sys)("installed"), type(sys)("beside")
        monkeypatch.setitem(sys.modules, name, module)
    for name, place in (("installed", tmp_path / "site-packages"), ("beside", Path(f"{tmp_path}-beside"))):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__file__=str(place / "z.py")))
    asked: list[tuple[int, list[str]]] = []
    theirs: dict[str, str | None] = {}

    def ask(number: int, paths: list[str]) -> dict[str, str | None]:
        asked.append((number, sorted(paths)))
        return digests(paths) | theirs

    comparison = CodeComparison(tmp_path, ask)
    test, hosts = files["a/test_x.py"], {1: "b", 2: "c"}
    assert comparison.find_difference(test, {1: "b"}) == ""
    everything = sorted(map(str, [*files.values(), tmp_path / "a" / "conftest.py"]))
    assert asked == [(1, everything)]
    assert comparison.find_difference(test, hosts) == ""
    assert asked[1:] == [(2, everything)]
    end = "ranks there would run other code; bring the hosts to the same state"
    for file, digest, what in (
        (test, "x", "a/test_x.py is not the same on host c as on the host that runs pytest"),
        (test, None, "a/test_x.py is missing on host c"),
        (files["conftest.py"], "x", "conftest.py is on host c alone"),
    ):
        theirs = {str(file): digest}
        said = CodeComparison(tmp_path, ask).find_difference(test, {2: "c"})
        assert said == f"{what}: {end}"
    outside = CodeComparison(tmp_path / "a" / "deep", ask)
    theirs = {str(test): None}
    assert outside.find_difference(test, {1: "b"}).startswith(f"{test} is missing on host b: ")
    assert [asked[-1][1]] == [sorted([str(test), str(tmp_path / "a" / "conftest.py")])]


def test_what_a_module_has_imported_is_read_off_its_things() -> None:
    class Odd:
        @property
        def __module__(self) -> str:  # type: ignore[override]
            raise RuntimeError

    def thing() -> None: ...

    module: Any = SimpleNamespace(a=os, b=thing, c=Odd(), d=3, e=SimpleNamespace(__module__=7))
    assert _imported_by(module) == {"os", __name__}
    assert _imported_by(None) == set()


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/x/site-packages/y.py", True),
        (f"{sys.prefix}/y.py", True),
        (f"{sys.base_prefix}/lib/y.py", True),
        ("/x/y.py", False),
        (f"{sys.prefix}-other/y.py", False),
    ],
)
def test_files_of_the_environment_are_not_compared(file: str, expected: bool) -> None:
    assert _is_installed(file) is expected


def test_the_digest_of_a_file_is_of_its_contents(tmp_path: Path) -> None:
    one, other, missing = (tmp_path / name for name in ("one", "other", "missing"))
    one.write_bytes(b"x")
    other.write_bytes(b"x")
    found = digests(map(str, (one, other, missing)))
    assert found[str(one)] == found[str(other)] == hashlib.sha256(b"x").hexdigest()
    assert found[str(missing)] is None
