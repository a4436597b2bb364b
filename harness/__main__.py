"""`python -m harness`: the commands besides running pytest. Must not import torch."""

import sys

from harness.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
