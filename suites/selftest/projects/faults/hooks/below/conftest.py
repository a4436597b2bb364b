"""Broken on rank 1 while the first test of test_faults.py, which comes later, is sent to the ranks."""

import os

if os.environ.get("RANK") == "1":
    raise ValueError("below")
