"""`--rank-pdb` and `--rank-debugpy`: a debugger in one rank, while the others wait without a deadline."""

from typing import Literal

FEATURE = "debugger"

State = Literal["waits", "prompts", "runs", "left", "quits"]
"""It waits for an IDE to attach; it waits at its prompt; the test runs under it; it is closed; it was quit,
and with it the run."""

Chosen = tuple[int, int]
"""The rank that is debugged, and the port at which an IDE attaches to it; 0 where none does."""
