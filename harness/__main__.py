"""`python -m lockstep`: the commands besides running pytest. Must not import torch."""

import sys

from lockstep.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
