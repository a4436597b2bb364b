"""Take a lease of two GPUs, hold it and end it, some times: DIRECTORY GPUS TIMES SECONDS."""

import os
import sys
import time
from pathlib import Path

from lockstep.features.leases.lease_store import LeaseStore, Requirement, ResourceRequest
from lockstep.features.leases.leases import Leases

names = tuple(sys.argv[2])
need = Requirement(ResourceRequest(os.getpid(), "here", 0, names, True), 2)
for _ in range(int(sys.argv[3])):
    lease = Leases(LeaseStore(Path(sys.argv[1])), 30, print).take(need, lambda: None)
    begun = time.monotonic()
    print(*lease.gpus, end=" ", flush=True)
    time.sleep(float(sys.argv[4]))
    print(begun, time.monotonic(), flush=True)
    lease.end()
