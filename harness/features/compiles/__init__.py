"""torch.compile on ranks: caches that are kept between runs, and ranks that must compile the same code.

Must not import torch.
"""

FEATURE = "compiles"
