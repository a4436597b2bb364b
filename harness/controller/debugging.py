"""`--rank-pdb` in the controller: what is wrong with it, the loan of the terminal, Ctrl-C, and quitting.

Runs in the controller; must not import torch. What a rank does with the terminal is in `rank.debugger`.
"""

from __future__ import annotations

import contextlib
import pkgutil
import signal
import threading
from collections.abc import Iterator, Mapping

import pytest

from harness.launch.terminal import Terminal
from harness.protocol import WorldKey
from harness.world.world import World


class Debugging:
    """One run's debugger in a rank; does nothing without `--rank-pdb`.

    Attributes:
        terminal: what the rank gets as its standard streams, None without a debugger.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._quits = False
        self.terminal = _take_hold(config)

    def check(self, asking: Mapping[str, WorldKey]) -> None:
        """Refuse a debugger that would reach no test on ranks, or ranks that only a `--rank-pdb` reaches.

        Args:
            asking: the world of each test that runs on ranks, by its node id.

        Raises:
            pytest.UsageError: with what was wrong and what to write.
        """
        rank = self._config.getoption("rank_pdb")
        if rank is None:
            _check_other_debuggers(self._config, asking)
        elif not any(is_debugged(key, self._config) for key in asking.values()):
            largest = max((key.size for key in asking.values()), default=0)
            has = (
                f"the largest world has the ranks 0 to {largest - 1}" if largest else "no test runs on ranks"
            )
            raise pytest.UsageError(f"--rank-pdb {rank}: there is no such rank: {has}")

    @contextlib.contextmanager
    def attending(self, world: World) -> Iterator[None]:
        """While the world runs an item, offer each Ctrl-C to its debugger first; note if the user quits."""
        if self.terminal is None:
            yield
            return
        with _passing_on_interrupts(world):
            yield
        self._quits = world.has_quit_debugger()

    def has_quit(self) -> bool:
        """Whether the user has quit the debugger, and with it the run."""
        return self._quits

    def close(self) -> None:
        """Take the terminal back."""
        if self.terminal is not None:
            self.terminal.close()
            self.terminal = None


def is_debugged(key: WorldKey, config: pytest.Config) -> bool:
    """Whether a world has the rank of `--rank-pdb`."""
    rank: int | None = config.getoption("rank_pdb")
    return rank is not None and rank < key.size


def check_options(config: pytest.Config) -> None:
    """Refuse a `--rank-pdb` that no run can satisfy.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    rank = config.getoption("rank_pdb")
    if rank is None:
        return
    if rank < 0:
        raise pytest.UsageError(f"--rank-pdb {rank}: ranks count from 0")
    if getattr(config.option, "dist", "no") != "no":
        raise pytest.UsageError(
            "--rank-pdb needs the terminal, which the processes of pytest -n do not have; leave out -n"
        )
    if config.option.usepdb_cls:
        name = ":".join(config.option.usepdb_cls)
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise pytest.UsageError(f"--pdbcls {name}: {error}") from None


def _check_other_debuggers(config: pytest.Config, asking: Mapping[str, WorldKey]) -> None:
    for name, option in (("usepdb", "--pdb"), ("trace", "--trace")):
        if asking and config.getoption(name):
            raise pytest.UsageError(
                f"{option} alone cannot reach into ranks, and {next(iter(asking))} runs on ranks. Add "
                "--rank-pdb 0 for a debugger in rank 0 (it works without --pdb, too), or deselect the tests "
                "marked `ranks` with -m 'not ranks'"
            )


def _take_hold(config: pytest.Config) -> Terminal | None:
    """Return the streams that pytest was started with: its capture has put others in their place."""
    rank: int | None = config.getoption("rank_pdb")
    if rank is None:
        return None
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return Terminal(rank)
    capture.suspend_global_capture(in_=True)
    try:
        return Terminal(rank)
    finally:  # outside of tests pytest captures the input, and not the output
        capture.resume_global_capture()
        capture.suspend_global_capture()


@contextlib.contextmanager
def _passing_on_interrupts(world: World) -> Iterator[None]:
    """Let Ctrl-C, which the terminal sends to the controller alone, reach a prompt; else it ends the run."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield  # Python has signals in the main thread only; a run in the background has Ctrl-C ignored
        return
    ends = before if callable(before) else signal.default_int_handler
    signal.signal(signal.SIGINT, lambda number, frame: world.interrupt_debugger() or ends(number, frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
