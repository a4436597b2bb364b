"""What a report of a failed test shows when the failure was inside the engine."""

import pytest
import torch
from torch import nn

from harness.engine import FullyShardedDataParallel, fully_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("front", [fully_shard, FullyShardedDataParallel])
def test_a_failure_report_reads_no_freed_memory(world, request, monkeypatch, front):
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(world.device)
    inner = front(model[0])
    outer = front(nn.Sequential(inner, model[1]))
    with pytest.raises(NotImplementedError) as caught:
        outer(torch.ones(2, 4, device=world.device)).sum().backward(create_graph=True)
    report = str(request.node.repr_failure(caught))  # where it reads such memory, it ends the rank
    assert "\nfull = UnshardedParams(dtypes=" in report  # it shows what functions were given
    assert "E           NotImplementedError: backward with create_graph=True is not built" in report
