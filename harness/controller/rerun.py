"""The command that runs one item again, with the options that change how it runs.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shlex

import pytest

from lockstep.controller.pytest_internals import option_groups
from lockstep.options import DEFAULTS

_PYTEST_OPTIONS = {"capture": "fd", "runxfail": False}  # `-s` may hide in a word such as `-vsx`

# Options of pytest and pytest-xdist select tests, write reports and distribute work: one test that is run
# again needs none of them, except those that change how it runs. `DEFAULTS` and features have those of ours.
_NOT_REPEATED = {
    "general",
    "terminal reporting",
    "collect",
    "debugconfig",
    "logging",
    "xdist",
    "cov",
    "ranks",
    "conformance",
}
_REPEATED = {"importmode", "rootdir", "confcutdir", "noconftest", "assertmode", "pyargs"}

_others_key = pytest.StashKey[list[str]]()


def rerun_line(item: pytest.Item) -> str:
    """Return the command that runs an item again: its node id, then the options that the user chose."""
    config = item.config
    command = config.hook.pytest_ranks_command() or ("pytest",)
    nodeid, *selecting = config.hook.pytest_ranks_rerun(item=item) or [item.nodeid]
    if nodeid == "--pyargs":
        words = [*command, nodeid, selecting.pop(0)]
    else:
        path = os.path.relpath(item.path, config.invocation_params.dir)
        words = [*command, f"{path}::{nodeid.split('::', 1)[1]}"]
        if config.option.inifilename:
            words += ["-c", str(config.option.inifilename)]
    ini = [value for value in config.option.override_ini or () if not value.startswith("cache_dir=")]
    for flag, values in (("-o", ini), ("-p", config.option.plugins)):
        words += [word for value in values or () for word in (flag, str(value))]
    of_features = itertools.chain.from_iterable(
        options.items() for options in config.hook.pytest_ranks_repeated_options()
    )
    for option, default in (*DEFAULTS.items(), *of_features, *_PYTEST_OPTIONS.items()):
        value = config.getoption(option, default)  # without it under `-p no:capture`
        if value != default:
            words += [_option_of(config, option), *([] if value is True else [str(value)])]
    others = (word for word in _others_options(config) if word != nodeid)  # `--pyargs` once
    return shlex.join([*words, *selecting, *others])


def _option_of(config: pytest.Config, dest: str) -> str:
    """Return the name of an option: "--backend", if it is ours in this project, for `ranks_backend`."""
    short = f"--{dest.removeprefix('ranks_').replace('_', '-')}"
    is_ours = any(action.dest == dest and short in action.option_strings for action in option_groups(config))
    return short if is_ours else f"--{dest.replace('_', '-')}"


def _others_options(config: pytest.Config) -> list[str]:
    """Return, as they were typed, the options of other plugins and of the user's own conftests."""
    if _others_key in config.stash:
        return config.stash[_others_key]
    actions = option_groups(config)
    names = {name: action for action in actions for name in action.option_strings}
    words = [str(word) for word in config.invocation_params.args]
    repeated: list[str] = []
    while words and words[0] != "--":
        taken = 1
        # Whole, with `=`, or short with its value attached.
        if action := names.get(words[0]) or names.get(words[0].split("=", 1)[0]) or names.get(words[0][:2]):
            taken += _count_values(action, words)
            if actions[action] not in _NOT_REPEATED or action.dest in _REPEATED:
                repeated += words[:taken]
        words = words[taken:]
    config.stash[_others_key] = repeated  # they are the same for every test
    return repeated


def _count_values(action: argparse.Action, words: list[str]) -> int:
    """Count the words after an option's that are its values, as argparse would."""
    if words[0] not in action.option_strings:  # the value is part of the word
        return 0
    if action.nargs is None or isinstance(action.nargs, int):
        return 1 if action.nargs is None else action.nargs
    values = list(itertools.takewhile(lambda word: not word.startswith("-"), words[1:]))
    return min(len(values), 1) if action.nargs == "?" else len(values)
