"""An accelerator of another maker, as torch sees it: two devices of type "pretended".

Its tensors are on the CPU, its collectives are gloo's, and it writes what it is asked to do to PRETENDED_LOG.
"""

import os

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretended"
operators = torch.library.Library("aten", "IMPL")


def note(*words):
    with open(os.environ["PRETENDED_LOG"], "a") as log:
        print(os.environ.get("RANK", "-"), *words, file=log)


class Module:
    """`torch.pretended`."""

    current = 0
    failed = False
    used = True
    stream = "of old"

    def device_count(self):
        return int(os.environ.get("PRETENDED_COUNT", "2"))

    def is_available(self):
        return self.device_count() > 0

    def is_initialized(self):
        return self.used

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return self.current

    def set_device(self, device):
        self.current = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        note("set", self.current)

    def manual_seed_all(self, seed):
        note("seed", seed)

    def synchronize(self):
        self.raise_if_failed()

    def raise_if_failed(self):
        """Raise, once a test has said so, as a GPU does after an assert in a kernel."""
        if self.failed:
            raise RuntimeError("pretended error: an assert in a kernel\nmore of it")

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    def reset_peak_memory_stats(self):
        note("peak")


def empty(size, *, dtype=None, **_):
    return torch.empty(size, dtype=dtype, device="cpu")


def empty_strided(size, stride, *, dtype=None, **_):
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def group_of(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def register():
    """Do what torch has such a package do at the end of `import torch`."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    dist.Backend.register_backend("pccl", group_of, devices=["cpu", NAME])
    operators.impl("empty.memory_format", empty, "PrivateUse1")
    operators.impl("empty_strided", empty_strided, "PrivateUse1")
