"""Timelines: the calls of all ranks in a test, as text, as a page, for Perfetto and for `torchfrtrace`.

Drawn in the controller, of the flight records that ranks send. Must not import torch.
"""

FEATURE = "timeline"

PICTURES = "timeline pictures"
"""Name of the part of an outcome in which other features put pictures for the page: titles and SVG."""
