"""torch.compile on ranks: caches that are kept between runs, and ranks that must compile the same code.

Must not import torch.
"""

FEATURE = "compiles"
FINDINGS = "compiles-findings"
"""Name, among the parts of an outcome, of what each rank has found of compiled graphs that went wrong."""
