"""The directory of all compile caches: which one it is, and how it is emptied.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_FOLDER = "lockstep-compiled"
_LEASE = ".lockstep-lease"


def cache_directory(config: pytest.Config) -> str:
    """Return the absolute path of the directory; empty if nothing is to be kept.

    It is that of `--compile-cache`, of the ini option `ranks_compile_cache`, of the environment variable by
    which torch is given one, or a folder in pytest's cache, in this order.
    """
    if given := config.getoption("ranks_compile_cache"):
        return str(config.invocation_params.dir / given)
    if given := config.getini("ranks_compile_cache"):
        return str((config.inipath.parent if config.inipath else config.rootpath) / given)
    if (given := os.environ.get(_VARIABLE)) and not _is_of_torch(given):
        return os.path.abspath(given)
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return ""
    of_pytest = os.path.expanduser(os.path.expandvars(config.getini("cache_dir")))
    return str(config.rootpath / of_pytest / "d" / _FOLDER)


def _is_of_torch(path: str) -> bool:
    """Whether a process has the variable from torch, which sets it as it imports its compiler."""
    return os.path.dirname(path) == tempfile.gettempdir() and "torchinductor_" in os.path.basename(path)


def prepare(config: pytest.Config) -> None:
    """Check the options, and empty the directory if that is wanted; once, before any worker starts.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    given = config.getoption("ranks_compile_cache")
    if given == "":
        raise pytest.UsageError("--compile-cache '': write the path of a folder")
    if hasattr(config, "workerinput"):
        return
    chosen = given or config.getini("ranks_compile_cache")
    directory = cache_directory(config)
    if chosen:
        name = "--compile-cache" if given else "ranks_compile_cache"
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"{name}: cannot make the folder: {error}") from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise pytest.UsageError(f"{name}: {directory} cannot be written to; choose another folder")
    if config.getoption("ranks_compile_cache_clear") and directory:
        clear(Path(directory))


def clear(directory: Path) -> None:
    """Remove the code of all ranks, of every torch and machine; what another run uses stays."""
    for lock in directory.glob(f"torch-*/world-*/rank-*{_LEASE}"):
        with open(lock, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                used = str(lock).removesuffix(_LEASE)
                warnings.warn(f"--compile-cache-clear: another run uses {used}, which stays", stacklevel=1)
                continue
            shutil.rmtree(str(lock).removesuffix(_LEASE), ignore_errors=True)
    for probes in directory.glob("torch-*/cpu"):
        shutil.rmtree(probes, ignore_errors=True)
