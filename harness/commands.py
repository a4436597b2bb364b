"""The commands besides running pytest: `python -m lockstep`. Must not import torch."""

from __future__ import annotations

import argparse

from lockstep.doctor import command as doctor
from lockstep.features import feature_commands


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m lockstep", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add_to(commands)
    if arguments[:1] != ["doctor"]:  # which runs where something is missing that the others import
        from lockstep.conformance import command as conformance
        from lockstep.port import command as port

        for command in (conformance, port, *feature_commands()):
            command.add_to(commands)
    options, others = parser.parse_known_args(arguments)
    return int(options.run(options, others))
