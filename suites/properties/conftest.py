"""How many examples are tried: few unless a profile is asked for by name, as `--hypothesis-profile=long`."""

import pytest
from hypothesis import Phase, settings

_UNASKED = ("default", "ci")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let tests of this directory be made under the profile `quick`, and so keep it."""
    found = settings.get_current_profile_name()
    if found in _UNASKED:
        phases = [phase for phase in Phase if phase != Phase.explain]
        settings.register_profile(
            "quick", settings.get_profile(found), max_examples=20, deadline=None, phases=phases
        )
        settings.load_profile("quick")
    try:
        return (yield)
    finally:
        settings.load_profile(found)
