import os
import signal
import time


def test_ends():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)
