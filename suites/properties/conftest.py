"""Profiles and fixtures of property tests: few examples, or as `--hypothesis-profile` chooses."""

import pytest
from hypothesis import Phase, settings

from lockstep.conformance import Capability, offers

# The capability that an option requires of an engine.
REQUIRED = {
    "precision": Capability.MIXED_PRECISION,
    "offload": Capability.OFFLOAD,
    "backward_prefetch": Capability.PREFETCH,
    "forward_prefetch": Capability.PREFETCH,
    "sync_module_states": Capability.SYNC_STATES,
}
_UNREQUIRED = ("default", "ci")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Collect the tests of this directory under the profile `quick`, which they keep."""
    found = settings.get_current_profile_name()
    if found in _UNREQUIRED:
        phases = [phase for phase in Phase if phase != Phase.explain]
        settings.register_profile(
            "quick", settings.get_profile(found), max_examples=20, deadline=None, phases=phases
        )
        settings.load_profile("quick")
    try:
        return (yield)
    finally:
        settings.load_profile(found)


@pytest.fixture(scope="session")
def offered(engine):
    """Return what of a drawn tree and of drawn options the engine has.

    One example that requires more would skip the whole test.
    """

    def of(tree, options):
        found = {k: v for k, v in options.items() if k not in REQUIRED or offers(engine, REQUIRED[k])}
        if not offers(engine, Capability.SHARDING):
            found["strategy"] = "NO_SHARD"
        elif found.get("strategy") == "NO_SHARD" and not offers(engine, Capability.REPLICATION):
            del found["strategy"]
        # Where parameters are DTensors, those without dimensions can be replicated only.
        return tree if offers(engine, Capability.PLAIN_PARAMETERS) else tree.without_scalars(), found

    return of
