"""The second run, with recording, of a test in which two runs, or ranks, differ. Must not import torch."""

FEATURE = "divergence"

DIVERGED = "diverged"
"""The attribute of a failure's report that holds the case, or "", in which runs or ranks differed."""
