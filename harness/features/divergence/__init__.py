"""The second run, with recording, of a test in which two runs, or ranks, differ. Must not import torch."""

FEATURE = "divergence"
"""Name of the feature, by which the report of a failure has the case, or "", in which runs differed."""
