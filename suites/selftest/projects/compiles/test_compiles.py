import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.ranks(2)


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


def test_frames(compiles, world):
    def double(x):
        return (x * 2).sum()

    compiled = torch.compile(double, backend="eager")
    compiled(torch.ones(3))
    (frame,) = compiles.graphs
    assert frame.function == "double"
    assert frame.line == f"test_compiles.py:{double.__code__.co_firstlineno}"
    assert frame.ops == 2
    assert compiles.breaks == compiles.recompilations == ()
    assert compiles.seconds > 0
    with compiles.assert_nothing_compiled():
        compiled(torch.ones(3))
    compiles.assert_none_recompiled()


def test_a_slice_of_a_batch(compiles, world):
    mine = torch.ones(2 * world.size, 3).chunk(world.size)[world.rank]  # its storage offset is the rank's
    torch.compile(lambda x: x * 2, backend="eager", dynamic=True)(mine)
    assert len(compiles.graphs) == 1


def test_a_break(compiles):
    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    torch.compile(broken, backend="eager")(torch.ones(3))
    (found,) = compiles.breaks
    assert found.line == f"test_compiles.py:{broken.__code__.co_firstlineno + 2}"
    assert found.reason == "Call to `torch._dynamo.graph_break()`: User-inserted graph break. Message: None"
    assert [frame.ops for frame in compiles.graphs] == [1, 1]


def test_a_break_in_a_hook(compiles):
    def hook(module, args):
        torch._dynamo.graph_break()

    model = nn.Sequential(nn.Linear(2, 2), Doubled())
    model[1].register_forward_pre_hook(hook)
    torch.compile(model, backend="eager")(torch.ones(1, 2))
    assert {found.line for found in compiles.breaks} == {
        f"test_compiles.py:{hook.__code__.co_firstlineno + 1}"
    }


def test_a_recompilation_in_each_step(compiles):
    def stepped(x, number):
        return x * number

    compiled = torch.compile(stepped, backend="eager", dynamic=False)
    for number in range(3):
        compiled(torch.ones(2), number)
    assert len(compiles.recompilations) == 2
    compiles.assert_none_recompiled()


def test_few_shapes(compiles):
    """The second shape makes the dimension dynamic; no other is compiled again."""
    compiled = torch.compile(Doubled(), backend="eager")
    for rows in (2, 3, 8, 5):
        compiled(torch.ones(rows, 4))
    assert len(compiles.graphs) == 2


def test_a_dynamic_dimension(compiles):
    compiled = torch.compile(Doubled(), backend="eager")
    for rows in (2, 3, 64, 5):
        batch = torch.ones(rows, 4)
        torch._dynamo.mark_dynamic(batch, 0)
        compiled(batch)
    assert len(compiles.graphs) == 1


def test_many_shapes(compiles):
    """Numbers of dimensions, and sizes of 1, are compiled each, up to torch's limit of eight."""
    compiled = torch.compile(Doubled(), backend="eager")
    for dims in range(1, 12):
        compiled(torch.ones((2,) * dims))
    assert len(compiles.graphs) == torch._dynamo.config.recompile_limit == 8


def test_something_new(compiles):
    compiled = torch.compile(Doubled(), backend="eager", dynamic=False)
    compiled(torch.ones(2))
    with compiles.assert_nothing_compiled():
        compiled(torch.ones(2, 1))


def test_a_shape_of_one_rank(compiles, world):
    def summed(x):
        return x.sum()

    compiled = torch.compile(summed, backend="eager", dynamic=False)
    compiled(torch.ones(4))
    if world.rank == 1:  # data of this rank alone
        compiled(torch.ones(5))


def test_a_constant_of_one_rank(compiles, world):
    def scaled(x):
        return x * (world.rank + 2)

    torch.compile(scaled, backend="eager")(torch.ones(3))


def test_a_constant_that_ranks_may_have(compiles, world):
    compiles.ranks_may_differ("each rank is a stage of its own")
    torch.compile(lambda x: x * (world.rank + 2), backend="eager")(torch.ones(3))


def test_a_break_of_one_rank(compiles, world):
    def broken(x):
        if world.rank == 1:
            torch._dynamo.graph_break()  # on this rank alone
        return x + 1

    torch.compile(broken, backend="eager")(torch.ones(3))


def test_a_hang_of_one_rank(compiles, world):
    def before_the_hang(x):
        return x + 1 if world.rank == 0 else x + 2

    torch.compile(before_the_hang, backend="eager")(torch.ones(3))
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(1))


def test_a_rank_that_fails(compiles, world):
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    dist.barrier()  # a rank that is not done when another fails is interrupted
    assert world.rank == 0


@pytest.mark.parametrize("number", range(3))
def test_compiled_again_in_each_test(compiles, number):
    torch.compile(Doubled(), backend="eager")(torch.ones(3))
    (frame,) = compiles.graphs
    assert (frame.function, frame.recompiled, frame.number) == ("forward", "", "0/0")


def test_an_unknown_backend(compiles):
    torch.compile(Doubled(), backend="lighning")(torch.ones(3))


def test_nothing_compiled(compiles):
    assert compiles.frames == compiles.breaks == ()
    assert (compiles.cache_hits, compiles.cache_misses, compiles.seconds) == (0, 0, 0)


def test_no_reason(compiles):
    compiles.ranks_may_differ(" ")
