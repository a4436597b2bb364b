"""Run pytest, as the leader of a session whose terminal is the first argument, if there is one."""

import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored in what a shell runs in the background
if terminal := sys.argv[1]:
    # A session's leader gets a terminal by opening it, and with it the signals of its keys.
    opened = os.open(terminal, os.O_RDWR)
    for stream in range(3):
        os.dup2(opened, stream)
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[2:]])
