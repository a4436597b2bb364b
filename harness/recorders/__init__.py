"""Logs of a rank: the collectives it issued, the dtypes its modules received.

Inside a rank; imports torch, and of harness `tracebacks` alone. A query about something that was never seen
raises: a check that saw nothing must not pass.
"""

from lockstep.recorders.collectives import Collective, CollectivesLog
from lockstep.recorders.execution import Event, ExecutionLog, active_log
from lockstep.recorders.forward_dtypes import ForwardCall, ForwardDtypes
from lockstep.recorders.tensors import named_tensors

__all__ = [
    "Collective",
    "CollectivesLog",
    "Event",
    "ExecutionLog",
    "ForwardCall",
    "ForwardDtypes",
    "active_log",
    "named_tensors",
]
