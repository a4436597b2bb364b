"""How many examples are tried: few unless a profile is asked for by name, as `--hypothesis-profile=long`."""

import pytest
from hypothesis import settings

_UNASKED = ("default", "ci")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let tests of this directory be made under the profile `quick`; tests keep the one they are made under."""
    found = settings.get_current_profile_name()
    if found in _UNASKED:
        settings.register_profile(
            "quick",
            settings.get_profile(found),
            max_examples=20,
            derandomize=True,
            database=None,
            deadline=None,
        )
        settings.load_profile("quick")
    try:
        return (yield)
    finally:
        settings.load_profile(found)
