"""The value of the fixture `world`: the world that a rank belongs to, as its tests use it."""

from __future__ import annotations

import copy
import numbers
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lockstep.backends import backend_named, backends_of, meets
from lockstep.specification import RankSpec

T = TypeVar("T")


class RankWorld:
    """A world, seen from one of its ranks.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
        backend: torch.distributed's name: "gloo", "nccl", "shm", "fake", or "cpu:gloo,cuda:nccl".
        device: Where this rank's tensors belong.
        seed: What random, numpy and torch were seeded with before the test, the same on every rank. For data
            that differs, seed a generator with `world.seed + world.rank`.
        host: Name of the host that this rank runs on.
        hosts: Names of the hosts of the world, in rank order.
        local_rank: This rank among those of its host, from 0.
        local_size: Number of ranks on this host.
        old_ranks: The numbers that its ranks have had when the test began, in rank order: of a world that
            `rebuild` has returned, those that are left.
    """

    def __init__(
        self, spec: RankSpec, device: torch.device, regroup: Callable[[], tuple[int, ...]] = tuple
    ) -> None:
        self.rank = spec.rank
        self.size = spec.key.size
        self.backend = spec.key.backend
        self.device = device
        self.seed = spec.seed
        place = spec.place
        self.hosts = (socket.gethostname(),) if place is None else place.hosts
        self.host = self.hosts[0 if place is None else place.host]
        self.local_rank = spec.rank if place is None else place.local_rank
        self.local_size = self.size if place is None else place.local_size
        self.old_ranks = tuple(range(self.size))
        self._number = spec.rank
        self._regroup = regroup
        self._shared_tmp_path = ""
        self._starts_with_group = spec.key.has_group
        self._was_left = False

    def __repr__(self) -> str:
        # The same on every rank, so that equal tracebacks read the same; reports name the rank themselves.
        return f"<world of {self.size}, {self.backend}, {self.device.type}>"

    @property
    def group(self) -> dist.ProcessGroup:
        """The default process group. Read it when you need it: a repaired world has a new one."""
        group = dist.group.WORLD
        if group is None and not self._starts_with_group:
            raise RuntimeError(
                "this world starts without a default process group (group=False): call "
                "torch.distributed.init_process_group() first"
            )
        if group is None:
            raise RuntimeError("the test has destroyed the default process group")
        return group

    @property
    def shared_tmp_path(self) -> Path:
        """A directory of this test that is the same on all ranks; `tmp_path` is each rank's own."""
        if not self._shared_tmp_path:
            if len(self.hosts) > 1:
                raise RuntimeError(
                    f"world.shared_tmp_path: the ranks are on {len(self.hosts)} hosts, and no directory is "
                    "known that all of them see: name one with --shared-dir DIR"
                )
            raise RuntimeError("world.shared_tmp_path exists only while a test runs")
        path = Path(self._shared_tmp_path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def enter_test(self, shared_tmp_path: str) -> None:
        """Set the directory that the ranks of the coming test share."""
        self._shared_tmp_path = shared_tmp_path

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """Return a device mesh over the ranks, one-dimensional over all of them by default.

        With two names, of which the first is "hosts", and no shape it has an axis over hosts and one over the
        ranks of each.

        Raises:
            ValueError: the shape does not have as many places as the world has ranks, or not every host has
                equally many.
            RuntimeError: ranks of this world have died, and the others have left it by `rebuild`.
        """
        self._refuse_if_left()
        if not shape and names is not None and len(names) == 2 and names[0] == "hosts":
            shape = (len(self.hosts), self.size // len(self.hosts))
            if self.local_size != shape[1] or self.size % shape[0]:
                raise ValueError(f"{self.size} ranks are not spread evenly over {shape[0]} hosts")
        shape = shape or (self.size,)
        places = int(torch.Size(shape).numel())
        if places != self.size:
            raise ValueError(f"a mesh of shape {shape} has {places} places, the world {self.size} ranks")
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def rebuild(self) -> RankWorld:
        """Leave the default process group, and meet the ranks that are left in a new one.

        All ranks that live call it, after others have died as the test expects. Groups and meshes of
        before are gone. The fixture `world` keeps its numbers; where ranks have died, `gather`, `assert_same`
        and `mesh` of it raise. No other test gets these ranks.

        Returns:
            the new world, whose ranks are numbered from 0, in the order of before.

        Raises:
            RuntimeError: the world has no group of its own, is on several hosts, or another rank does not
                call this.
        """
        if not meets(self.backend):
            raise RuntimeError(f"world.rebuild: a {self.backend} world is one process, and loses no rank")
        if not self._starts_with_group:
            raise RuntimeError(
                "world.rebuild: this world starts without a default process group (group=False): leave the "
                "one that the test has made, and make another"
            )
        if len(self.hosts) > 1:
            raise RuntimeError(
                f"world.rebuild: the ranks are on {len(self.hosts)} hosts; only a world on one can be rebuilt"
            )
        world = copy.copy(self)
        world.old_ranks = self._regroup()
        world.rank, world.size = world.old_ranks.index(self._number), len(world.old_ranks)
        world.local_rank, world.local_size = world.rank, world.size
        world._was_left, self._was_left = False, world.size != self.size
        return world

    def _refuse_if_left(self) -> None:
        if self._was_left:
            raise RuntimeError(
                f"{self.size} ranks were in this world, and the others have left it: use the world that "
                "rebuild() returned, `new = world.rebuild()`"
            )

    def barrier(self) -> None:
        """Wait until every rank is here."""
        backend_named(backends_of(self.backend)[self.device.type]).barrier(self.group, self.device)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank. A value must be picklable.

        Raises:
            RuntimeError: ranks of this world have died, and the others have left it by `rebuild`.
        """
        self._refuse_if_left()
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values  # type: ignore[return-value]

    def pick(self, values: Sequence[T]) -> T:
        """Return this rank's element of `values`: element N is for rank N.

        For data that differs between ranks in a property test: every rank draws the whole list, and picks. A
        draw that depends on the rank would make ranks search in different places, and fails the test.

        Raises:
            ValueError: there are fewer values than ranks.
        """
        if len(values) < self.size:
            raise ValueError(
                f"world.pick: {len(values)} values for {self.size} ranks; draw at least world.size of them, "
                "for example with st.lists(..., min_size=world.size)"
            )
        return values[self.rank]

    def assert_same(self, value: object) -> None:
        """Fail on every rank, with each rank's value, unless it is the same on all.

        Tensors are the same if dtype, shape and every bit of every element are (NaN equals NaN); containers
        are if what they contain is; anything else if `==` returns true.
        """
        __tracebackhide__ = True
        values = self.gather(_to_cpu(value))
        different = [rank for rank, other in enumerate(values) if not _is_same(values[0], other)]
        if different:
            listing = "\n".join(f"  rank {rank}: {other!r}" for rank, other in enumerate(values))
            names = ", ".join(map(str, different))
            raise AssertionError(f"ranks hold different values: {names} against 0\n{listing}")


def _to_cpu(value: object) -> object:
    match value:
        case torch.Tensor():
            return value.detach().cpu()
        case dict():
            return {key: _to_cpu(item) for key, item in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(_to_cpu(item) for item in value)
        case _:
            return value


def _is_same(left: object, right: object) -> bool:
    match left, right:
        case torch.Tensor(), torch.Tensor():
            return _is_same_tensor(left, right)
        case dict(), dict():
            return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
        case (list() | tuple(), list() | tuple()) if type(left) is type(right):
            return len(left) == len(right) and all(map(_is_same, left, right))
        case numbers.Number(), numbers.Number() if left != left:
            return right != right
        case _:
            return type(left) is type(right) and bool(left == right)


def _is_same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not (left.is_floating_point() or left.is_complex()):
        return torch.equal(left, right)
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    same = (left == right) & (left.signbit() == right.signbit())  # 0.0 is not -0.0
    return bool((same | (left.isnan() & right.isnan())).all())
