# For type checkers: `lockstep.x` is `harness.x`. Names are not known where `harness` is another package.
from typing import Any

from harness.assertions import *

def __getattr__(name: str) -> Any: ...
