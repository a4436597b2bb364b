"""The fixture `sweep`, and what it takes. Inside a rank; imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lockstep.backends import meets
from lockstep.bounds import shown
from lockstep.features.sweep.points import DEFAULT_KINDS, KINDS, Kind
from lockstep.features.sweep.rank import Crash, Functions, RankSweep

if TYPE_CHECKING:
    from lockstep.features.injection.lost_peers import LostPeers
    from lockstep.rank.session import RankSession

__tracebackhide__ = True  # under pytest a failure points to the call

Folder = str | os.PathLike[str]


class Sweep:
    """Runs a function under a fault at each of its collectives and of its operations on files.

    Args:
        lost_peers: the ranks that this one has lost.
        part: number of the part of all points that the test runs, from 0, and number of parts.
    """

    def __init__(self, session: RankSession, lost_peers: LostPeers, part: tuple[int, int]) -> None:
        self._session, self._lost_peers, self._part = session, lost_peers, part
        self._has_run = False

    def __call__(
        self,
        save: Callable[[], object],
        *,
        then: Callable[[Crash], object],
        files: Folder | Sequence[Folder],
        prepare: Callable[[], object] | None = None,
        kinds: Sequence[Kind] = DEFAULT_KINDS,
    ) -> None:
        """Run `save` once, recorded, and then under a fault of each kind at each of its moments.

        All ranks call it, once a test. A fault that ends a rank ends its world: the test then begins again on
        a new one, up to this call, which continues with the claim.

        Args:
            save: what is disturbed, on a world that `prepare` has prepared.
            then: the claim, which must hold whatever happened. It gets a `Crash`, and of `save` nothing but
                the files, as it may run in other processes.
            files: the directory, or directories, below which `save` writes. Before each point they are put
                back to what was in them at the call.
            prepare: called before each point; it makes models, groups, and the files of an earlier save.
            kinds: of faults.

        Raises:
            TypeError: an argument has another type.
            ValueError: a kind is unknown, or there is no directory.
            RuntimeError: the world cannot be swept, or the test has a sweep already.
        """
        __tracebackhide__ = True
        self._refuse()
        functions = Functions(save, then, prepare or _nothing)
        for name, function in vars(functions).items():
            if not callable(function):
                raise TypeError(f"sweep: {name} is {shown(function)}; it is a function")
        _check_kinds(kinds)
        folders = _folders_of(files)
        self._has_run = True
        sweep = RankSweep(self._session, functions, folders, self._lost_peers)
        try:
            sweep.run(tuple(dict.fromkeys(kinds)), self._part)
        finally:
            sweep.end()

    def _refuse(self) -> None:
        world = self._session.world
        if not meets(world.backend):
            raise RuntimeError("sweep: a fake world is one process, and loses no rank")
        if len(world.hosts) > 1:
            raise RuntimeError(f"sweep: the ranks are on {len(world.hosts)} hosts; a sweep needs them on one")
        if not self._session.rank.spec.key.has_group:
            raise RuntimeError("sweep: this world starts without a default process group (group=False)")
        if self._has_run:
            raise RuntimeError("sweep: a test has one sweep; write another test for the second one")


def _nothing() -> None: ...


def _check_kinds(kinds: Sequence[Kind]) -> None:
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
        raise ValueError(f'sweep: kinds={shown(kinds)}: a list, such as ["kill", "fail"]')
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"sweep: there is no kind {shown(wrong[0])}; the kinds are {', '.join(KINDS)}")


def _folders_of(files: Folder | Sequence[Folder]) -> tuple[str, ...]:
    given = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(given, list | tuple) or not all(isinstance(each, str | os.PathLike) for each in given):
        raise TypeError(f"sweep: files={shown(files)}: it is a directory, or a list of directories")
    if not given:
        raise ValueError("sweep: files=[]: name the directory below which the function writes")
    folders = tuple(os.path.abspath(each) for each in given)
    if wrong := next((each for each in folders if os.path.exists(each) and not os.path.isdir(each)), None):
        raise ValueError(f"sweep: files: {wrong} is no directory")
    return folders
