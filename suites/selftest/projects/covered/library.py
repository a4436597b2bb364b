"""Lines that run in the controller, on one rank, before a rank is killed, and never."""

import contextlib


def in_the_controller():
    return "a line of the controller's"


def on_rank(rank):
    if rank == 1:
        return "a line of rank 1's"
    return "a line of rank 0's"


def before_the_end(rank):
    if rank == 1:
        return "a line that ran in the test before another rank was killed"
    return "a line that ran in the test before this rank was killed"


def after_a_property(holds):
    with contextlib.suppress(Exception):
        holds()
    return "a line behind the examples of a property"


def never():
    return "a line that never runs"
