"""Which claims of the suites each engine holds: collected in a run, written as page, Markdown and JSON.

Runs in the controller; must not import torch.
"""
