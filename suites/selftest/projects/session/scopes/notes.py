"""Notes of what happened in each rank, in order."""


def note(world, what):
    with open(f"rank-{world.rank}-of-{world.size}.txt", "a") as file:
        print(what, file=file)
