"""The commands besides running pytest: `python -m harness`. Must not import torch."""

from __future__ import annotations

import argparse

from harness.conformance import command as conformance
from harness.port import command as port
from lockstep.names import package


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {package()}", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    conformance.add_to(commands)
    port.add_to(commands)
    options, others = parser.parse_known_args(arguments)
    return int(options.run(options, others))
