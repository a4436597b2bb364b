"""Timelines: the calls of all ranks in a test, as text, as a page, for Perfetto and for `torchfrtrace`.

Drawn in the controller, of the flight records that ranks send. Must not import torch.
"""

FEATURE = "timeline"
