"""A module whose import does not end."""

import os
import pathlib
import time

pathlib.Path("reached-0.txt").write_text(str(os.getpid()))
time.sleep(300)
