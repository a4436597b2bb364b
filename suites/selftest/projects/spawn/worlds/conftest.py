"""A fixture of the session that calls spawn."""

import pytest
import torch.multiprocessing as mp


def write(rank, path):
    (path / str(rank)).touch()


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("files")
    mp.spawn(write, (path,), nprocs=2)
    return path
