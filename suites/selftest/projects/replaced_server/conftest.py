"""A rank that kills its server as it starts, once it is armed."""

import os
import pathlib
import signal

if os.environ.get("RANK") == "1" and pathlib.Path("armed").exists():
    pathlib.Path("armed").unlink()
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(3)
