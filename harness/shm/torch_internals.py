"""The one private name of torch that the backend uses."""

from __future__ import annotations

import datetime
from typing import Any

import torch._C._distributed_c10d as c10d


def backend_options(name: str, timeout: datetime.timedelta) -> Any:
    """Return the options of a backend, as torch.distributed reads its timeout from them.

    Seen in torch 2.13 as `Backend.Options` of the C++ classes; `torch.distributed.Backend` is another class.
    If it moves: look for what `ProcessGroupGloo.Options` derives from.
    """
    return c10d.Backend.Options(name, timeout)
