"""A plugin that makes the controller take its output for a terminal, as pytest-rich wants it."""

import os
import sys

if "RANK" not in os.environ:
    sys.stdout.isatty = lambda: True
