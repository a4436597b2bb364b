"""`python -m lockstep`: as `python -m harness`, in projects with another package `harness`."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("lockstep.commands").main(sys.argv[1:]))
