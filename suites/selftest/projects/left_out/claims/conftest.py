"""An engine that takes no time to import."""

import pytest


@pytest.fixture
def engine(engine_name):
    return engine_name
