"""The project's pytest configuration: the file that pytest reads, and findings on its options.

Runs in the process of the command. Standard library only.
"""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.doctor.finding import Finding, note, ok, problem


@dataclass(frozen=True, slots=True)
class Configuration:
    """The pytest configuration file that a project's run would read, and Lockstep's options in it."""

    path: Path | None
    options: dict[str, Any]
    addopts: str = ""


def configuration(folder: Path) -> Configuration:
    """Find the configuration file that pytest reads in a folder: there or in one above."""
    for each in (folder, *folder.parents):
        for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
            if (each / name).is_file():
                return _read(each / name) or Configuration(each / name, {})
        for name in ("pyproject.toml", "tox.ini", "setup.cfg"):
            found = _read(each / name) if (each / name).is_file() else None
            if found is not None:
                return found
    return Configuration(None, {})


def _read(path: Path) -> Configuration | None:
    """Return the options of a file; None if it has no section for pytest, or pytest would refuse it."""
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            content = tomllib.loads(text)
            section = content.get("tool", {}) if path.name == "pyproject.toml" else content
            options = section.get("pytest")
            if options is not None and path.name == "pyproject.toml":
                options = options.get("ini_options", options)
        else:
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(text)
            section = "tool:pytest" if path.name == "setup.cfg" else "pytest"
            options = dict(parser[section]) if parser.has_section(section) else None
    except (OSError, ValueError, AttributeError, RecursionError, configparser.Error):  # the third: no table
        return None
    if not isinstance(options, dict):
        return None
    ours = {key: value for key, value in options.items() if key.startswith("ranks_")}
    return Configuration(path, ours, str(options.get("addopts", "")))


def start_method(project: Configuration) -> Finding:
    chosen = project.options.get("ranks_start_method", "forkserver")
    if chosen == "spawn":
        what = f"spawn, set in {project.path}"
        why = "each rank is a new interpreter that imports torch: two seconds instead of 0.1"
        remedy = "take it out unless a module of yours cannot be imported before a fork"
        return note("start-method", what, why, remedy)
    return ok("start-method", "forkserver: ranks are forked from a server that has imported torch")


_ADOPTED = {
    "torch": "MultiProcessTestCase and MultiProcContinuousTest run on ranks",
    "deepspeed": "DistributedTest runs on ranks",
    "spawn": "plain calls of spawn run on ranks, other processes that tests start come from their server",
}


def adoption(project: Configuration) -> Finding:
    """Look at the kinds of existing tests that the project adopts, and at what they need."""
    kinds = _adopted_kinds(project)
    if unknown := [kind for kind in kinds if kind not in _ADOPTED]:
        what = f"unknown kind {unknown[0]!r} in ranks_adopt"
        remedy = f"choose among {', '.join(_ADOPTED)}"
        return problem("adoption", what, "pytest refuses to start", remedy)
    if "spawn" in kinds and (setting := _without_server(project)):
        what = f"{', '.join(kinds)}, with {setting}"
        why = "no server is on this machine: processes of tests are new interpreters, as without adoption"
        return note("adoption", what, why, f"take {setting} out for tests that spawn")
    if not kinds:
        return ok("adoption", "none: set ranks_adopt where tests start their own processes")
    return ok("adoption", "; ".join(f"{kind}: {_ADOPTED[kind]}" for kind in kinds))


def _without_server(project: Configuration) -> str:
    """Return the setting under which ranks are not forked from a server of this machine; "" for none."""
    if project.options.get("ranks_start_method") == "spawn":
        return "ranks_start_method = spawn"
    return "--hosts in addopts" if re.search(r"--(ranks-)?hosts\b", project.addopts) else ""


def _adopted_kinds(project: Configuration) -> list[str]:
    """Return the words of `--ranks-adopt` in the project's addopts, else those of the ini option."""
    given = re.search(r"--ranks-adopt(?:=|\s+)(\S+)", project.addopts)
    value = given[1].strip("'\"").replace(",", " ") if given else project.options.get("ranks_adopt", "")
    return [str(word) for word in (value if isinstance(value, list) else str(value).split())]


def configured(project: Configuration) -> Iterator[Finding]:
    """Look at the project's options that bound what can run."""
    if project.path is None:
        yield ok("configuration", "no configuration file of pytest here or above")
        return
    shown = ", ".join(
        f"{key} = {json.dumps(value, default=str)}" for key, value in sorted(project.options.items())
    )
    yield ok("configuration", f"{project.path}: {shown or 'no option of Lockstep'}")
    at_once = str(project.options.get("ranks_at_once", ""))
    try:
        is_too_few = int(at_once) < 2
    except ValueError:  # pytest reports what is wrong with it
        is_too_few = False
    if is_too_few:
        what, why = f"ranks_at_once = {at_once}", "a test on two ranks is refused"
        yield problem("ranks-at-once", what, why, f"set it to 2 or more in {project.path}")
