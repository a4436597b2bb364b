"""The plugin of leaks: a guard in each rank reports what tests leave open, and ends their processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.features.leaks.guard import LeakGuard, Policy

_GUARD = "lockstep.features.leaks.guard"


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append(_GUARD)


def pytest_ranks_guard(policy: Policy) -> LeakGuard:
    from lockstep.features.leaks.guard import LeakGuard

    return LeakGuard(policy)
