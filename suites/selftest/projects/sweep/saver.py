"""A saver: each rank writes its part aside, syncs and renames it; rank 0 writes the marker last."""

import os

import torch
import torch.distributed as dist


def write(path, data):
    aside = path.with_suffix(".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def save(folder, step, is_marked_first=False, is_agreed=True):
    here = folder / f"step-{step}"
    here.mkdir(exist_ok=True)
    if is_marked_first and dist.get_rank() == 0:
        write(here / "done", b"1")
    error = None
    try:
        write(here / f"part-{dist.get_rank()}", bytes([step] * 8))
    except OSError as raised:
        error = raised
    is_saved = torch.tensor([error is None])
    if is_agreed:
        dist.all_reduce(is_saved, dist.ReduceOp.MIN)
    if not is_saved.item():
        raise RuntimeError(f"step {step} was not saved") from error
    if not is_marked_first and dist.get_rank() == 0:
        write(here / "done", b"1")


def load(folder):
    """Return the latest step that was saved, and the bytes of all parts."""
    (*_, here) = sorted(path.parent for path in folder.glob("step-*/done"))
    return int(here.name[5:]), b"".join((here / f"part-{rank}").read_bytes() for rank in range(2))
