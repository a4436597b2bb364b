"""Watch how much memory the CPU tensors of a process hold."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Within it, know every storage that an operation has read or written, and what is live of them.

    Operations of backward, of optimizers and of C++ (DDP's reducer, the handing over to collectives) are seen
    like any other. What an operation allocates and releases inside itself is not, nor is what a backend
    copies for the wire. Nothing lives longer by being watched: storages are known by weak references.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: set[StorageWeakRef] = set()
        self._peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again, as operations on what the DTensor holds
        result = func(*args, **(kwargs or {}))
        found = (leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor))
        self._known.update(StorageWeakRef(one.untyped_storage()) for one in found if one.device.type == "cpu")
        self._peak = max(self._peak, self.live())
        return result

    def live(self) -> int:
        """Return the bytes that are allocated now; a storage may have been resized at any time."""
        storages = {ref: UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._known}
        self._known = {ref for ref, storage in storages.items() if storage is not None}
        alive = [storage for storage in storages.values() if storage is not None]
        return _covered((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in alive if one.nbytes())

    def take_peak(self) -> int:
        """Return the most bytes that were live after an operation since the last call, or are now."""
        peak, self._peak = max(self._peak, self.live()), 0
        return peak


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many bytes lie in any of `spans`: a storage may be a part of another one."""
    covered = reached = 0
    for first, last in sorted(spans):
        covered += max(last - max(first, reached), 0)
        reached = max(reached, last)
    return covered
