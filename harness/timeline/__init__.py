"""Timelines: the calls of all ranks in a test, as text, as a page, for Perfetto and for `torchfrtrace`.

Runs in the controller, loaded where a timeline is made; ranks use `entries`. Must not import torch.
"""

TIMELINES = "harness-timelines"
"""Name of the plugin that writes timelines to files."""
