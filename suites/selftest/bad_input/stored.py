"""Strategies of bad input for the commands of `python -m lockstep`, and of damaged files that are stored."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hypothesis import strategies as st

from suites.selftest.bad_input.attempt import FIFO, RANKS, Attempt
from suites.selftest.bad_input.sessions import PATHS, PLACES, PYTEST, damaged, garbage, texts

_CELL = {"outcome": "held", "seconds": 0.5, "cases": [{"name": "", "outcome": "held"}]}
_RUN = {
    "when": "2026-01-01T00:00:00+00:00",
    "seconds": 1.5,
    "arguments": ["suites"],
    "versions": {"torch": "2.13.0"},
    "ended": "complete",
    "deselected": [],
}
TABLE = json.dumps(
    {
        "format": 1,
        "engines": ["mine"],
        "runs": [_RUN],
        "warnings": {"mine": {"slow": 1}},
        "claims": [{"id": "suites/core/test_a.py::test_a[x]", "title": "A", "engines": {"mine": _CELL}}],
    }
)
_CLASS = (
    "from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu\n"
    "class TestIt(MultiProcessTestCase):\n    world_size = 1 + 1\n"
    "    def setUp(self):\n        super().setUp()\n        self._spawn_processes()\n"
    "    @skip_if_lt_x_gpu(2)\n    def test_it(self):\n        self.assertEqual(self.rank, 0)\n"
)
ROSTER = json.dumps(
    {
        "secret": "00" * 32,
        "hosts": [{"name": "a", "address": "127.0.0.1"}, {"name": "b", "address": "127.0.0.1", "port": 1}],
        "environ": {},
        "command": [],
    }
).replace('"127.0.0.1"', '"127.0.0.1", "gpus": []')
SECRET = {"LOCKSTEP_HOSTS_SECRET": "s" * 32}
_LEASE = '{"pid": 1, "where": "/", "ranks": 1, "gpus": [], "exclusive": false}'
_json_words = st.sampled_from(
    ["null", "[]", "{}", "3", "-1", '"x"', "1e999", "NaN", '"\\ud800"', "[[1]]", "9" * 5000]
)
# No FIFO: a command waits for who writes to it, as `cat` does.
_paths = st.sampled_from(("stored", "other", "test_sample.py", *(each for each in PATHS if each != "fifo")))
_OPTION = re.compile(r"^ +(--[a-z-]+)", re.MULTILINE)


def _options_of(command: str) -> list[str]:
    commands = ArgumentParser().add_subparsers()
    room = "features.hosts" if command == "hosts" else command
    import_module(f"lockstep.{room}.command").add_to(commands)
    return _OPTION.findall(commands.choices[command].format_help())


@st.composite
def _odd_arguments(draw: Callable[..., Any], command: str) -> tuple[str, ...]:
    names = st.sampled_from(_options_of(command))
    words: list[str] = draw(st.lists(st.one_of(names, _paths, texts, names.flatmap(_with_value)), max_size=4))
    return tuple(words)


def _with_value(name: str) -> st.SearchStrategy[str]:
    return texts.map(lambda value: f"{name}={value}")


def _stored(text: str, junk: st.SearchStrategy[str] = _json_words) -> st.SearchStrategy[dict[str, Any]]:
    contents = st.one_of(damaged(text, junk), garbage, st.just(text))
    return st.builds(lambda one, other: {**PLACES, "stored": one, "other": other}, contents, st.just(text))


def _with_files(command: str, *forms: tuple[str, ...], text: str, **junk: Any) -> st.SearchStrategy[Attempt]:
    return st.builds(
        lambda form, odd, files: Attempt(("harness", command, *form, *odd), files),
        st.sampled_from(forms),
        st.just(()) | _odd_arguments(command),
        _stored(text, **junk),
    )


commands = st.one_of(
    _with_files(
        "conformance",
        *(("--merge", "stored"), ("--merge", "stored", "other"), ("--diff", "other", "stored"), ("--diff",)),
        text=TABLE,
    ),
    _with_files(
        "port",
        ("stored",),
        ("stored", "other"),
        ("--write", "stored"),
        ("--diff", "stored"),
        text=_CLASS,
        junk=texts,
    ),
    st.builds(
        # The last `--wait` counts: a drawn one may be of years.
        lambda form, odd: Attempt(("harness", "hosts", *form, *odd, "--wait=0.1"), PLACES, SECRET),
        st.sampled_from([(), ("--node=1/2", "--meet=127.0.0.1:1"), ("--node=0/2", "--meet=127.0.0.1:0")]),
        _odd_arguments("hosts"),
    ),
    st.lists(texts, max_size=3).map(lambda words: Attempt(("harness", *words), PLACES)),
)


def held_lease(contents: str | bytes | None) -> Attempt:
    """Return a session on ranks beside another one that has a lease, in whose file are these contents."""
    files = {**PLACES, "pytest.ini": "[pytest]\nranks_at_once = 2\nranks_wait = 1\n"}
    lease = "leases/00000000000000000001-1.lease"
    environ = {"LOCKSTEP_LEASES": "leases"}
    return Attempt(
        (*PYTEST, "--world-timeout=20"), {**files, lease: contents}, environ, (lease,), seconds=RANKS
    )


def roster(contents: str | bytes | None) -> Attempt:
    """Return a session on ranks, of several hosts by a roster with these contents."""
    files = {**PLACES, "pytest.ini": "[pytest]\n", "roster.json": contents}
    return Attempt((*PYTEST, "--world-timeout=20"), files, {"LOCKSTEP_HOSTS": "roster.json"}, seconds=RANKS)


found_by_itself = st.one_of(
    st.builds(function, st.one_of(st.just(FIFO), garbage, damaged(text, _json_words)))
    for function, text in ((held_lease, _LEASE), (roster, ROSTER))
)
"""Sessions that read a damaged file which the user has not named."""
