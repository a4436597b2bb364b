"""Functions that processes run."""


def on_a_warm_rank(rank):
    return rank


def in_its_own_process(rank):
    return rank


def never_called():
    return 0
