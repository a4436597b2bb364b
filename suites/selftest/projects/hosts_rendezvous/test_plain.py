"""Tests without ranks, and so without hosts: what they see of the launcher."""

import os


def test_passes():
    left = (
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "GROUP_RANK",
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_RANK",
        "PMI_RANK",
    )
    assert [name for name in (*left, "TORCHELASTIC_RUN_ID") if name in os.environ] == []


def test_fails():
    assert False
