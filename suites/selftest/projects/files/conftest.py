"""A conftest that changes the environment."""

import os

os.environ.setdefault("SET_BY_CONFTEST", "in the controller")
os.environ.pop("REMOVED_BY_CONFTEST", None)
