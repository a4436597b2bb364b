"""Output of ranks shown while a test runs: live logs, records for `--log-file`, and `--setup-show`."""

from dataclasses import dataclass

FEATURE = "live_output"


@dataclass(frozen=True, slots=True)
class Shown:
    """Lines to show while the test runs: a record of a live log, say."""

    rank: int
    text: str
    to_file: bool = False
    """True if they are for the file of `--log-file`, False for the terminal."""
