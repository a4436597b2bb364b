"""The mark `ranks`: its meaning, and the errors of marks and options that cannot be satisfied."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.marker import MarkError, RanksMark, read_mark, size_of
from suites.selftest.project import copy_project
from suites.selftest.warm_pytest import run_module


def mark_of(config: pytest.Config, *args: Any, **kwargs: Any) -> RanksMark | None:
    """Read a mark without a session: a node is whatever can name its marks."""
    mark = pytest.mark.ranks(*args, **kwargs).mark
    return read_mark(SimpleNamespace(config=config, iter_markers_with_node=lambda name: iter([(None, mark)])))


@pytest.fixture
def no_gpus(pytester: pytest.Pytester) -> None:
    """Put a torch in place of the real one that finds none: so it is on every machine, and quick."""
    torch = pytester.mkpydir("torch")
    (torch / "__init__.py").write_text(
        "class cuda:\n    device_count = staticmethod(lambda: 0)\n\nget_device_module = {'cuda': cuda}.get\n"
    )
    (torch / "distributed.py").write_text("get_default_backend_for_device = {'cuda': 'nccl'}.get\n")


# What it says


def test_a_mark_is_read_with_its_options(pytestconfig: pytest.Config) -> None:
    mark = mark_of(pytestconfig, 2, 4, backend="gloo", fresh=True, timeout=1.5)
    assert mark == RanksMark((2, 4), "gloo", True, 1.5)


@pytest.mark.parametrize(
    ("sizes", "given", "size"),
    [((3,), {}, 3), ((3,), {"ranks_size": 3}, 3), ((2, 4), {"ranks_size": 4}, 4)],
)
def test_an_item_has_the_size_that_its_parameter_chose(
    sizes: tuple[int, ...], given: dict[str, int], size: int
) -> None:
    item: Any = SimpleNamespace(callspec=SimpleNamespace(params=given))
    assert size_of(item, RanksMark(sizes)) == size
    assert size_of(SimpleNamespace(), RanksMark((3,))) == 3  # type: ignore[arg-type]


def test_an_item_whose_parameter_chose_no_size_of_the_mark_is_refused() -> None:
    item: Any = SimpleNamespace(callspec=SimpleNamespace(params={"ranks_size": 2}))
    with pytest.raises(MarkError, match=r"^ranks\(3\) on one parameter of a test whose own mark has several"):
        size_of(item, RanksMark((3,)))
    with pytest.raises(MarkError, match=r"^ranks\(4, 8\): several world sizes work only on a test function"):
        size_of(item, RanksMark((4, 8)))
    with pytest.raises(MarkError, match=r"^ranks\(4, 8\): several world sizes work only on a test function"):
        size_of(SimpleNamespace(), RanksMark((4, 8)))  # type: ignore[arg-type]


def test_the_mark_of_a_parameter_is_nearer_than_all_others(pytestconfig: pytest.Config) -> None:
    marks = [pytest.mark.ranks(2).mark, pytest.mark.ranks(3).mark, pytest.mark.xfail.mark]
    node = SimpleNamespace(
        config=pytestconfig,
        callspec=SimpleNamespace(marks=marks),
        iter_markers_with_node=lambda name: iter([(None, pytest.mark.ranks(4).mark)]),
    )
    assert read_mark(node) == RanksMark((3,))
    node.callspec.marks = marks[2:]
    assert read_mark(node) == RanksMark((4,))


def test_the_mark_of_a_class_is_nearer_than_those_of_its_bases(pytestconfig: pytest.Config) -> None:
    class Base:
        pytestmark = pytest.mark.ranks(2)

    class Slow(Base):
        pytestmark = [pytest.mark.xfail]  # noqa: RUF012

    class Own(Slow):
        pytestmark = [pytest.mark.xfail, pytest.mark.ranks(3)]  # noqa: RUF012

    def read(cls: type, mark: pytest.MarkDecorator) -> RanksMark | None:
        holder: Any = object.__new__(pytest.Class)
        holder._obj = cls
        node = SimpleNamespace(
            config=pytestconfig, iter_markers_with_node=lambda name: iter([(holder, mark.mark)])
        )
        return read_mark(node)

    assert read(Own, Base.pytestmark) == RanksMark((3,))
    assert read(Slow, Base.pytestmark) == RanksMark((2,))
    assert read(Own, pytest.mark.ranks(5)) == RanksMark((5,))


def test_an_unmarked_node_has_no_mark() -> None:
    assert read_mark(SimpleNamespace(iter_markers_with_node=lambda name: iter(()))) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "ranks() needs at least one world size: write ranks(2), or ranks(2, 4) for two items"),
        ((0,), {}, "ranks(0): a world has 1 to 1000000 ranks"),
        ((2, -1), {}, "ranks(-1): a world has 1 to 1000000 ranks"),
        (("2",), {}, "ranks('2'): a world size is a whole number: write ranks(2)"),
        ((2.0,), {}, "ranks(2.0): a world size is a whole number: write ranks(2)"),
        ((10**8,), {}, "ranks(100000000): a world has 1 to 1000000 ranks"),
        ((10**30,), {}, f"ranks({10**30}): a world has 1 to 1000000 ranks"),
        ((True,), {}, "ranks(True): a world size is a whole number: write ranks(2)"),
        ((None,), {}, "ranks(None): a world size is a whole number: write ranks(2)"),
        (([2, 4],), {}, "ranks([2, 4]): a world size is a whole number: write ranks(2, 4)"),
        (((2, 4),), {}, "ranks((2, 4)): a world size is a whole number: write ranks(2, 4)"),
        ((2, "4"), {}, "ranks('4'): a world size is a whole number: write ranks(2, 4)"),
        ((4.0,), {}, "ranks(4.0): a world size is a whole number: write ranks(4)"),
        ((2, 4, 2), {}, "ranks(2, 4, 2): a world size is given twice"),
        ((2,), {"backend": "glo"}, "unknown backend 'glo'; there are gloo, nccl, shm, fake"),
        ((2,), {"backend": ["gloo"]}, "unknown backend ['gloo']; there are gloo, nccl, shm, fake"),
        (
            (2,),
            {"back": "gloo"},
            "ranks() has no option 'back'; it has backend, fresh, timeout, group, needs, as_rank, "
            "made_up_values, hosts",
        ),
        ((2,), {"fresh": "yes"}, "ranks(fresh='yes'): fresh is True or False"),
        ((2,), {"group": None}, "ranks(group=None): group is True or False"),
        (
            (2,),
            {"group": False, "backend": "fake"},
            "ranks(group=False): a fake world always has its group; leave out backend='fake'",
        ),
        (
            (2,),
            {"backend": "cpu:"},
            "backend 'cpu:': write DEVICE:BACKEND, with a comma between two: cpu:gloo,cuda:nccl",
        ),
        (
            (2,),
            {"backend": "cpu:gloo, cuda:nccl"},
            "backend 'cpu:gloo, cuda:nccl': write DEVICE:BACKEND, with a comma between two: "
            "cpu:gloo,cuda:nccl",
        ),
        (
            (2,),
            {"backend": "cpu:gloo,cuda:mpi"},
            "backend 'cpu:gloo,cuda:mpi': unknown backend 'mpi'; there are gloo, nccl, shm, fake",
        ),
        ((2,), {"backend": "cpu:nccl"}, "backend 'cpu:nccl': nccl works on cuda, not on 'cpu'"),
        ((2,), {"backend": "tpu:gloo"}, "backend 'tpu:gloo': gloo works on cpu and cuda, not on 'tpu'"),
        ((2,), {"backend": "cpu:gloo,cpu:shm"}, "backend 'cpu:gloo,cpu:shm': names cpu twice"),
        (
            (2,),
            {"backend": "cpu:fake"},
            "backend 'cpu:fake': a fake world has no other backend: write 'fake'",
        ),
        ((2,), {"timeout": 0}, "ranks(timeout=0): a timeout is a number of seconds above 0, at most 1000000"),
        (
            (2,),
            {"timeout": "5"},
            "ranks(timeout='5'): a timeout is a number of seconds above 0, at most 1000000",
        ),
        (
            (2,),
            {"timeout": True},
            "ranks(timeout=True): a timeout is a number of seconds above 0, at most 1000000",
        ),
        (
            (2,),
            {"timeout": float("nan")},
            "ranks(timeout=nan): a timeout is a number of seconds above 0, at most 1000000",
        ),
        (
            (2,),
            {"timeout": float("inf")},
            "ranks(timeout=inf): a timeout is a number of seconds above 0, at most 1000000",
        ),
        (
            (2,),
            {"timeout": 10**400},
            f"ranks(timeout=1{'0' * 59}... (401 characters)): a timeout is a number of seconds above 0, "
            "at most 1000000",
        ),
        ((2,), {"needs": [["x"]]}, "ranks(needs=[['x']]): needs is a tuple of words of: values"),
        ((2,), {"backend": ""}, "unknown backend ''; there are gloo, nccl, shm, fake"),
        ((2,), {"needs": ("value",)}, "ranks(needs=('value',)): needs is a tuple of words of: values"),
        ((2,), {"needs": "values"}, "ranks(needs='values'): needs is a tuple of words of: values"),
    ],
)
def test_an_invalid_mark_says_what_to_write(
    pytestconfig: pytest.Config, args: tuple[Any, ...], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(MarkError) as caught:
        mark_of(pytestconfig, *args, **kwargs)
    assert str(caught.value) == message


def test_an_int_without_digits_is_refused_by_its_kind(pytestconfig: pytest.Config) -> None:
    """Python converts no int of more than 4,300 digits to text, and raises in the middle of a message."""
    with pytest.raises(
        MarkError, match=r"^ranks\(<int without a repr: .*\): a world has 1 to 1000000 ranks$"
    ):
        mark_of(pytestconfig, 10**5000)
    with pytest.raises(MarkError, match=r"^ranks\(timeout=<int without a repr: .*\): a timeout is a number"):
        mark_of(pytestconfig, 2, timeout=10**5000)


# What is collected, and what is refused then


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    path = copy_project("marks", tmp_path_factory.mktemp("collected"))
    return run_module("pytest", "--collect-only", "-q", cwd=path)


def node_ids(collected: subprocess.CompletedProcess[str], file: str) -> list[str]:
    prefix = f"test_{file}.py::"
    lines = collected.stdout.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix) and ": " not in line]


def test_several_sizes_are_several_items_with_readable_ids(
    collected: subprocess.CompletedProcess[str],
) -> None:
    assert node_ids(collected, "sizes") == [
        "test_x[1-rank]",
        "test_x[2-ranks]",
        "test_y[half-2-ranks]",
        "test_y[half-4-ranks]",
        "test_y[float-2-ranks]",
        "test_y[float-4-ranks]",
        "TestZ::test_without_the_fixture[2-ranks]",
        "TestZ::test_without_the_fixture[4-ranks]",
    ]


def test_one_size_leaves_ids_alone_and_the_nearest_mark_wins(
    collected: subprocess.CompletedProcess[str],
) -> None:
    assert node_ids(collected, "nearest") == [
        "test_of_the_module[3-ranks]",
        "test_of_the_module[5-ranks]",
        "TestClass::test_of_the_class",
        "TestClass::test_parametrized[1]",
        "TestClass::test_of_the_function[4-ranks]",
        "TestClass::test_of_the_function[6-ranks]",
        "TestDerived::test_of_the_class[2-ranks]",
        "TestDerived::test_of_the_class[8-ranks]",
        "TestDerived::test_parametrized[1-2-ranks]",
        "TestDerived::test_parametrized[1-8-ranks]",
        "TestDerived::test_of_the_function[4-ranks]",
        "TestDerived::test_of_the_function[6-ranks]",
        "TestInheriting::test_parametrized[1-2-ranks]",
        "TestInheriting::test_parametrized[1-8-ranks]",
        "TestInheriting::test_of_the_function[4-ranks]",
        "TestInheriting::test_of_the_function[6-ranks]",
        "TestInheriting::test_of_the_class[2-ranks]",
        "TestInheriting::test_of_the_class[8-ranks]",
    ]


def test_a_broken_mark_is_an_error_that_names_the_test(
    collected: subprocess.CompletedProcess[str],
) -> None:
    assert collected.returncode == pytest.ExitCode.INTERRUPTED
    assert node_ids(collected, "sound") == ["test_x"]
    lines = collected.stdout.splitlines()
    (none,) = (line for line in lines if line.startswith("test_none.py::test_x: "))
    assert none.startswith("test_none.py::test_x: ranks() needs at least one world size: write ranks(2)")
    assert "test_unknown.py::test_x: unknown backend 'mpi'; there are gloo, nccl, shm, fake" in lines
    assert "test_zero.py::test_x: ranks(0): a world has 1 to 1000000 ranks" in lines
    assert [node_ids(collected, file) for file in ("none", "unknown", "zero", "late_world")] == [[]] * 4
    assert ", 4 errors" in lines[-1]
    assert "Traceback" not in collected.stdout


def test_the_fixture_world_without_the_mark_says_what_to_write(
    collected: subprocess.CompletedProcess[str],
) -> None:
    assert (
        "test_late_world.py::TestC::test_x: the fixture `world` exists only on ranks: mark the test, "
        "its class or its module with pytest.mark.ranks(2)"
    ) in collected.stdout.splitlines()


# What is run, and what is refused then


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("letter", "ab")
def test_each_item_runs_on_as_many_ranks_as_its_id_says(
    world: Any, letter: str, request: pytest.FixtureRequest
) -> None:
    import torch.distributed as dist

    size: int = request.node.callspec.params["ranks_size"]
    assert request.node.name.endswith(f"[{letter}-{size}-rank{'s' if size > 1 else ''}]")
    assert dist.get_world_size() == world.size == size
    assert world.gather(world.rank) == list(range(size))


@pytest.mark.ranks(2)
def test_an_item_of_one_size_runs_on_as_many_ranks(world: Any) -> None:
    assert world.gather(world.rank) == [0, 1]


def test_a_mark_on_a_parameter_is_nearer_than_that_of_the_test(pytester: pytest.Pytester) -> None:
    copy_project("sizes", pytester.path)
    result = pytester.runpytest_subprocess(timeout=180)
    result.assert_outcomes(passed=5, errors=3)
    several = "ranks(5) on one parameter of a test whose own mark has several sizes: write the mark on each *"
    result.stdout.fnmatch_lines(
        [
            "* ERROR at setup of test_of_parameters[[]1[]] *",
            "the fixture `world` exists only on ranks: mark the test with pytest.mark.ranks(2)",
            "* ERROR at setup of test_refused[[]5-2-ranks[]] *",
            several,
            "* ERROR at setup of test_refused[[]5-4-ranks[]] *",
            several,
        ]
    )


def test_fixtures_of_ranks_requested_late_fail_with_a_remedy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_world(request):
            request.getfixturevalue("world")

        def test_subtests(run_subtests):
            pass
        """
    )
    result = pytester.runpytest_subprocess(timeout=180)
    result.assert_outcomes(failed=1, errors=1)
    remedy = "exists only on ranks: mark the test with pytest.mark.ranks(2)"
    result.stdout.fnmatch_lines_random(
        [f"the fixture `world` {remedy}", f"the fixture `run_subtests` {remedy}"]
    )


def test_a_mark_that_breaks_after_collection_fails_its_item(pytester: pytest.Pytester) -> None:
    copy_project("late_marks", pytester.path)
    result = pytester.runpytest_subprocess("-n1", timeout=180)
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "ranks(2, 4): several world sizes work only on a test function; give one size here",
            "ranks(0): a world has 1 to 1000000 ranks",
        ]
    )


def test_the_mark_is_documented_where_pytest_lists_marks(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--markers", timeout=180)
    signature = "*sizes, backend=None, fresh=False, timeout=None, group=True, needs=('values',)"
    result.stdout.fnmatch_lines([f"@pytest.mark.ranks({signature}): *"])


# What is refused on the command line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--backend=mpi"], "--backend: unknown backend 'mpi'; there are gloo, nccl, shm, fake"),
        (["--backend=nccl", "--device=cpu"], "--backend nccl does not work with --device cpu"),
        (["-o", "ranks_start_method=fork"], "ranks_start_method = 'fork': choose forkserver, spawn"),
        (["--backend=cpu:nccl"], "--backend: backend 'cpu:nccl': nccl works on cuda, not on 'cpu'"),
        (["--backend=cpu:gloo", "--device=cuda"], "--backend cpu:gloo does not work with --device cuda"),
        (["-n2", "--backend=mpi"], "--backend: unknown backend 'mpi'; there are gloo, nccl, shm, fake"),
    ],
)
def test_an_invalid_option_is_one_line_of_usage_error(
    pytester: pytest.Pytester, args: list[str], message: str
) -> None:
    pytester.makepyfile("import pytest\n\n@pytest.mark.ranks(2)\ndef test_x(world): pass")
    result = pytester.runpytest_subprocess(*args, timeout=180)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == f"ERROR: {message}"


@pytest.mark.usefixtures("no_gpus")
@pytest.mark.parametrize("option", ["--backend=nccl", "--device=cuda"])
def test_gpus_on_a_machine_without_any_are_a_usage_error(pytester: pytest.Pytester, option: str) -> None:
    pytester.makepyfile("import pytest\n\n@pytest.mark.ranks(2)\ndef test_x(world): pass")
    result = pytester.runpytest_subprocess(option, timeout=180)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == (
        f"ERROR: {option.replace('=', ' ')}: this machine has no GPU; run with --backend gloo --device cpu"
    )


@pytest.mark.ranks(2, backend="cpu:gloo")
def test_a_backend_is_named_with_its_device(world: Any) -> None:
    import torch.distributed as dist

    assert dist.get_backend() == world.backend == "cpu:gloo"
    assert world.gather(world.rank) == [0, 1]


@pytest.mark.ranks(2, backend="cpu:shm")
def test_a_backend_of_a_module_is_named_with_its_device(world: Any) -> None:
    world.barrier()
    assert world.gather(world.rank) == [0, 1]


@pytest.mark.usefixtures("no_gpus")
def test_a_backend_for_gpus_beside_one_for_the_cpu_needs_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        'import pytest\n\n@pytest.mark.ranks(2, backend="cpu:gloo,cuda:nccl")\ndef test_x(world): pass'
    )
    result = pytester.runpytest_subprocess("-rs", timeout=180)
    result.stdout.fnmatch_lines(
        ["SKIPPED*: 2 ranks under cpu:gloo,cuda:nccl need 2 GPUs, this machine has 0"]
    )
    result = pytester.runpytest_subprocess("-rs", "--device=cpu", timeout=180)
    result.stdout.fnmatch_lines(["SKIPPED*: the backend cpu:gloo,cuda:nccl does not work with --device cpu"])


def test_a_test_for_another_device_than_the_one_chosen_skips(pytester: pytest.Pytester) -> None:
    pytester.makepyfile('import pytest\n\n@pytest.mark.ranks(2, backend="nccl")\ndef test_x(world): pass')
    result = pytester.runpytest_subprocess("-rs", "--device=cpu", timeout=180)
    result.stdout.fnmatch_lines(["SKIPPED*.py:3: the backend nccl does not work with --device cpu"])


@pytest.mark.usefixtures("no_gpus")
def test_a_test_that_needs_more_gpus_skips_and_says_so(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ranks(2, 4, backend="nccl")
        def test_x(world): pass
        """
    )
    result = pytester.runpytest_subprocess("-rs", timeout=180)
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED*.py:3: 2 ranks under nccl need 2 GPUs, this machine has 0",
            "SKIPPED*.py:3: 4 ranks under nccl need 4 GPUs, this machine has 0",
        ]
    )


def test_a_test_that_needs_what_the_backend_lacks_skips(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from lockstep.backends.gloo import Gloo

        Gloo.lacks = frozenset({"values"})
        """
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.ranks(1)
        def test_values(world): pass

        @pytest.mark.ranks(1, needs=())
        def test_shapes(world): pass

        @pytest.mark.ranks(1, backend="gloo")
        def test_of_that_backend(world): pass
        """
    )
    result = pytester.runpytest_subprocess("-rs", "--backend=gloo", timeout=180)
    result.assert_outcomes(skipped=1, passed=2)
    why = "the test needs that a rank receives what the others have sent, which gloo does not offer"
    result.stdout.fnmatch_lines([f"SKIPPED*.py:3: {why}"])
