"""What a report of a failed test shows when the failure was inside the engine."""

from __future__ import annotations

import pytest

SECOND_DERIVATIVE = """
    import pytest, torch
    from torch import nn
    from harness.engine import FullyShardedDataParallel, fully_shard

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("front", [fully_shard, FullyShardedDataParallel])
    def test_x(world, front):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(world.device)
        inner = front(model[0])
        front(nn.Sequential(inner, model[1]))(torch.ones(2, 4, device=world.device)).sum().backward(
            create_graph=True
        )
"""


def test_a_report_of_an_exception_in_backward_does_not_read_memory_that_is_gone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    pytester.makepyfile(SECOND_DERIVATIVE)
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(failed=2)
    assert "SIGSEGV" not in result.stdout.str()
    result.stdout.fnmatch_lines(["E*NotImplementedError: backward with create_graph=True is not built*"])
