"""Plugins of others, which take 60 ms of a rank's start. The server imports them with this module."""

from __future__ import annotations

from importlib.util import find_spec

from lockstep.features.other_plugins import PRELOADED
from lockstep.features.other_plugins.pytest_internals import import_with_rewritten_asserts

import_with_rewritten_asserts([name for name in PRELOADED if find_spec(name.partition(".")[0])])
