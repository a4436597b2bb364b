"""Pickling of what a process gets from another one that it shares nothing with. Must not import torch."""

from __future__ import annotations

import io
import pickle
from multiprocessing.managers import BaseProxy
from typing import Any

from lockstep.features.spawn.multiprocessing_internals import shares_state


class NotAlone(Exception):
    """The reason why a value can only be given to a process that its owner starts."""


def pickle_alone(value: object) -> bytes:
    """Return a value pickled, for a process that was started already.

    Raises:
        NotAlone: it has parts that processes share, or that other processes cannot find.
    """
    data = io.BytesIO()
    try:
        _Pickler(data).dump(value)
    except NotAlone:
        raise
    except Exception as error:  # of whatever the values do; a lock says that it can only be inherited
        raise NotAlone(f"an argument cannot be sent to a running process: {error}") from error
    return data.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if shares_state(type(value)) or isinstance(value, BaseProxy):
            raise NotAlone(f"an argument is shared: a {type(value).__name__}")
        if getattr(value, "__module__", "") == "__main__" and isinstance(
            getattr(value, "__name__", None), str
        ):
            raise NotAlone(f"{value.__name__} is defined in __main__")
        return NotImplemented
